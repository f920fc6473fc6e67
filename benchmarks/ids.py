"""Cost of managed ids: a step compared with a step on a static table, and a stream of distinct ids.

    python benchmarks/ids.py [--workers 1,2] [--stream 10000000]

Steps have 2,048 rows per rank and 12 ids per row. They run on a CPU with batches in memory, a row-wise table of
100,000 × 16 and almost no dense work; collating is included. The sides take turns, and the best turn of each is
reported. The sides are a static table; managed ids that all have rows; and managed ids of which a hundredth or a
tenth is new, so that other ids lose their rows in a full table and return later.

The stream sends distinct ids through a map of 100,000 rows, 16,384 at a time.

Writes benchmarks/results/ids.json and the table in docs/benchmarks.md.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from time import perf_counter
from typing import Annotated, Any

import harness
import numpy as np
import torch
import typer
from harness import Grid, status_bytes
from rank_group import Ranks, compare, rig, run_script, time_steps
from torch import nn

DIM, ROWS, BATCH, BAG, SINGLES, PIECES = 16, 100_000, 2048, 8, 4, 16
AT_ONCE = 16_384  # ids per step of the stream
FIRST = 20  # steps of a new model, after which all known ids have rows
MODEL = {"name": "ids:Sum"}
SIDES = {
    "static": {"ids": "static", "new_share": 0.0},
    "known": {"ids": "managed", "new_share": 0.0},
    "hundredth": {"ids": "managed", "new_share": 0.01},
    "tenth": {"ids": "managed", "new_share": 0.1},
}
HEADER = (
    *("workers", "static, ms per step", "no new ids, ms (÷ static)", "1 % new ids", "10 % new ids"),
    *("ids/s through the map", "memory growth, MiB"),
)


class Sum(nn.Module):
    """Model with almost no dense work: its logit is a linear layer over the sum of all embeddings."""

    def __init__(self, schema: Any, config: Any):
        super().__init__()
        self.logit = nn.Linear(DIM, 1)

    def forward(self, dense: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the logit of each row, [B]."""
        return self.logit(torch.stack(list(inputs.values())).sum(0)).squeeze(1)


def build(rank: int, world: int, ids: str, new_share: float) -> tuple[Any, Iterator[Any]]:
    """Return a step with one table, and its batches.

    Args:
        rank: Rank of this process.
        world: Number of ranks.
        ids: "static" or "managed".
        new_share: Share of a batch's ids that have never occurred; the other ids follow a power law over 90,000
            ids.
    """
    features = [*(f"f{i}" for i in range(SINGLES)), "bag"]
    schema = {
        "sparse": {name: {"table": "item"} for name in features},
        "tables": {"item": {"rows": ROWS, "dim": DIM, "ids": ids}},
    }
    plan = {"tables": {"item": {"sharding_type": "row_wise"}}}
    rank_rig = rig(schema, MODEL, world, BATCH * world, ["bag"], plan=plan)

    def batches() -> Iterator[Any]:
        random, fresh = np.random.default_rng(rank), (rank + 1) * 2**40
        offsets, labels = np.arange(0, BATCH * BAG + 1, BAG, np.int32), np.ones(BATCH, np.float32)
        known = [(random.zipf(1.05, BATCH * (SINGLES + BAG)) * 7919) % 90_000 for _ in range(PIECES)]
        new = int(len(known[0]) * new_share)
        for number in range(sys.maxsize):
            drawn = known[number % PIECES].copy()
            if new:
                drawn[:: len(drawn) // new][:new] = np.arange(fresh, fresh + new)
                fresh += new
            singles = np.split(drawn[: BATCH * SINGLES], SINGLES)
            yield rank_rig.batch(labels, singles, [(offsets, drawn[BATCH * SINGLES :], None)], number)

    return rank_rig.step, batches()


def stream(world: int, ids: int) -> tuple[float, int]:
    """Map distinct ids to rows; return (seconds, growth of this rank's memory in bytes after a tenth of the steps)."""
    from raytrec.common.collectives import Peers
    from raytrec.config.schema_parts import ManagedIds
    from raytrec.embeddings.managed.batches import IdExchange

    peers, cpu = Peers(), torch.device("cpu")
    exchange, rank_ids = IdExchange({"item": (ROWS, ManagedIds())}, 0, peers, cpu), AT_ONCE // world
    start_bytes, began, steps = 0, perf_counter(), -(-ids // AT_ONCE)
    for step in range(steps):
        if step == steps // 10:
            start_bytes = status_bytes("VmRSS")
        first = step * AT_ONCE + peers.rank * rank_ids
        exchange.train({"item": torch.arange(first, first + rank_ids)}, step)
    return perf_counter() - began, status_bytes("VmRSS") - start_bytes


def side(rank: int, world: int) -> Any:
    """Return the function that serves a rank's requests: build and train, or map a stream of ids."""
    current: list[Any] = []

    def answer(steps: int = FIRST, stream_ids: int = 0, **request: Any) -> tuple[float, float]:
        if stream_ids:
            return stream(world, stream_ids)
        if request:
            current[:] = build(rank, world, **request)
        return time_steps(*current, steps)

    return answer


def document(results: dict[str, Any]) -> str:
    """Return the table for docs/benchmarks.md, with a row for each number of workers."""
    rows = []
    for point in results["points"]:
        static, *others = (point["sides"][side]["step_ms"] for side in SIDES)
        times = (f"{managed:,.1f} ({managed / static:.2f} ×)" for managed in others)
        cells = [str(point["workers"]), f"{static:,.1f}", *times]
        through = point["stream"]
        rows.append([*cells, f"{through['ids_per_s']:,.0f}", f"{through['grown_mib']:,.1f}"])
    return Grid(HEADER, rows, left=0).markdown()


def main(
    workers: harness.Workers = "1,2",
    rounds: harness.Rounds = 7,
    ids: Annotated[int, typer.Option("--stream", help="Number of distinct ids in the stream.")] = 10_000_000,
    smallest: harness.Smallest = False,
) -> None:
    """Print the table; without --smallest, write benchmarks/results/ids.json and docs/benchmarks.md."""
    workers, rounds, ids = ("1", 1, 200_000) if smallest else (workers, rounds, ids)
    points = []
    for world in harness.integers(workers):
        with ExitStack() as stack:
            sides = {name: Ranks("ids.py", world, stack) for name in SIDES}
            figures = compare(sides, SIDES, rounds, BATCH * world, first_steps=FIRST)
        with ExitStack() as stack:
            answers = Ranks("ids.py", world, stack).ask(stream_ids=ids)
        seconds, grown = max(s for s, _ in answers), sum(size for _, size in answers)
        through = {"ids": ids, "s": seconds, "ids_per_s": ids / seconds, "grown_mib": grown / 2**20}
        points.append({"workers": world, "sides": figures, "stream": through})
        print(json.dumps(points[-1]), flush=True)
    results = {"cpus": os.cpu_count(), "points": points}
    print(document(results))
    if not smallest:
        harness.publish("ids", results, document(results))


if __name__ == "__main__":
    run_script(main, side)
