"""Cost of a step over sequences as their length grows, and cost of next-item models.

    python benchmarks/sequences.py [--only lengths,models,balance] [--lengths 10,50,100,200,500] [--workers 1,2]

`lengths` compares sequences that are read id by id with the mean of all ids. `models` is next_item.py
and hstu_rank.py, and `balance` is level_lengths.py.

Id by id, TorchRec's EmbeddingCollection returns the vector of each id, up to a maximum number of ids. The
mean is pooled by TorchRec's EmbeddingBagCollection, and ranks exchange only sums. Both sides train on 512
rows per rank on CPU, with batches in memory, a row-wise table of 100,000 × 16 and almost no dense work;
collation is included. The sides take turns, and each side's best turn is reported. `full` lists contain 0.5 to
1.5 times as many ids as the model reads, and `short` lists contain a tenth of these.

Writes benchmarks/results/sequences.json, docs/images/sequences.png and a table in docs/benchmarks.md.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import product
from typing import Annotated, Any

import harness
import hstu_rank
import level_lengths
import next_item
import numpy as np
import torch
import typer
from harness import Grid
from rank_group import Ranks, compare, rig, run_script, trainer
from torch import nn

SIDES = {"mean": "mean of all ids", "by_id": "id by id"}
FILLS = {"full": 1.0, "short": 0.1}
HEADER = (
    *("workers", "ids read", "in a list", "ms a step: mean", "id by id", ""),
    *("CPU-µs a row: mean", "id by id", ""),
)
DIM, ROWS, BATCH, PIECES = 16, 100_000, 512, 4
LENGTHS = "10,50,100,200,500"


class Means(nn.Module):
    """Model with almost no dense work: a linear layer on the mean of a sequence and its target."""

    def __init__(self, schema: Any, config: Any):
        super().__init__()
        self.logit = nn.Linear(2 * DIM, 1)

    def forward(self, dense: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
        """Return the logit of each row, [B]."""
        mean_BD = inputs["history"]
        if not isinstance(mean_BD, torch.Tensor):
            history = mean_BD
            mean_BD = history.vectors.sum(1) / history.present.sum(1, keepdim=True).clamp(min=1)
        return self.logit(torch.cat([mean_BD, inputs["item"]], 1)).squeeze(1)


def build(rank: int, world: int, length: int | None, ids: int) -> tuple[Any, Iterator[Any]]:
    """Return the step of a model and this rank's batches.

    Args:
        rank: Number of the rank.
        world: Number of ranks.
        length: Maximum number of ids that are read id by id; None: the mean of all ids.
        ids: Mean number of ids in a list.
    """
    schema = {
        "sparse": {"item": {"table": "item"}, "history": {"table": "item", "pooling": "sequence"}},
        "tables": {"item": {"rows": ROWS, "dim": DIM}},
    }
    plan = {"tables": {"item": {"sharding_type": "row_wise"}}}
    model = {"name": "sequences:Means", "max_length": length}
    rank_rig = rig(schema, model, world, BATCH * world, ["history"], plan=plan)
    pieces = []
    for seed in range(PIECES * rank, PIECES * (rank + 1)):
        rng = np.random.default_rng(seed)
        lengths = rng.integers(max(1, ids // 2), ids + (ids + 1) // 2 + 1, BATCH)
        offsets = np.cumsum([0, *lengths]).astype(np.int32)
        bags = [(offsets, rng.integers(0, ROWS, offsets[-1]), None)]
        labels = rng.integers(0, 2, BATCH).astype(np.float32)
        pieces.append(rank_rig.piece([labels], [rng.integers(0, ROWS, BATCH)], bags))
    return rank_rig.step, rank_rig.repeat(pieces)


def lengths_table(points: list[dict[str, Any]]) -> Grid:
    """Return the table of lengths, with a row for each point."""
    rows = []
    for point in points:
        cells = [str(point["workers"]), str(point["length"]), str(point["ids"])]
        for figure in ("step_ms", "cpu_us_per_row"):
            mean, by_id = (point[side][figure] for side in SIDES)
            cells += [f"{mean:,.1f}", f"{by_id:,.1f}", f"{by_id / mean:.1f} ×"]
        rows.append(cells)
    return Grid(HEADER, rows, left=0)


def draw(points: list[dict[str, Any]]) -> None:
    """Plot the step time against length, with a panel for each number of workers."""
    import matplotlib.pyplot as plt

    worlds = sorted({point["workers"] for point in points})
    figure, panels = plt.subplots(1, len(worlds), figsize=(5 * len(worlds), 3.6), squeeze=False)
    for world, panel in zip(worlds, panels[0], strict=True):
        for side, name in SIDES.items():
            for fill, style in (("full", "-o"), ("short", "--s")):
                of_line = [p for p in points if p["workers"] == world and p["fill"] == fill]
                x, y = [p["length"] for p in of_line], [p[side]["step_ms"] for p in of_line]
                color = "C3" if side == "mean" else "C0"
                panel.plot(x, y, style, color=color, label=f"{name}, {fill} lists", markersize=4)
        panel.set(title=f"{world} worker{'s' * (world > 1)}", xscale="log", yscale="log")
        panel.set(xlabel="maximum number of ids read", ylabel="ms a step")
        panel.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(harness.IMAGES / "sequences.png", dpi=130)


def document(results: dict[str, Any]) -> str:
    """Return the tables for docs/benchmarks.md of the parts that have been measured."""
    parts = {"models": next_item.table_of, "balance": level_lengths.table_of}
    return "\n\n".join(table_of(results[part]) for part, table_of in parts.items() if results.get(part))


def measure_lengths(worlds: list[int], lengths: list[int], rounds: int) -> list[dict[str, Any]]:
    """Return each side's ms per step and CPU-µs per row for each number of workers, fill and length."""
    points = []
    for world in worlds:
        with ExitStack() as stack:
            sides = {side: Ranks("sequences.py", world, stack) for side in SIDES}
            for fill, share in FILLS.items():
                for length in lengths:
                    ids = max(1, round(length * share))
                    requests = {"mean": {"length": None, "ids": ids}, "by_id": {"length": length, "ids": ids}}
                    figures = compare(sides, requests, rounds, BATCH * world)
                    points.append({"workers": world, "length": length, "fill": fill, "ids": ids, **figures})
                    print(json.dumps(points[-1]), flush=True)
    return points


def measure_models(worlds: list[int], rounds: int, smallest: bool) -> list[dict[str, Any]]:
    """Return each side's measurements for each number of workers and each case of next_item.py and hstu_rank.py."""
    points = []
    for world, module in product(worlds, (next_item, hstu_rank)):
        with ExitStack() as stack:
            script = f"{module.__name__}.py"
            sides = {side: Ranks(script, 1 if plain else world, stack) for side, plain in next_item.SIDES.items()}
            for (model, shape), sizes in (module.SMALLEST if smallest else module.CASES).items():
                figures = next_item.measure(sides, model, sizes, rounds)
                points.append({"model": model, "shape": shape, "workers": world, **figures})
                print(json.dumps(points[-1]), flush=True)
    return points


def main(
    only: harness.Only = "lengths,models,balance",
    lengths: Annotated[str, typer.Option(help="Maximum numbers of ids read.")] = LENGTHS,
    workers: harness.Workers = "1,2",
    rounds: harness.Rounds = 5,
    smallest: harness.Smallest = False,
) -> None:
    """Measure and print the tables; with all lengths and workers and without --smallest, write results and plot."""
    whole = not smallest and (lengths, workers) == (LENGTHS, "1,2")
    lengths, workers, rounds = ("3", "1", 1) if smallest else (lengths, workers, rounds)
    results, worlds = {"cpus": os.cpu_count()}, harness.integers(workers)
    if "lengths" in harness.split(only):
        results["points"] = measure_lengths(worlds, harness.integers(lengths), rounds)
        lengths_table(results["points"]).show()
    if "models" in harness.split(only):
        results["models"] = measure_models(worlds, rounds, smallest)
    if "balance" in harness.split(only):
        results["balance"] = level_lengths.measure(2, rounds, **level_lengths.SMALLEST if smallest else {})
    print(document(results))
    if whole:
        results = harness.load("sequences") | results
        harness.publish("sequences", results, document(results))
        draw(results["points"])


if __name__ == "__main__":
    run_script(main, trainer(build))
