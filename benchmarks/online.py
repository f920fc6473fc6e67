"""Cost of deltas during training, and the time from a step until a service serves it (freshness.py).

    python benchmarks/online.py [--workers 1] [--rounds 7]

The cost is the CPU-µs per row with a delta every 10 seconds, compared with none. Steps have 2,048 rows per rank and 26
tables of 100,000 × 16, whose ids follow a power law. They run on a CPU with batches in memory; collating is included.
The sides take turns of 10 seconds with new models. Each turn with deltas writes one delta, and its CPU time includes
the thread that writes. The ratio is the median over rounds.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from statistics import median
from time import perf_counter, process_time
from typing import Any

import freshness
import harness
import numpy as np
from harness import Grid, median_ratio, take_turns
from rank_group import Ranks, rig, run_script

TABLES, ROWS, DIM, BATCH, PIECES = 26, 100_000, 16, 2048, 16
TURN_S, SHORT_TURN_S = 10.0, 0.5
SIDES = {"no deltas": False, "a delta every 10 s": True}


def build(rank: int, world: int, folder: str | None) -> tuple[Any, Any, Any]:
    """Return a step, its batches, and a writer of deltas to `folder` (None: no deltas)."""
    import torch

    from raytrec.checkpoint.state import LogicalState
    from raytrec.config.run_config import RunConfig

    names = [f"f{number}" for number in range(TABLES)]
    schema = {
        "sparse": {name: {"table": name} for name in names},
        "tables": {name: {"rows": ROWS, "dim": DIM} for name in names},
    }
    model = {"name": "dcn", "cross_layers": 3, "top_mlp": [512, 256]}
    rank_rig = rig(schema, model, world, BATCH * world, plan={"tables": {"*": {"sharding_type": "row_wise"}}})
    random = np.random.default_rng(rank)
    pieces = [
        rank_rig.piece(
            [np.ones(BATCH, np.float32)], list((ROWS * random.random((TABLES, BATCH)) ** 3).astype(np.int64))
        )
        for _ in range(PIECES)
    ]
    if folder is None:
        return rank_rig.step, rank_rig.repeat(pieces), None
    from raytrec.deltas.chain import open_stream
    from raytrec.deltas.publish import DeltaPublisher

    config = RunConfig.model_validate(
        {
            "run": {"name": "run", "dir": f"{folder}/run"},
            "data": {"train": "unused"},
            "export": {"deltas": {"to": f"{folder}/deltas"}},
        }
    )
    if rank == 0:
        open_stream(config)
    torch.distributed.barrier()
    state = LogicalState(rank_rig.step.model, rank_rig.step.optimizer)
    publisher = DeltaPublisher(config, rank_rig.step.model, state, None, None, 0, lambda: None, print)
    return rank_rig.step, rank_rig.repeat(pieces), publisher


def side(rank: int, world: int) -> Any:
    """Return the function that serves a rank's requests: build, or train and write one delta."""
    current: list[Any] = []

    def answer(steps: int, folder: str | None = None, builds: bool = False) -> tuple[float, float]:
        if builds:
            current[:] = build(rank, world, folder)
        step, batches, publisher = current
        began, used = perf_counter(), process_time()
        for _ in step.train(batches, steps):
            pass
        if publisher is not None:
            publisher.cut(step.trained)
            publisher.collect()
            assert step.trained in publisher.written
        return perf_counter() - began, process_time() - used

    return answer


def _turn(ranks: Ranks, steps: int, request: dict[str, Any]) -> dict[str, float]:
    """Build a new model and measure it, because a model's place in memory changes the step time by several percent."""
    ranks.ask(steps=2, builds=True, **request)
    return ranks.time(steps=steps)


def main(workers: harness.Workers = "1", rounds: harness.Rounds = 7, smallest: harness.Smallest = False) -> None:
    """Print the tables; without --smallest, write benchmarks/results/online.json and docs/benchmarks.md."""
    rounds, turn_s, cost = (1, SHORT_TURN_S, []) if smallest else (rounds, TURN_S, [])
    for world in harness.integers(workers):
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="online-"))
            sides = {name: Ranks("online.py", world, stack) for name in SIDES}
            requests = {name: {"folder": folder if has_folder else None} for name, has_folder in SIDES.items()}
            sides["no deltas"].ask(steps=2, builds=True, **requests["no deltas"])
            steps = max(2, round(turn_s / (sides["no deltas"].time(steps=4)["s"] / 4)))
            turns = take_turns({name: partial(_turn, sides[name], steps, requests[name]) for name in SIDES}, rounds)
        rows_trained = steps * BATCH * world
        per_row = {name: [1e6 * turn["cpu_s"] / rows_trained for turn in each] for name, each in turns.items()}
        none, some = per_row.values()
        cost.append([world, median(none), median(some), median_ratio(some, none)])
    make_table(cost).show()
    results = {"cost": cost, "freshness": freshness.measure(60.0, harness.integers(workers), 0, smallest)}
    freshness.make_table(results["freshness"]).show()
    if not smallest:
        harness.publish("online", results, document(results))


def make_table(cost: Sequence[Sequence[float]]) -> Grid:
    """Return the table of the cost: number of workers, CPU-µs per row of each side, and their ratio."""
    rows = [[str(world), f"{none:.1f}", f"{some:.1f}", f"{ratio:.3f}"] for world, none, some, ratio in cost]
    return Grid(("workers", *SIDES, "ratio"), rows, f"CPU-µs per row, {os.cpu_count()} cores", left=0)


def document(results: dict[str, Any]) -> str:
    """Return the table for docs/benchmarks.md, with a row for each number of workers."""
    rows = [
        [str(world), f"{ratio:.3f}", *freshness_row[1:]]
        for (world, *_, ratio), freshness_row in zip(
            results["cost"], freshness.make_table(results["freshness"]).rows, strict=True
        )
    ]
    header = ("workers", "CPU time, deltas ÷ none", "seconds behind, p50", "p99", "steps", "steps/s")
    return Grid(header, rows, left=0).markdown()


if __name__ == "__main__":
    run_script(main, side)
