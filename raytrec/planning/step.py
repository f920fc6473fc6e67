"""Memory and time of a step, part by part, from loads and rates.

Tiers: device is a GPU's memory, or on CPU main memory; host is the main memory of GPUs; disk has tables in
files. Parts of memory are added up as if all were there at once: on GPUs they belong to streams whose memory
PyTorch's allocator keeps apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema
from raytrec.config.tables import DenseOptim
from raytrec.embeddings.mapped import PLACE_BYTES, ROW_BYTES
from raytrec.embeddings.optimizers import optimizer_of
from raytrec.planning.dense_work import DenseWork
from raytrec.planning.loads import ID_BYTES, LENGTH_BYTES, VALUE_BYTES, Loads
from raytrec.planning.memory import CACHE, GIB, TIERS, Held, PlannedTable, held, map_share
from raytrec.planning.rates import COLLECTIVES, Rates

DEVICE, HOST, DISK = TIERS
IN_FLIGHT = 3  # batches in TorchRec's pipeline: the one that is trained and two that come
CONTEXT_GIB = 1.5  # of a GPU: CUDA's context with its kernels, and NCCL's buffers
# Of a rank's process: 331 MiB after importing torch and TorchRec, and what a run adds; with CUDA's libraries,
# pinned batches and Ray's worker 6 GiB.
PROCESS_GIB = {"cpu": 0.45, "cuda": 6.0}
OBJECTS_MIB = 6  # of Python, for model, plan and pipeline, with what the allocator keeps (make bench-plan)
GLOO_COPIES = 3  # in its reduce-scatter and all-gather (make bench-plan)
SORTED_BYTES = 40  # of an id in FBGEMM's update on GPUs: its row and place twice, sorted and not, and a run's


@dataclass(frozen=True)
class Memory:
    """(tier, part) → bytes of each rank, float64 [ranks]."""

    parts: Mapping[tuple[str, str], np.ndarray]

    def of(self, tier: str) -> np.ndarray:
        """All parts of a tier together, [ranks]."""
        found = [size for (place, _), size in self.parts.items() if place == tier]
        return np.sum(found, axis=0) if found else np.zeros(len(next(iter(self.parts.values()))))


def memory_of(
    config: RunConfig, schema: Schema, plan: Sequence[PlannedTable], loads: Loads, dense: DenseWork
) -> Memory:
    """What each rank has.

    weights, optimizer state, cache: of shards, by `memory.parts_of`; id maps by `memory.map_share`.
    hot rows: of tables in files, in what plan.memory_gib leaves (`hot_rows`).
    dense model: weights P, the optimizer's state (Adam 2·P, Adagrad P), an average P with train.ema.
    gradients: of the dense layers P; of tables with a dense kernel, or copied to all ranks, twice their size,
        as the kernel makes them for all tables at once, and each table then gets its own.
    activations: what the dense layers have alive at most (dense_work), of B rows.
    exchange buffers: sums that lookups give, and their gradients; sums that arrive for B rows, and their
        gradients; on GPUs 40 bytes an id that the update sorts; on CPU GLOO_COPIES of sums that ranks add up.
    pipeline batches: three batches of B rows (ids 8 bytes, bags 4, dense columns and labels 4), and ids that
        have arrived from other ranks for two.
    checkpoint copies, with checkpoint.async_save: all that a rank's GPU holds of tables and dense layers, and
        tables in host memory once more; on CPU dense layers and tables with dense updates alone.
    read ahead: data.buffer_gib. process, objects, CUDA: PROCESS_GIB, OBJECTS_MIB, CONTEXT_GIB.
    """
    device, world = "cpu" if config.scaling.device == "cpu" else "cuda", len(loads.pooled)
    parts: dict[tuple[str, str], np.ndarray] = {}

    def add(tier: str, part: str, sizes: np.ndarray | float, rank: int | slice = slice(None)) -> None:
        parts.setdefault((tier, part), np.zeros(world))[rank] += sizes

    copies = np.zeros(world)
    kernels = {table.table: table.compute_kernel for table in plan}
    found = held(plan, config, schema)
    for (table, rank), its in found.items():
        for part, size in its.parts.items():
            for tier, of_tier in zip(TIERS, size, strict=True):
                add(tier, part, of_tier, rank)
            if part != CACHE and (device == "cuda" or kernels[table] == "dense"):
                copies[rank] += size.device + size.host
    if maps := map_share(schema, world):
        add(DEVICE, "id maps", maps)
    add(DEVICE, "hot rows", np.array([size for _, size in hot_rows(found, config, schema, world)]))
    batch = -(-config.data.global_batch_size // world)
    dense_state = dense.parameters * (1 + states_of(config.optim.dense) + bool(config.train.ema))
    add(DEVICE, "dense model", dense_state)
    add(DEVICE, "gradients", dense.parameters + 2 * loads.gradients)
    add(DEVICE, "activations", dense.activations)
    arrived = batch * loads.row_values * VALUE_BYTES
    sorting = SORTED_BYTES * sum(loads.ids.values()) if device == "cuda" else GLOO_COPIES * loads.summed
    add(DEVICE, "exchange buffers", 2 * loads.pooled + (2 * arrived if world > 1 else 0.0) + sorting)
    add(DEVICE, "pipeline batches", IN_FLIGHT * batch_bytes(schema, loads, batch) + 2 * loads.received_ids)
    if config.checkpoint.async_save:
        add(HOST if device == "cuda" else DEVICE, "checkpoint copies", copies + dense_state)
    add(HOST if device == "cuda" else DEVICE, "read ahead", config.data.buffer_gib * GIB)
    add(HOST if device == "cuda" else DEVICE, "process", PROCESS_GIB[device] * GIB)
    add(HOST if device == "cuda" else DEVICE, "objects", OBJECTS_MIB * 2**20)
    if device == "cuda":
        add(DEVICE, "CUDA", CONTEXT_GIB * GIB)
    return Memory({key: size for key, size in parts.items() if size.any()})


def states_of(optimizer: DenseOptim) -> int:
    """Values of state that the dense layers' optimizer has for each weight."""
    return optimizer_of(optimizer.name).bytes_per("value") // VALUE_BYTES


def batch_bytes(schema: Schema, loads: Loads, rows: int) -> float:
    """Of a rank's batch as it is read: ids and lengths, dense columns, labels and weights."""
    ids = loads.row_ids * ID_BYTES + len(schema.sparse) * LENGTH_BYTES
    return rows * (ids + VALUE_BYTES * (len(schema.dense) + len(schema.labels) + 1))


BUCKET = 25 << 20  # bytes of gradients in one all-reduce (DistributedDataParallel)
COMPILED_BYTES, COMPILED_LAUNCHES = 0.5, 1 / 3  # of eager layers' (docs/gpu.md)
HIDDEN = 0.5  # of the dense layers' time hides an all-reduce: their backward, but for its first layers
PARTS = (
    *("lookup", "input exchange", "output exchange", "dense layers", "all-reduce", "host launches"),
    *("ingest", "host to device"),
)


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step.

    Attributes:
        parts: each of PARTS as long as it takes alone, of the slowest rank.
        step: the step; rows_per_s: of all ranks.
        bottleneck: the part that it waits for most.
        balance: of lookups and their exchange, the mean of ranks ÷ the slowest; 1: even.
        busy: of each rank, what it computes and sends itself: ingest and waiting left out.
    """

    parts: dict[str, float]
    step: float
    rows_per_s: float
    bottleneck: str
    balance: float
    busy: list[float]


def step_time(
    config: RunConfig,
    schema: Schema,
    loads: Loads,
    dense: DenseWork,
    rates: Rates,
    hosts: int,
    gpus: int,
    cpus: float = 0.0,
) -> StepTime:
    """How long a step takes.

    lookup = bytes touched ÷ random-access rate + ids × time of an id + shards × time of one + bytes of dense
        updates ÷ memory rate + bytes of host memory ÷ host link + rows of files × time of one.
    input exchange = ids and lengths: three all-to-alls (sizes, lengths, ids) for each way of sharding.
    output exchange = sums and gradients: two collectives for each way of sharding; the slower of links and
        network, which work at the same time.
    dense layers = products ÷ their rate + small matrices × time of one + other operators' bytes ÷ memory rate
        + the optimizer, which reads weights, gradients and state and writes weights and state.
    all-reduce = 2 × gradients ÷ links (a ring: (W−1)/W sent twice), and once to other hosts.
    host launches = operators of the dense layers × time of one + tensors × time of one + that of a step and
        of each way of sharding; + assembling the next batch, under the same lock of Python.
    ingest = columns and ids read by the reader processes, as many at a time as there are CPUs for them.

    On GPUs device, host, readers and copies work at the same time, ids travel during the step before, and
    half of the dense layers hides the all-reduce:
        step = max(lookup + output exchange + dense + max(0, all-reduce − dense ÷ 2),
                   host, ingest, copies, ids)
    On CPU ranks compute what they send themselves: a step is the sum of its parts. There W ranks share C
    cores: what takes rank r tᵣ of CPU takes max(max tᵣ, Σ tᵣ ÷ C). Collectives are measured with as many
    ranks, and the slowest rank is waited for.

    Args:
        hosts, gpus: groups of ranks whose links are fast, and ranks of each (Cluster.linked).
        cpus: for each rank, two of which its processes take, and readers the rest; 0: enough.
    """
    world, total = hosts * gpus, config.data.global_batch_size
    batch, on_cpu = -(-total // world), rates.device == "cpu"

    def shared(seconds: np.ndarray | float) -> float:
        """Of all ranks, which share cores."""
        each = np.broadcast_to(np.asarray(seconds, float), (world,))
        return float(max(each.max(), each.sum() / hosts / rates.cores if rates.cores else 0.0))

    lookups = loads.streamed / rates.stream + loads.host_bytes / rates.host_link
    lookups = lookups + loads.file_rows * rates.file_row_s
    for way, ids_of_way in loads.ids.items():
        lookups += rates.lookup_of(way).seconds(loads.touched[way], ids_of_way, loads.shards[way])
    precision = "fp32" if on_cpu and config.train.matmul == "tf32" else config.train.matmul
    moved = dense.bytes * (COMPILED_BYTES if config.train.compile and not on_cpu else 1.0)
    moved += dense.parameters * (3 + 2 * states_of(config.optim.dense) + 3 * bool(config.train.ema))
    products = dense.flops / rates.matrix[precision] + dense.matrices * rates.matrix_s + moved / rates.copy
    launches = dense.launches * (COMPILED_LAUNCHES if config.train.compile and not on_cpu else 1.0)
    host = dense.tensors * rates.tensor_s + launches * rates.launch_s + rates.step_s
    host += (len(loads.groups) + bool(loads.replicated)) * rates.group_s
    columns, its_ids = len(schema.columns), loads.row_ids * rates.read_id_s
    assembled = batch * (columns * rates.assemble_column_s + its_ids)
    readers = config.data.readers if not cpus else min(config.data.readers, max(0.5, cpus - 2))
    ids = output = reduced = np.zeros(world)
    if world > 1:
        ids = _ids_s(loads, rates, world, hosts, gpus)
        output = _output_s(loads, rates, world)
        added_up = dense.parameters + loads.replicated
        reduced = np.full(world, _reduce_s(added_up, rates, world, hosts, gpus))
    parts = {
        "lookup": shared(lookups),
        "input exchange": float(ids.max()),
        "output exchange": float(output.max()),
        "dense layers": shared(products),
        "all-reduce": float(reduced.max()),
        "host launches": shared(host) + assembled,
        "ingest": batch * (columns * rates.read_column_s + its_ids) / readers,
        "host to device": 0.0 if on_cpu else batch_bytes(schema, loads, batch) / rates.host_link,
    }
    if on_cpu:
        together = {name: seconds for name, seconds in parts.items() if name != "ingest"}
        alone = {"ingest": parts["ingest"]}
    else:
        together = {name: parts[name] for name in ("lookup", "output exchange", "dense layers")}
        together["all-reduce"] = max(0.0, parts["all-reduce"] - HIDDEN * parts["dense layers"])
        alone = {name: seconds for name, seconds in parts.items() if name not in together}
    step = max(sum(together.values()), *alone.values())
    chain = together if step == sum(together.values()) else alone
    slowest = max(chain, key=lambda name: chain[name])
    busy = lookups + output
    balance = float(busy.mean() / busy.max()) if busy.max() else 1.0
    everything = busy + ids + reduced + products + host + assembled
    return StepTime(parts, step, total / step, slowest, balance, everything.tolist())


def _ids_s(loads: Loads, rates: Rates, world: int, hosts: int, gpus: int) -> np.ndarray:
    size = np.maximum(loads.received_ids, loads.sent_ids)
    count = 1 + 2 * len(loads.groups)
    near = size * (min(world, gpus) - 1) / world / rates.bandwidth["all_to_all"]
    far = size * (world - gpus) / world / rates.far if hosts > 1 else 0.0
    return count * _latency(rates, "all_to_all", world) + np.maximum(near, far)


def _output_s(loads: Loads, rates: Rates, world: int) -> np.ndarray:
    kinds = [kind for _, kind in loads.groups]
    out, near, far = np.zeros(world), np.zeros(world), np.zeros(world)
    for kind in COLLECTIVES[:3]:
        sent, sent_far = loads.near[kind], loads.far[kind]
        if kind == "all_to_all":  # takes as long as the larger of what a rank sends and gets
            sent, sent_far = np.maximum(sent, loads.arrived[0]), np.maximum(sent_far, loads.arrived[1])
        near = near + sent / rates.bandwidth[kind]
        far = far + (sent_far / rates.far if rates.far else 0.0)
    summed = sum(kind in ("row_wise", "table_row_wise", "grid_shard") for kind in kinds)
    out += summed * (_latency(rates, "reduce_scatter", world) + _latency(rates, "all_gather", world))
    out += 2 * (len(kinds) - kinds.count("row_wise")) * _latency(rates, "all_to_all", world)
    return out + np.maximum(near, far)


def _reduce_s(size: float, rates: Rates, world: int, hosts: int, gpus: int) -> float:
    near = 2 * size * (min(world, gpus) - 1) / min(world, gpus) / rates.bandwidth["all_reduce"]
    far = 2 * size * (hosts - 1) / hosts / gpus / rates.far if hosts > 1 else 0.0
    return -(-size // BUCKET) * _latency(rates, "all_reduce", world) + near + far


def _latency(rates: Rates, kind: str, world: int) -> float:
    return rates.latency_s[kind] + rates.peer_s * (world - 1) * (kind == "all_to_all")


def hot_rows(
    found: Mapping[tuple[str, int], Held], config: RunConfig, schema: Schema, world: int
) -> list[tuple[float, float]]:
    """Return for each rank the share of rows of its tables in files that memory holds, too, and their bytes.

    It is as many rows as plan.memory_gib leaves room for; none without plan.memory_gib.
    """
    left = [(config.plan.memory_gib or 0) * GIB - map_share(schema, world)] * world
    takes, places = [0] * world, [0] * world
    for (_, rank), each in found.items():
        left[rank] -= each.size.device
        if each.size.disk:
            left[rank] -= each.rows * ROW_BYTES
            takes[rank] += each.size.disk + each.rows * PLACE_BYTES
            places[rank] += each.rows * ROW_BYTES
    shares = [
        min(1.0, max(0.0, room / size)) if size else 0.0 for room, size in zip(left, takes, strict=True)
    ]
    return [
        (share, share * size + of_rows if share else 0.0)
        for share, size, of_rows in zip(shares, takes, places, strict=True)
    ]
