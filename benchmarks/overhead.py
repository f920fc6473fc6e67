"""Cost of raytrec's pooling and gradients: steps of raytrec compared with steps of unmodified TorchRec.

    python benchmarks/overhead.py [--workers 2] [--device cpu|cuda] [--rounds 30]

Both sides have the same tables, plan, kernels, optimizers, dense layers, pipeline and batches. TorchRec's
side pools means itself and calls backward on the local mean of the loss. raytrec's side looks up sums,
divides them after the exchange, and weights the loss by the global batch. The sides take turns of several
steps in the same processes, and the times within each round are compared.

Writes benchmarks/results/overhead.json.
"""

from __future__ import annotations

from statistics import median
from typing import Annotated, Any

import harness
import torch
import typer
from harness import Grid, take_turns
from rank_group import group_seconds, on_ranks
from rich.progress import track
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from raytrec.config.features import Features
from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema
from raytrec.data.batch import Batch
from raytrec.embeddings.constraints import resolve_optimizers
from raytrec.embeddings.optim import combine_optimizers, mark_fused
from raytrec.embeddings.pooling import make_embedding_bags
from raytrec.embeddings.sharding import BagSharder
from raytrec.models import build_model
from raytrec.worker.build import build_step

FEATURES, ROWS, DIM, DENSE, LONGEST = 20, 100_000, 64, 13, 10
BATCHES, STEPS = 8, 8  # number of different batches; number of steps per turn of a side
CASES = [(sharding, pooling) for sharding in ("table_wise", "row_wise", "both") for pooling in ("sum", "mean", "half")]


def schema_of(pooling: str) -> Schema:
    """Return a schema of 20 features with a table each; with 'half', every second feature is mean-pooled."""
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
    """Return a configuration; with 'both', half of the tables are table-wise and half are row-wise."""
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
    """Return full batches of one rank with bags of 1 to 10 ids."""
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
    """Hand-written TorchRec model with TorchRec's pooling and the mean of the local losses."""

    def __init__(self, config: RunConfig, schema: Schema, device: torch.device):
        super().__init__()
        self.bags = make_embedding_bags(Features(schema, {}))
        means = {spec.table for spec in schema.sparse.values() if spec.pooling == "mean"}
        for table in self.bags.embedding_bag_configs():
            table.pooling = PoolingType.MEAN if table.name in means else PoolingType.SUM
        self.dense = build_model(schema, config.model).to(device)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss of the local batch and the logits, [B]."""
        logits_B = self.dense(batch.dense, self.bags(batch.sparse).to_dict())
        loss = nn.functional.binary_cross_entropy_with_logits(logits_B, batch.labels[:, 0])
        return loss, logits_B.detach()


def torchrec_pipeline(config: RunConfig, schema: Schema, device: torch.device, plan: ShardingPlan):
    """Return TorchRec's training pipeline for Uncorrected, with raytrec's plan and optimizers."""
    model = Uncorrected(config, schema, device)
    optimizers = resolve_optimizers(config, schema)
    mark_fused([model.bags], optimizers, device.type)
    plan = ShardingPlan({"bags": plan.plan["embeddings.bags"]})
    model = DistributedModelParallel(model, device=device, plan=plan, sharders=[BagSharder()])
    return TrainPipelineSparseDist(
        model, combine_optimizers(model, optimizers, config.optim.dense), device, execute_all_batches=True
    )


def measure(rank: int, device: torch.device, workers: int, rounds: int, batch: int) -> dict[str, Any]:
    """Return the seconds of each turn, by case and side."""
    torch.set_flush_denormal(True)  # the model memorizes the few batches, and gradients become denormal
    times = {}
    for sharding, pooling in track(CASES, disable=rank > 0):
        config, schema = config_of(sharding, workers, batch), schema_of(pooling)
        step, plan = build_step(config, schema, device)
        reference = torchrec_pipeline(config, schema, device, plan)
        step.model.train()
        batches = batches_of(batch, workers, seed=rank)

        def train(pipeline: Any, batches: list[Batch] = batches) -> None:
            source = iter(batches[:STEPS])
            for _ in range(STEPS):
                pipeline.progress(source)

        pipelines = {"torchrec": reference, "raytrec": step._pipeline}
        turns = {
            side: lambda pipeline=pipeline, train=train: group_seconds(lambda: train(pipeline), device)
            for side, pipeline in pipelines.items()
        }
        times[f"{sharding}, {pooling}"] = take_turns(turns, rounds, warm_up=1)
    return times


def interval(values: list[float]) -> tuple[float, float]:
    """Return a confidence interval of about 95 % for the median, from order statistics (binomial)."""
    values, n = sorted(values), len(values)
    reach = int(0.98 * n**0.5)
    return values[max(0, n // 2 - reach)], values[min(n - 1, (n - 1) // 2 + reach)]


def main(
    workers: Annotated[int, typer.Option(help="Number of ranks, each a process (on CUDA: a GPU).")] = 2,
    device: harness.Device = "cpu",
    rounds: harness.Rounds = 30,
    batch: Annotated[int, typer.Option(help="Number of rows in each rank's batch.")] = 512,
    smallest: harness.Smallest = False,
) -> None:
    """Compare the sides and print the table; without --smallest, write benchmarks/results/overhead.json."""
    rounds = 1 if smallest else rounds
    times = on_ranks(workers, measure, workers, rounds, batch, device=device)[0]
    title = f"{workers} × {device}, {batch} rows a rank, {FEATURES} features, {rounds} turns of {STEPS} steps"
    results, rows = {}, []
    for case, of_case in times.items():
        added = [ours / theirs - 1 for theirs, ours in zip(*of_case.values(), strict=True)]
        (theirs, ours), (low, high) = (1e3 * median(s) / STEPS for s in of_case.values()), interval(added)
        results[case] = {"torchrec_ms": theirs, "raytrec_ms": ours, "added": median(added)}
        results[case] |= {"low": low, "high": high}
        times_ms = f"{theirs:.1f}", f"{ours:.1f}"
        rows.append([case, *times_ms, f"{median(added):+.1%}", f"{low:+.1%} to {high:+.1%}"])
    header = ("sharding, pooling", "TorchRec ms/step", "raytrec ms/step", "added", "95 % interval")
    Grid(header, rows, title).show()
    if not smallest:
        harness.store("overhead", {"title": title, "cases": results})


if __name__ == "__main__":
    typer.run(main)
