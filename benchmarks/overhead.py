"""What raytrec's pooling and gradients cost: steps of raytrec against steps of TorchRec as it comes.

    python benchmarks/overhead.py [--workers 2] [--device cpu|cuda] [--rounds 30]

Both sides have the same tables, plan, kernels, optimizers, dense layers, pipeline and batches. TorchRec's
side pools means itself and calls backward on the local mean of the loss; raytrec's side looks sums up,
divides them behind the exchange, and weighs the loss by the global batch. They take turns in the same
processes, some steps each, and what is compared are the two times of each turn.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
import tempfile
import warnings
from datetime import timedelta
from pathlib import Path
from time import perf_counter
from typing import Annotated

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import typer
from documents import keep
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema
from raytrec.data.batch import Batch
from raytrec.embeddings.constraints import table_optimizers
from raytrec.embeddings.optim import combine, fuse
from raytrec.embeddings.pooling import embedding_bags
from raytrec.embeddings.sharding import BagSharder
from raytrec.models import build_model
from raytrec.worker.build import build_step

RESULTS = Path(__file__).parent / "results" / "overhead.json"
FEATURES, ROWS, DIM, DENSE, LONGEST = 20, 100_000, 64, 13, 10
BATCHES, STEPS = 8, 8  # different batches; steps of one side in a turn
CASES = [
    (sharding, pooling)
    for sharding in ("table_wise", "row_wise", "both")
    for pooling in ("sum", "mean", "half")
]


def schema_of(pooling: str) -> Schema:
    """20 features with tables of their own; 'half': every second one is a mean."""
    tables = {f"t{i}": {"rows": ROWS, "dim": DIM} for i in range(FEATURES)}
    kinds = {"sum": ["sum", "sum"], "mean": ["mean", "mean"], "half": ["sum", "mean"]}[pooling]
    return Schema.parse(
        {
            "labels": ["y"],
            "dense": [f"d{i}" for i in range(DENSE)],
            "sparse": {f"f{i}": {"table": f"t{i}", "pooling": kinds[i % 2]} for i in range(FEATURES)},
            "tables": tables,
        },
        "benchmark",
    )


def config_of(sharding: str, workers: int, batch: int) -> RunConfig:
    """'both': half of the tables table-wise, half row-wise."""
    ways = {"both": ["table_wise", "row_wise"]}.get(sharding, [sharding] * 2)
    return RunConfig.model_validate(
        {
            "data": {"train": "unused/train", "global_batch_size": batch * workers},
            "scaling": {"num_workers": workers},
            "model": {"bottom_mlp": [256], "top_mlp": [512, 256]},
            "plan": {"tables": {f"t{i}": {"sharding_type": ways[i % 2]} for i in range(FEATURES)}},
        }
    )


def batches_of(rows: int, workers: int, seed: int) -> list[Batch]:
    """Full batches of one rank, bags of 1 to 10 ids."""
    g = torch.Generator().manual_seed(seed)
    out = []
    for _ in range(BATCHES):
        lengths = torch.randint(1, LONGEST + 1, (FEATURES * rows,), generator=g, dtype=torch.int32)
        ids = torch.randint(0, ROWS, (int(lengths.sum()),), generator=g)
        sparse = KeyedJaggedTensor([f"f{i}" for i in range(FEATURES)], ids, lengths=lengths)
        labels = torch.randint(0, 2, (rows, 1), generator=g).float()
        dense = torch.randn(rows, DENSE, generator=g)
        out.append(Batch(dense, sparse, labels, torch.ones(rows), rows * workers))
    return out


class Uncorrected(nn.Module):
    """A hand-written TorchRec model: its own pooling, and the mean of the local losses."""

    def __init__(self, config: RunConfig, schema: Schema, device: torch.device):
        super().__init__()
        self.bags = embedding_bags(schema)
        means = {spec.table for spec in schema.sparse.values() if spec.pooling == "mean"}
        for table in self.bags.embedding_bag_configs():
            table.pooling = PoolingType.MEAN if table.name in means else PoolingType.SUM
        self.dense = build_model(schema, config.model).to(device)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        logits_B = self.dense(batch.dense, self.bags(batch.sparse).to_dict())
        loss = nn.functional.binary_cross_entropy_with_logits(logits_B, batch.labels[:, 0])
        return loss, logits_B.detach()


def torchrec_pipeline(config: RunConfig, schema: Schema, device: torch.device, plan: ShardingPlan):
    """TorchRec's train pipeline over Uncorrected, with raytrec's plan and optimizers."""
    model = Uncorrected(config, schema, device)
    optimizers = table_optimizers(config, schema)
    fuse([model.bags], optimizers, device.type)
    plan = ShardingPlan({"bags": plan.plan["embeddings.bags"]})
    model = DistributedModelParallel(model, device=device, plan=plan, sharders=[BagSharder()])
    return TrainPipelineSparseDist(
        model, combine(model, optimizers, config.optim.dense), device, execute_all_batches=True
    )


def join(rank: int, workers: int, device: str, folder: str) -> torch.device:
    """Makes this process a rank of a group; its device."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    os.environ |= {"LOCAL_WORLD_SIZE": str(workers), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    here = torch.device(device, rank) if device == "cuda" else torch.device("cpu")
    if device == "cuda":
        torch.cuda.set_device(here)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=workers,
        timeout=timedelta(seconds=120),
    )
    return here


def measure(rank: int, workers: int, device: str, rounds: int, batch: int, folder: str) -> None:
    """One rank; rank 0 leaves the seconds of every turn of every case in the folder."""
    here, times = join(rank, workers, device, folder), {}
    torch.set_flush_denormal(
        True
    )  # a few batches are learned by heart: gradients become too small for numbers
    with Progress(disable=rank > 0) as progress:
        for sharding, pooling in CASES:
            config, schema = config_of(sharding, workers, batch), schema_of(pooling)
            ours, plan = build_step(config, schema, here)
            theirs = torchrec_pipeline(config, schema, here, plan)
            ours.model.train()
            batches = batches_of(batch, workers, seed=rank)
            turns = progress.track(range(rounds + 1), description=f"{sharding}, {pooling}")
            seconds = [_turn([ours._pipeline, theirs], batches, here, turn) for turn in turns]
            times[f"{sharding}, {pooling}"] = seconds[1:]  # the first warms up
    if rank == 0:
        (Path(folder) / "times.json").write_text(json.dumps(times))
    dist.destroy_process_group()


def _turn(pipelines: list, batches: list[Batch], device: torch.device, turn: int) -> list[float]:
    """Seconds of some steps of each side; who begins alternates."""
    seconds = [0.0, 0.0]
    for side in (0, 1) if turn % 2 else (1, 0):
        dist.barrier()
        began, source = perf_counter(), iter(batches[:STEPS])
        for _ in range(STEPS):
            pipelines[side].progress(source)
        if device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
        seconds[side] = perf_counter() - began
    return seconds


def main(
    workers: Annotated[int, typer.Option(help="Ranks, each a process (on CUDA: a GPU).")] = 2,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    rounds: Annotated[int, typer.Option(help="Turns of each side, for each case.")] = 30,
    batch: Annotated[int, typer.Option(help="Rows of a batch on each rank.")] = 512,
    smallest: Annotated[bool, typer.Option(help="The smallest sizes; writes nothing.")] = False,
) -> None:
    """Prints the table and writes benchmarks/results/overhead.json."""
    rounds = 1 if smallest else rounds
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, (workers, device, rounds, batch, folder), nprocs=workers)
        times = json.loads((Path(folder) / "times.json").read_text())
    title = f"{workers} × {device}, {batch} rows a rank, {FEATURES} features, {rounds} turns of {STEPS} steps"
    table = Table(title=title)
    for column in ("sharding, pooling", "TorchRec ms/step", "raytrec ms/step", "added", "95 % interval"):
        table.add_column(column, justify="left" if column.startswith("sharding") else "right", no_wrap=True)
    results = {}
    for case, seconds in times.items():
        ratios = sorted(ours / theirs - 1 for ours, theirs in seconds)
        ours, theirs = (statistics.median(side) / STEPS * 1e3 for side in zip(*seconds, strict=True))
        low, high = _interval(ratios)
        results[case] = {"torchrec_ms": theirs, "raytrec_ms": ours, "added": statistics.median(ratios)}
        results[case] |= {"low": low, "high": high}
        table.add_row(
            case,
            f"{theirs:.1f}",
            f"{ours:.1f}",
            f"{statistics.median(ratios):+.1%}",
            f"{low:+.1%} to {high:+.1%}",
        )
    Console().print(table)
    if not smallest:
        RESULTS.parent.mkdir(exist_ok=True)
        keep(RESULTS, {"title": title, "cases": results})


def _interval(values: list[float]) -> tuple[float, float]:
    """Of the median, from order statistics (binomial, about 95 %)."""
    n = len(values)
    reach = int(0.98 * n**0.5)
    return values[max(0, n // 2 - reach)], values[min(n - 1, (n - 1) // 2 + reach)]


if __name__ == "__main__":
    typer.run(main)
