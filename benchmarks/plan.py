"""Predicted against measured: memory and time of plans on CPU, with 1 to 4 ranks.

    python benchmarks/plan.py [--rounds 5] [--smallest]

The ranks that train a plan also measure the machine's rates, in turns with its steps; from the medians of all
these rates each plan's memory and step are predicted. Where the machine has other work (its load is above 1.5
when this begins), a step counts by seconds of CPU: the busiest rank's, or those of all ranks ÷ cores, if that
is more; otherwise by seconds. Memory is the most that a rank's process had, less what it had before.

Prints a table; writes benchmarks/results/plan.json and the table of docs/planning.md.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from documents import fill, keep
from plan_cases import CASES, SCHEMAS, WAYS, config_of
from rank_group import Ranks
from rich.console import Console
from rich.table import Table

from raytrec.planning.dry_run import Predictor
from raytrec.planning.machines import Cluster
from raytrec.planning.memory import PlannedTable
from raytrec.planning.probe import rates_from
from raytrec.worker.build import unsharded

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "plan.json"
BUSY = 1.5
CLOCKS = ("s", "cpu s")  # by which steps and collectives count
NOT_HERE = ("process", "read ahead", "checkpoint copies")  # parts that no rank of this benchmark has
STEPS = 12
FIGURES = ("ms", "predicted_ms", "mib", "predicted_mib")
MiB = 2**20


@dataclass
class Row:
    """A plan; milliseconds and MiB of the rank with most.

    `plan` is what it is: two ways that lead to one plan have been measured twice.
    """

    ranks: int
    schema: str
    way: str
    ms: float
    predicted_ms: float
    mib: float
    predicted_mib: float
    plan: str

    @property
    def time_error(self) -> float:
        return self.predicted_ms / self.ms - 1

    @property
    def memory_error(self) -> float:
        return self.predicted_mib / self.mib - 1


def main(
    rounds: Annotated[int, typer.Option(help="Turns of each plan.")] = 3,
    smallest: Annotated[bool, typer.Option(help="Two plans of two ranks; writes nothing.")] = False,
    again: Annotated[
        bool, typer.Option("--again", help="Predict again what plan.json has measured.")
    ] = False,
) -> None:
    """Prints the table."""
    ways = {2: ("table_wise", "row_wise")} if smallest else WAYS
    schemas, rounds = (["clicks"], 1) if smallest else (list(SCHEMAS), rounds)
    if again:
        kept = json.loads(RESULTS.read_text())
        clock, measured = kept["clock"], [Measured(**each) for each in kept["measured"]]
    else:
        clock = CLOCKS[os.getloadavg()[0] > BUSY]
        measured = []
        for world in ways:
            measured.append(measure(world, schemas, ways[world], rounds, clock))
            if not smallest:  # for --again, whatever comes next
                keep(RESULTS, {"clock": clock, "measured": [asdict(each) for each in measured]})
    rows = [row for each in measured for row in predict(each, clock)]
    found = summary(rows)
    show(rows, found, clock)
    if not smallest:
        keep(RESULTS, {"clock": clock, "summary": found, "measured": [asdict(each) for each in measured]})
        fill("docs/planning.md", "plan", document(rows, found))


@dataclass
class Measured:
    """What ranks have seen.

    Attributes:
        samples: of each rank, the median of its looks at rates.
        turns: plan → of each turn, of each rank [seconds, seconds of CPU] of a step.
        memory: plan → bytes that the fullest rank had, at most, in the turn in which it was least.
    """

    world: int
    samples: list[dict[str, float]]
    turns: dict[str, list[list[list[float]]]]
    memory: dict[str, float]


def measure(world: int, schemas: list[str], ways: tuple[str, ...], rounds: int, clock: str) -> Measured:
    """All plans of so many ranks, in turns with rates."""
    names = [f"{schema} {way}" for schema in schemas for way in ways]
    out, samples = Measured(world, [], {name: [] for name in names}, {}), []
    with ExitStack() as stack:
        ranks = Ranks("plan_side.py", HERE.parent, world, stack)
        ranks.ask(sample=clock)  # sets everything up
        for _ in range(rounds):
            for name in names:
                samples.append(ranks.ask(sample=clock))
                ranks.ask(case=name)
                out.turns[name].append(ranks.ask(steps=STEPS))
                out.memory[name] = min(out.memory.get(name, 1e18), max(ranks.ask(memory=True)))
                print(f"{world} ranks, {name}", file=sys.stderr, flush=True)
    for of_rank in zip(*samples, strict=True):
        out.samples.append({name: statistics.median(one[name] for one in of_rank) for name in of_rank[0]})
    return out


def predict(measured: Measured, clock: str) -> list[Row]:
    """Each plan's memory and step, from the ranks' rates."""
    world, rows = measured.world, []
    rates = rates_from([[sample] for sample in measured.samples])
    for name, turns in measured.turns.items():
        case, (schema, way) = CASES[name], name.split()
        found = Predictor(config_of(case, world), case.schema, unsharded, rates)(
            Cluster(1, world, 64, 256, 256)
        )
        sizes = sum(size for (_, part), size in found.memory.parts.items() if part not in NOT_HERE)
        step = found.time.step if clock == CLOCKS[0] else critical(found.time.busy)
        times = 1e3 * took(turns, clock), 1e3 * step
        memory = measured.memory[name] / MiB, float(sizes.max()) / MiB
        rows.append(Row(world, schema, way, *times, *memory, placement(found.tables)))
    return rows


def placement(tables: list[PlannedTable]) -> str:
    """What a plan is, whatever its ranks are called: they are equal, and on one host."""
    names: dict[int, int] = {}
    of_tables = [
        (table.sharding_type, [(names.setdefault(rank, len(names)), *size) for rank, *size in table.shards])
        for table in tables
    ]
    return repr(of_tables)


def took(turns: list[Any], clock: str) -> float:
    """Seconds of a step: the median of the turns."""
    if clock == CLOCKS[0]:
        return statistics.median(max(seconds for seconds, _ in turn) for turn in turns)
    return critical(np.median([[cpu for _, cpu in turn] for turn in turns], axis=0).tolist())


def critical(busy: list[float]) -> float:
    """Of ranks that are busy so long, on this machine's cores."""
    return max(*busy, sum(busy) / len(os.sched_getaffinity(0)), 0.0)


def summary(rows: list[Row]) -> dict[str, float]:
    """The figures that count."""
    groups: dict[tuple, list[Row]] = {}
    plans = of_plans(rows)
    for row in plans:
        groups.setdefault((row.ranks, row.schema), []).append(row)
    choices = [group for group in groups.values() if len(group) > 1]
    good = [
        min(group, key=lambda row: row.predicted_ms).ms <= 1.05 * min(row.ms for row in group)
        for group in choices
    ]
    measured, predicted = ([getattr(row, name) for row in rows] for name in ("ms", "predicted_ms"))
    places = [np.argsort(np.argsort(values)) for values in (measured, predicted)]
    return {
        "ways": len(rows),
        "plans": len(plans),
        "memory_within_5": sum(abs(row.memory_error) <= 0.05 for row in rows),
        "memory_error_max": max(abs(row.memory_error) for row in rows),
        "time_error_median": statistics.median(abs(row.time_error) for row in rows),
        "rank_correlation": float(np.corrcoef(*places)[0, 1]),
        "best_picked": sum(good) / len(good),
    }


def of_plans(rows: list[Row]) -> list[Row]:
    """Rows of different plans: of one that several ways have led to, the mean of their figures."""
    same: dict[tuple, list[Row]] = {}
    for row in rows:
        same.setdefault((row.ranks, row.schema, row.plan), []).append(row)
    return [
        replace(of[0], **{name: statistics.mean(getattr(row, name) for row in of) for name in FIGURES})
        for of in same.values()
    ]


def cells(row: Row) -> list[str]:
    times = f"{row.ms:.1f}", f"{row.predicted_ms:.1f}", f"{row.time_error:+.0%}"
    return [
        str(row.ranks),
        row.schema,
        row.way,
        *times,
        f"{row.mib:.0f}",
        f"{row.predicted_mib:.0f}",
        f"{row.memory_error:+.1%}",
    ]


HEADER = ["ranks", "schema", "sharding", "ms", "predicted", "", "MiB", "predicted", ""]


def words(found: dict[str, float]) -> str:
    memory, time = found["memory_error_max"], found["time_error_median"]
    picked, places = found["best_picked"], found["rank_correlation"]
    parts = (
        f"{found['ways']} rows of {found['plans']} plans: memory within {memory:.1%} "
        f"({found['memory_within_5']} within 5 %)",
        f"time off by {time:.1%} (median)",
        f"rank correlation {places:.2f}",
        f"the best plan or one within 5 % of it picked in {picked:.0%}",
    )
    return ", ".join(parts)


def show(rows: list[Row], found: dict[str, float], clock: str) -> None:
    table = Table(title=f"A step by {clock}, and memory of the fullest rank")
    for column in HEADER:
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*cells(row))
    console = Console(width=120)
    console.print(table)
    console.print(words(found))


def document(rows: list[Row], found: dict[str, float]) -> str:
    """Errors by ways of sharding; all rows are what --again prints."""
    header = ["sharding", "plans", "ms a step", "time off by: median", "worst", "memory off by: worst"]
    lines = [header, ["---", *["---:"] * (len(header) - 1)]]
    for way in dict.fromkeys(row.way for row in rows):
        of = [row for row in rows if row.way == way]
        times, memory = ([getattr(row, name) for row in of] for name in ("time_error", "memory_error"))
        span = f"{min(row.ms for row in of):.0f} to {max(row.ms for row in of):.0f}"
        middle = statistics.median(map(abs, times))
        worst = f"{max(times, key=abs):+.0%}", f"{max(memory, key=abs):+.1%}"
        lines.append([way, str(len(of)), span, f"{middle:.0%}", *worst])
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), "", words(found) + "."])


if __name__ == "__main__":
    typer.run(main)
