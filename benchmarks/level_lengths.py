"""HSTU with and without `data.balance`, on lengths with a long tail: a part of `benchmarks/sequences.py`.

Lengths of histories are log-normal with a mean of 200 and a 99th percentile of 2,000. Each side trains on the same
global batches. Rows are exchanged and collated in a thread, as in a run.
"""

from __future__ import annotations

from contextlib import ExitStack
from itertools import pairwise
from statistics import fmean, median
from time import perf_counter, thread_time
from typing import Any

import next_item
from harness import Grid, median_ratio, take_turns
from rank_group import Answer, Ranks, run_script

SIDES = ("none", "length", "squared_length")  # values of data.balance
HEADER = (
    *("data.balance", "rows/s", "÷ none", "share of time that ranks wait"),
    *("CPU-ms per step of the slower rank", "÷ none"),
)
SHAPE = next_item.ML1M | {
    "model": "hstu",
    "rows": 64,
    "length": 2048,
    "median": 72.0,
    "spread": 1.429,
    "shortest": 1,
    "negatives": 16,
    "dropout": 0.0,
}
BATCHES = 8  # number of global batches, on which the steps train repeatedly
SMALLEST = {"rows": 4, "steps": 2}
PREFETCH = 4  # as in data.stream.Stream
WAITS = ("collectives", "input_exchange")  # phases in which a rank waits for other ranks


def side(rank: int, world: int) -> Answer:
    """Return the function that answers requests on one rank.

    A request with `balance` and `rows` builds the model and is answered with true. A request with `steps` trains.
    Its answer is [seconds, seconds of waiting for other ranks, CPU seconds of the training thread in each step].
    """
    from raytrec.data.row_exchange import RowExchange
    from raytrec.data.stream import PrefetchIterator

    current: list[Any] = []

    def answer(steps: int = 0, balance: str = "none", rows: int = 0) -> Any:
        if rows:
            shape = SHAPE | {"rows": rows}
            rig = next_item.rig_of(shape, world)
            exchange = RowExchange(balance, rig.form, rig.features) if balance != "none" else None
            batches = [next_item.rows_of(shape, seed, next_item.lengths_of(shape, seed)) for seed in range(BATCHES)]
            pieces = [next_item.piece_of(rig, shape, batch, rank, world) for batch in batches]

            def make(reading: PrefetchIterator) -> Any:
                number = 0
                while True:
                    part = [pieces[number % BATCHES]]
                    if exchange:
                        part = exchange.exchange(part, rows // world, 0, reading.is_closed)
                    yield rig.collate(part, rows // world, rows, number)
                    number += 1

            current[:] = rig.step, PrefetchIterator(make, PREFETCH)
            return True
        step, batches = current
        step.phases.take()
        began, used = perf_counter(), [thread_time()]
        for _ in step.train(batches, steps):
            used.append(thread_time())
        seconds, phases = perf_counter() - began, step.phases.take()
        return seconds, sum(phases[name] for name in WAITS), [after - before for before, after in pairwise(used)]

    return answer


def measure(world: int, rounds: int, rows: int = SHAPE["rows"], steps: int = BATCHES) -> dict[str, dict[str, float]]:
    """Return each side's rows/s, share of time spent waiting and CPU time, and their ratios to those of `none`."""
    with ExitStack() as stack:
        sides = {balance: Ranks("level_lengths.py", world, stack) for balance in SIDES}
        for balance, ranks in sides.items():
            ranks.ask(balance=balance, rows=rows)
        turns = take_turns({name: lambda name=name: sides[name].ask(steps=steps) for name in sides}, rounds, warm_up=1)
    return {name: summarize(turns["none"], turns[name], rows * steps) for name in SIDES}


def summarize(baseline: list[Any], turns: list[Any], rows: int) -> dict[str, float]:
    """Return the figures of one side from its turns and those of `none`, each with `rows` rows."""
    slowest_s, baseline_s = ([max(s for s, *_ in ranks) for ranks in of_side] for of_side in (turns, baseline))
    cpu_s, baseline_cpu_s = (
        [fmean(map(max, zip(*(used for *_, used in ranks), strict=True))) for ranks in of_side]
        for of_side in (turns, baseline)
    )
    return {
        "rows_per_s": rows / min(slowest_s),
        "speed_up": median_ratio(baseline_s, slowest_s),
        "wait_share": median(sum(w for _, w, _ in ranks) / sum(s for s, *_ in ranks) for ranks in turns),
        "cpu_ms": 1e3 * min(cpu_s),
        "cpu_ratio": median_ratio(cpu_s, baseline_cpu_s),
    }


def table_of(figures: dict[str, dict[str, float]]) -> str:
    """Return the table for docs/benchmarks.md."""
    rows = [
        [
            *(name, f"{f['rows_per_s']:,.0f}", f"{f['speed_up']:.2f} ×", f"{f['wait_share']:.0%}"),
            *(f"{f['cpu_ms']:,.0f}", f"{f['cpu_ratio']:.2f} ×"),
        ]
        for name, f in figures.items()
    ]
    return Grid(HEADER, rows).markdown()


if __name__ == "__main__":
    run_script(lambda: None, side)
