"""Speed of raytrec's computation on a device, compared with the device's limits.

    python benchmarks/gpu.py [--device auto|cpu|cuda] [--only lookup,dense,step,kinds,host,ingest,exchange]

The model is MLPerf's DLRM-DCNv2 as in jobs/criteo_1tb_8xa100.yaml, on one device. The cases:

lookup   FBGEMM's kernels as TorchRec calls them: lookup and Adagrad's update of 26 tables of dim 128; with
         1 id per feature, and with MLPerf's 214 ids per row
dense    forward, backward and optimizer of the dense layers: fp32, tf32, bf16, and the last two compiled
step     raytrec's whole training step on batches in pinned host memory: train.matmul fp32, tf32, bf16
kinds    whole steps of other models in tf32: DLRM with and without managed ids, SASRec and HSTU
host     steps of one row, which are limited by the host: eager and compiled
exchange only the collectives of several ranks, NCCL or gloo: all-to-all of vectors, all-reduce of gradients
ingest   raytrec's stream from Parquet to batches on the device, and the copy to the device alone

The sides of a case take turns in one process, and the median over turns is reported. The least time follows
from the device's data sheet (its peaks without sparsity): FLOPs of matrix products ÷ their peak + bytes of
all other operations ÷ memory bandwidth; for ingest, bytes ÷ bandwidth of the link to the host. A CPU has
no such sheet: its peaks are measured and sizes are small, which only shows that the benchmark runs.
"""

from __future__ import annotations

import gc
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import harness
import torch
import torch.distributed as dist
import typer
from harness import Grid, run_raytrec, seconds_of, take_turns
from rank_group import join_group, on_ranks
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from raytrec.compat.torchrec_ import iterate_sharded_kernels
from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema
from raytrec.data.batch import Batch
from raytrec.data.read_plans import ReadPlan
from raytrec.models import build_model
from raytrec.planning.machines import find_gpu
from raytrec.worker.build import build_step
from raytrec.worker.process import numerics
from raytrec.worker.step import Step

DENSE, FEATURES = 13, 26
# Number of ids per feature in a row of MLPerf's data: 214 in total.
MULTI_HOT = [3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1]
TURN_S = 0.3
PRECISIONS = ("fp32", "tf32", "bf16")


@dataclass(frozen=True)
class Peaks:
    """Maximum compute rates and bandwidths of a device.

    Attributes:
        fp32: FLOP/s of fp32 matrix products, without sparsity.
        tf32: FLOP/s of tf32 matrix products, without sparsity.
        bf16: FLOP/s of bf16 matrix products, without sparsity.
        memory: Memory bandwidth in bytes/s.
        link: Bandwidth of the link to the host in one direction, in bytes/s.
        measured: True if the rates were measured because there is no data sheet.
    """

    fp32: float
    tf32: float
    bf16: float
    memory: float
    link: float
    measured: bool = False


def peaks_of(name: str) -> Peaks | None:
    """Return the limits of a device, such as "NVIDIA H100 80GB HBM3", or None if it is unknown."""
    gpu = find_gpu(name)
    if gpu is None:
        return None
    return Peaks(*(each * 1e12 for each in (gpu.fp32, gpu.tf32, gpu.bf16)), gpu.memory * 1e9, gpu.pcie * 1e9)


@dataclass(frozen=True)
class Size:
    """Sizes of the batches, tables and layers that the cases use on a device.

    Attributes:
        batches: Batch sizes, in rows, with which cases are measured.
        dim: Width of the tables.
        lookup_rows: Number of rows per table where kernels are measured alone.
        step_rows: Number of rows per table in whole steps.
        layers: Section `model` of the configuration.
        turn_s: Duration of a turn in seconds.
    """

    batches: tuple[int, ...]
    dim: int
    lookup_rows: int
    step_rows: int
    layers: dict[str, Any]
    turn_s: float = TURN_S


MLPERF = {
    "name": "dcn",
    "bottom_mlp": [512, 256, 128],
    "cross_layers": 3,
    "cross_rank": 512,
    "top_mlp": [1024, 1024, 512, 256],
}
WHOLE = Size((8192, 65536), 128, 1_000_000, 200_000, MLPERF)
SMALL = Size((64,), 8, 500, 500, MLPERF | {"bottom_mlp": [16, 8], "cross_rank": 8, "top_mlp": [16]}, 0.02)


def size_for(device: torch.device) -> Size:
    """Return SMALL for a CPU, or sizes with which tables and state take at most 40 % of a GPU's memory."""
    if device.type == "cpu":
        return SMALL
    memory = torch.cuda.get_device_properties(device).total_memory
    rows = int(0.4 * memory / (FEATURES * WHOLE.dim * 2 * 4))
    batches = WHOLE.batches if memory > 40e9 else (8192,)
    return replace(WHOLE, batches=batches, lookup_rows=min(WHOLE.lookup_rows, rows), step_rows=min(200_000, rows // 4))


@dataclass
class Side:
    """One of the variants that a benchmark case compares.

    Attributes:
        name: Name in the table.
        steps: Function that starts a number of steps; the device may finish after the function returns.
        rows: Number of rows per step.
        least_s: Minimum duration of a step in seconds; None if unknown.
        source: Batches of the case `ingest`, so that another variant can read from the same iterator; None for
            other cases.
        step: Step that counts its operations; None for other models.
    """

    name: str
    steps: Callable[[int], None]
    rows: int
    least_s: float | None
    source: Iterator[Batch] | None = None
    step: Step | None = None


@dataclass(frozen=True)
class Figures:
    """Measurements of a side.

    Attributes:
        ms: Median milliseconds per step.
        rows_per_s: Rows per second.
        least_ms: Minimum milliseconds per step; None if unknown.
        share: Minimum ÷ median.
        tflops_per_s: 10¹² operations of matrix products per second; None if they are not counted.
    """

    ms: float
    rows_per_s: float
    least_ms: float | None
    share: float | None
    tflops_per_s: float | None = None


def measure(sides: list[Side], device: torch.device, rounds: int, turn_s: float) -> dict[str, Figures]:
    """Measure sides in turns; return name → measurements."""
    turns = {}
    for side in sides:
        side.steps(3)  # compiles and fills caches
        cost = timed(lambda side=side: side.steps(3), device) / 3
        count = max(1, min(200, int(turn_s / cost)))
        turns[side.name] = lambda side=side, n=count: timed(lambda: side.steps(n), device) / n
    seconds, out = take_turns(turns, rounds), {}
    for side in sides:
        cost, least = median(seconds[side.name]), side.least_s
        flops = side.step and side.step.flops
        rates = least and least * 1e3, least and least / cost, flops and flops / cost / 1e12
        out[side.name] = Figures(cost * 1e3, side.rows / cost, *rates)
    return out


def timed(call: Callable[[], Any], device: torch.device) -> float:
    """Call a function, and return the seconds until the device has finished."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    return seconds_of(lambda: (call(), wait()))


def free(device: torch.device) -> None:
    """Release the memory of previous sides, whose sharded models are reference cycles."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


# The model and its batches


def schema_of(rows: int, dim: int) -> Schema:
    """Return a schema with 13 dense columns and 26 features, each with its own table."""
    names = [f"C{i + 1}" for i in range(FEATURES)]
    return Schema.parse(
        {
            "labels": ["y"],
            "dense": [f"I{i + 1}" for i in range(DENSE)],
            "sparse": {name: {"table": name} for name in names},
            "tables": {name: {"rows": rows, "dim": dim} for name in names},
        },
        "benchmark",
    )


def config_of(size: Size, batch: int, **train: Any) -> RunConfig:
    """Return a configuration with the job's model and optimizers, on one worker."""
    return RunConfig.model_validate(
        {
            "data": {"train": "unused/train", "global_batch_size": batch},
            "scaling": {"num_workers": 1},
            "model": size.layers,
            "optim": {"embeddings": {"name": "adagrad", "lr": 0.005}, "dense": {"name": "adagrad", "lr": 0.005}},
            "plan": {"sharding_types": ["table_wise"]},
            "train": train,
        }
    )


def batch_of(rows: int, table_rows: int, ids: list[int], seed: int = 0) -> Batch:
    """Return random rows with ids[i] ids for feature i, in pinned memory if there is a GPU."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.tensor(ids, dtype=torch.int32).repeat_interleave(rows)
    values = torch.randint(0, table_rows, (int(lengths.sum()),), generator=g)
    sparse = KeyedJaggedTensor([f"C{i + 1}" for i in range(FEATURES)], values, lengths=lengths)
    labels = torch.randint(0, 2, (rows, 1), generator=g).float()
    batch = Batch(torch.randn(rows, DENSE, generator=g), sparse, labels, torch.ones(rows), rows)
    return batch.pin_memory() if torch.cuda.is_available() else batch


# The minimum time of a step


def matmul_flops(model: nn.Module) -> int:
    """Return the FLOPs per row of matrix products, for forward and the gradients of weights and inputs."""
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    first = [layer for layer in layers if layer.in_features == DENSE]
    each = [2 * layer.in_features * layer.out_features for layer in layers]
    return 3 * sum(each) - sum(2 * layer.in_features * layer.out_features for layer in first)


def other_bytes(model: nn.Module, width: int, cross_layers: int) -> int:
    """Return the bytes per row that operations other than matrix products read and write.

    At these shapes, the memory traffic of matrix products is hidden by their arithmetic.

    A cross layer x ← x₀ ⊙ y + x reads 3 vectors of x₀'s width and writes 1. Its backward twice reads 2 and
    writes 1, and adds to two gradients, 3 vectors each. x₀ is concatenated and split. A ReLU reads 3 and writes 2.
    """
    hidden = sum(
        m.out_features for m in model.modules() if isinstance(m, nn.Linear) and m.out_features not in (1, width)
    )
    return 4 * (cross_layers * (4 + 6 + 6) * width + 4 * width + 5 * hidden)


def lookup_bytes(ids: int, dim: int) -> int:
    """Return the bytes that a row's lookups and updates read and write.

    For each id, the lookup reads a vector, and the update reads and writes the weights and Adagrad's sums. For
    each feature, the pooled vector is written and its gradient is read.
    """
    return 4 * dim * (ids * (1 + 2 + 2) + FEATURES * 2)


def dense_least_s(size: Size, model: nn.Module, rows: int, precision: str, peaks: Peaks | None) -> float | None:
    """Return the minimum seconds of the dense layers, or None without `peaks`; bf16 values take 2 bytes."""
    if peaks is None:
        return None
    width = size.layers["bottom_mlp"][-1] + FEATURES * size.dim
    traffic = other_bytes(model, width, size.layers["cross_layers"]) / (2 if precision == "bf16" else 1)
    return rows * (matmul_flops(model) / getattr(peaks, precision) + traffic / peaks.memory)


# The cases


def lookups(size: Size, batch: int, device: torch.device, peaks: Peaks | None) -> list[Side]:
    """Return sides that run only FBGEMM's kernels."""
    config, schema = config_of(size, batch), schema_of(size.lookup_rows, size.dim)
    step, _ = build_step(config, schema, device)
    (kernel,) = iterate_sharded_kernels(step.model)
    sides = []
    for name, ids in (("1 id per feature", [1] * FEATURES), ("MLPerf's 214 ids per row", MULTI_HOT)):
        sparse = batch_of(batch, size.lookup_rows, ids).sparse.to(device)
        gradient = torch.full((batch, FEATURES * size.dim), 1e-3, device=device)

        def steps(count: int, sparse=sparse, gradient=gradient) -> None:
            for _ in range(count):
                kernel(sparse).backward(gradient)

        least = peaks and batch * lookup_bytes(sum(ids), size.dim) / peaks.memory
        sides.append(Side(name, steps, batch, least))
    return sides


def dense(size: Size, batch: int, device: torch.device, peaks: Peaks | None, compiled: bool = True) -> list[Side]:
    """Return sides that train only the dense layers, on random embeddings."""
    schema = schema_of(1, size.dim)
    embeddings = {f: torch.randn(batch, size.dim, device=device).requires_grad_() for f in schema.sparse}
    inputs = torch.randn(batch, DENSE, device=device)
    labels = torch.randint(0, 2, (batch,), device=device).float()
    variants = [(precision, False) for precision in PRECISIONS]
    variants += [("tf32", True), ("bf16", True)] if compiled else []
    sides = []
    for precision, is_compiled in variants:
        config = config_of(size, batch, matmul=precision)
        model = build_model(schema, config.model).to(device)
        least = dense_least_s(size, model, batch, precision, peaks)
        if is_compiled:
            model.compile()
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.005)

        def steps(count: int, model=model, optimizer=optimizer, train=config.train, bf16=precision == "bf16") -> None:
            with numerics(train, device):
                for _ in range(count):
                    optimizer.zero_grad()
                    with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                        logits = model(inputs, embeddings)
                    nn.functional.binary_cross_entropy_with_logits(logits.float(), labels).backward()
                    for values in embeddings.values():
                        values.grad = None
                    optimizer.step()

        sides.append(Side(precision + ", compiled" * is_compiled, steps, batch, least))
    return sides


def whole_steps(
    size: Size, batch: int, device: torch.device, peaks: Peaks | None, precisions: tuple[str, ...] = PRECISIONS
) -> list[Side]:
    """Return sides that run whole steps of `raytrec train`, without reading data."""
    sides, schema = [], schema_of(size.step_rows, size.dim)
    batches = [batch_of(batch, size.step_rows, [1] * FEATURES, seed) for seed in range(4)]
    for precision in precisions:
        step, _ = build_step(config_of(size, batch, matmul=precision), schema, device)
        model = step.model.module.head.model
        least = dense_least_s(size, model, batch, precision, peaks)
        least = least and least + batch * lookup_bytes(FEATURES, size.dim) / peaks.memory
        sides.append(Side(precision, _steps_of(step, batches), batch, least))
    return sides


def _steps_of(step: Step, batches: list[Batch]) -> Callable[[int], None]:
    def steps(count: int) -> None:
        fresh = (replace(batches[i % len(batches)]) for i in range(count))  # training changes managed ids
        for _ in step.train(fresh, count):
            pass

    return steps


def host_steps(size: Size, device: torch.device, compiled: bool) -> list[Side]:
    """Return sides that run steps of one row."""
    sides, schema = [], schema_of(size.step_rows, size.dim)
    batches = [batch_of(1, size.step_rows, [1] * FEATURES)]
    for name, is_compiled in [("eager", False), ("compiled", True)][: 1 + compiled]:
        step, _ = build_step(config_of(size, 1, matmul="tf32", compile=is_compiled), schema, device)
        sides.append(Side(name, _steps_of(step, batches), 1, None))
    return sides


LAYERS = {"name": "dlrm", "bottom_mlp": [64], "top_mlp": [64]}
NEXT_ITEM = {"negatives": "negatives", "blocks": 2, "heads": 2}


def kinds_of_steps(size: Size, batch: int, device: torch.device) -> list[Side]:
    """Return sides with plain and managed ids, and with sequence models on a tenth of the rows."""
    sides, dim = [], min(size.dim, 64)
    plain = schema_of(size.step_rows, dim).model_dump(exclude_unset=True)
    managed = plain | {"tables": {name: {**t, "ids": "managed"} for name, t in plain["tables"].items()}}
    batches = [batch_of(batch, size.step_rows, [1] * FEATURES, seed) for seed in range(4)]
    for name, values in (("plain ids", plain), ("managed ids", managed)):
        config = config_of(replace(size, layers=LAYERS | {"bottom_mlp": [64, dim]}), batch, matmul="tf32")
        step, _ = build_step(config, Schema.parse(values, "benchmark"), device)
        sides.append(Side(f"26 tables, {name}", _steps_of(step, batches), batch, None))
    rows, length = max(2, batch // 10), 50
    sequences = [sequences_of(rows, size.step_rows, length, seed) for seed in range(4)]
    for name in ("sasrec", "hstu"):
        layers = {"name": name, "max_length": length, "max_negatives": length, **NEXT_ITEM}
        config = config_of(replace(size, layers=layers), rows, matmul="tf32")
        step, _ = build_step(config, items_schema(size.step_rows, dim), device)
        title = f"{name}, {rows} rows of up to {length} ids"
        sides.append(Side(title, _steps_of(step, sequences), rows, None, step=step))
    return sides


def items_schema(rows: int, dim: int) -> Schema:
    """Return a schema with one table of items, which two features read id by id."""
    read = {"table": "item", "pooling": "sequence"}
    return Schema.parse(
        {
            "labels": ["y"],
            "dense": [],
            "sparse": {"item": {"table": "item"}, "history": read, "negatives": read},
            "tables": {"item": {"rows": rows, "dim": dim}},
        },
        "benchmark",
    )


def sequences_of(rows: int, table_rows: int, length: int, seed: int) -> Batch:
    """Return random histories of 1 to `length` ids, each with an item and an equal number of negatives."""
    g = torch.Generator().manual_seed(seed)
    own = torch.randint(1, length + 1, (rows,), generator=g, dtype=torch.int32)
    lengths = torch.cat([torch.ones_like(own), own, own])
    values = torch.randint(0, table_rows, (int(lengths.sum()),), generator=g)
    sparse = KeyedJaggedTensor(["item", "history", "negatives"], values, lengths=lengths)
    batch = Batch(torch.zeros(rows, 0), sparse, torch.ones(rows, 1), torch.ones(rows), rows)
    return batch.pin_memory() if torch.cuda.is_available() else batch


def exchange(rank: int, device: torch.device, size: Size, batch: int, world: int) -> dict[str, Figures]:
    """Measure only the collectives of a step; called on each of `world` ranks."""
    vectors = torch.randn(batch * FEATURES * size.dim // world * world, device=device)
    model = build_model(schema_of(1, size.dim), config_of(size, batch).model)
    gradients = torch.zeros(sum(p.numel() for p in model.parameters()), device=device)
    results = {}
    for name, call, tensor in (
        ("all-to-all of vectors, fp32", dist.all_to_all_single, vectors),
        ("all-to-all of vectors, bf16", dist.all_to_all_single, vectors.bfloat16()),
        ("all-reduce of dense gradients", lambda _, tensor: dist.all_reduce(tensor), gradients),
    ):
        into = torch.empty_like(tensor)
        seconds = [timed(lambda c=call, i=into, g=tensor: c(i, g), device) for _ in range(20)]
        each = median(seconds[5:])
        figures = Figures(each * 1e3, batch / each, None, None)
        results[f"{name}, {tensor.nbytes / 2**20:.1f} MiB a rank"] = figures
    return results


@contextmanager
def ingest(folder: Path, batch: int, device: torch.device, peaks: Peaks | None, readers: int) -> Iterator[list[Side]]:
    """Yield sides that read or copy one batch per step, on a local Ray cluster that runs during the block."""
    from raytrec.cluster.session import ray_session
    from raytrec.data.fragments import scan
    from raytrec.data.order import Order
    from raytrec.data.stream import Stream

    schema = Schema.load(str(folder / "schema.yaml"))
    data, cuda = scan(str(folder / "train"), ReadPlan(schema), "benchmark"), device.type == "cuda"

    def forever() -> Iterator[Batch]:
        stream = Stream(data, Order(batch, 24, "groups", 2), rank=0, world=1, readers=readers, pin_memory=cuda)
        yield from stream.epochs(1_000_000)

    with ray_session(num_cpus=readers + 1):
        reading = forever()
        one = next(reading)
        size = sum(t.numel() * t.element_size() for t in _tensors(one))
        least = peaks and size / peaks.link

        def read(count: int) -> None:
            for _ in range(count):
                next(reading).to(device, non_blocking=True)

        def copy(count: int) -> None:
            for _ in range(count):
                one.to(device, non_blocking=True)

        try:
            yield [Side("Parquet to the device", read, batch, least, reading)] + [
                Side("copy to the device alone", copy, batch, least)
            ] * cuda
        finally:
            reading.close()


def _tensors(batch: Batch) -> list[torch.Tensor]:
    sparse = batch.sparse
    return [batch.dense, batch.labels, batch.weights, sparse.values(), sparse.lengths()]


# Limits of a device without a data sheet


def measured_peaks(device: torch.device) -> Peaks:
    """Measure a CPU's peaks with matrix products that fit its caches and copies that do not."""
    a, big = torch.randn(512, 512, device=device), torch.zeros(1 << 24, device=device)
    flops = 2 * 512**3 / _fastest(lambda: a @ a, device)
    half = a.bfloat16()
    bf16 = 2 * 512**3 / _fastest(lambda: half @ half, device)
    memory = 2 * big.numel() * 4 / _fastest(big.clone, device)
    return Peaks(flops, flops, bf16, memory, memory, measured=True)


def _fastest(call: Callable, device: torch.device) -> float:
    return min(timed(call, device) for _ in range(8))


# The whole


@contextmanager
def alone(device: torch.device) -> Iterator[None]:
    """Make this process the only rank of a process group during the block."""
    with tempfile.TemporaryDirectory() as folder:
        join_group(0, 1, f"{folder}/store", device.type)
        try:
            yield
        finally:
            dist.destroy_process_group()


def run(
    device: torch.device, size: Size, only: list[str], rounds: int, data: Path, readers: int, compiled: bool
) -> tuple[dict[str, dict[str, Figures]], Peaks | None]:
    """Run the chosen cases; return {case: {side: measurements}}, and the device's maximum rates (None if unknown)."""
    peaks = peaks_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else measured_peaks(device)
    out: dict[str, dict[str, Figures]] = {}
    with alone(device):
        for batch in size.batches:
            cases = {
                "lookup": lambda batch=batch: lookups(size, batch, device, peaks),
                "dense": lambda batch=batch: dense(size, batch, device, peaks, compiled),
                "step": lambda batch=batch: whole_steps(size, batch, device, peaks),
                "kinds": lambda batch=batch: kinds_of_steps(size, batch, device),
            }
            for name, sides in cases.items():
                if name in only:
                    out[f"{name}, {batch} rows"] = measure(sides(), device, rounds, size.turn_s)
                    free(device)
        if "host" in only:
            out["host, 1 row"] = measure(host_steps(size, device, compiled), device, rounds, size.turn_s)
    world = torch.cuda.device_count() if device.type == "cuda" else 2
    if "exchange" in only and world > 1:
        for batch in size.batches:
            results = on_ranks(world, exchange, size, batch, world, device=device.type)[0]
            out[f"exchange of {world}, {batch} rows"] = results
    if "ingest" in only:
        with ingest(data, size.batches[0], device, peaks, readers) as sides:
            out[f"ingest, {size.batches[0]} rows"] = measure(sides, device, rounds, size.turn_s)
    return out, peaks


def show(results: dict[str, dict[str, Figures]], peaks: Peaks | None, name: str) -> None:
    """Print the table of all cases."""
    limits = "an unknown device"
    if peaks:
        limits = "peaks measured here" if peaks.measured else "its data sheet"
    rows, sections = [], set()
    for case, sides in results.items():
        for side, f in sides.items():
            least = f"{f.least_ms:.2f}" if f.least_ms else "?"
            share = f"{f.share:.0%}" if f.share else "?"
            rate = f"{f.tflops_per_s:.3g}" if f.tflops_per_s else ""
            rows.append([case, side, f"{f.ms:.2f}", f"{f.rows_per_s:,.0f}", rate, least, share])
        sections.add(len(rows) - 1)
    header = ("case", "side", "ms/step", "rows/s", "TFLOP/s", "minimum ms", "minimum ÷ ms")
    Grid(header, rows, f"{name}: compared with {limits}", 2, sections).show(130)


def main(
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    only: harness.Only = "lookup,dense,step,kinds,host,exchange,ingest",
    rounds: harness.Rounds = 7,
    readers: Annotated[int, typer.Option(help="Number of Ray Data tasks that read.")] = 1,
    data: Annotated[str, typer.Option(help="Folder written by `raytrec prepare synthetic`.")] = "data/ingest",
    compiled: Annotated[bool, typer.Option(help="Also compile; requires a C compiler.")] = True,
    out: Annotated[
        Path | None, typer.Option(help="Output file; default: benchmarks/results/gpu.json, only on a GPU.")
    ] = None,
) -> None:
    """Print the table, and write the results to --out or, on a GPU, to benchmarks/results/gpu.json.

    If the case `ingest` is chosen and its data is missing, the data is generated first.
    """
    warnings.simplefilter("ignore")
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    torch_device = torch.device("cuda", 0) if kind == "cuda" else torch.device("cpu")
    size, cases, folder = size_for(torch_device), harness.split(only), Path(data)
    if "ingest" in cases and not (folder / "schema.yaml").exists():
        run_raytrec("prepare", "synthetic", "--out", data, "--rows", "1250000" if kind == "cuda" else "5000")
    name = torch.cuda.get_device_name(torch_device) if kind == "cuda" else "cpu"
    results, peaks = run(torch_device, size, cases, rounds, folder, readers, compiled)
    show(results, peaks, name)
    if out := out or (harness.results_file("gpu") if kind == "cuda" else None):
        figures = {case: {side: asdict(f) for side, f in sides.items()} for case, sides in results.items()}
        about = {"device": name, "torch": torch.__version__, "rounds": rounds, "readers": readers}
        harness.keep(out, {**about, "peaks": peaks and asdict(peaks), "cases": figures})


if __name__ == "__main__":
    typer.run(main)
