"""Predicted and measured memory and time of plans on CPU, with 1 to 4 ranks.

    python benchmarks/plan.py [--rounds 3] [--smallest]

The ranks that train a plan also measure the machine's rates, alternating with the plan's steps. Each plan's
memory and step time are predicted from the medians of all these rates. A step is timed in wall-clock
seconds. If the machine runs other work (the load at the start is above 1.5), a step is timed in CPU seconds:
those of the busiest rank, or those of all ranks ÷ cores if greater. Memory is the peak of a rank's process,
less the memory before the plan.

Writes benchmarks/results/plan.json and the table in docs/planning.md.
"""

from __future__ import annotations

import os
import statistics
import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from time import perf_counter, process_time
from typing import Annotated, Any

import harness
import numpy as np
import typer
from harness import Grid
from plan_cases import CASES, SCHEMAS, WAYS, Trained, config_of, release
from rank_group import Ranks, run_script

from raytrec.planning.dry_run import ClusterEstimator
from raytrec.planning.machines import Cluster
from raytrec.planning.memory import PlannedTable
from raytrec.planning.probe import RateProbe, compute_rates
from raytrec.worker.build import build_unsharded

BUSY = 1.5
CLOCKS = ("s", "cpu s")  # clocks for steps and collectives
NOT_HERE = ("process", "read ahead", "checkpoint copies")  # memory parts that this benchmark's ranks do not have
STEPS = 12
FIGURES = ("ms", "predicted_ms", "mib", "predicted_mib")
MiB = 2**20
HEADER = ("ranks", "schema", "sharding", "ms", "predicted", "", "MiB", "predicted", "")


@dataclass
class Row:
    """Plan on a number of ranks, with milliseconds per step and MiB on the rank that uses the most memory.

    `plan` identifies the plan. If two ways of sharding lead to the same plan, the plan is measured twice.
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
        """Return the relative error of the predicted time."""
        return self.predicted_ms / self.ms - 1

    @property
    def memory_error(self) -> float:
        """Return the relative error of the predicted memory."""
        return self.predicted_mib / self.mib - 1


@dataclass
class Measured:
    """Rates, step times and memory measured with one number of ranks.

    Attributes:
        world: Number of ranks.
        samples: For each rank, the medians of its samples of rates.
        turns: Plan → [seconds, CPU seconds] per step, for each turn and rank.
        memory: Plan → peak bytes of the fullest rank, in the turn with the lowest peak.
    """

    world: int
    samples: list[dict[str, float]]
    turns: dict[str, list[list[list[float]]]]
    memory: dict[str, float]


def side(rank: int, world: int) -> Any:
    """Return the function with which a rank serves requests.

    {"sample": clock} measures the machine's rates ("cpu s": collectives in CPU time), {"case": name} builds a
    plan, {"steps": n} trains with the plan, and {"memory": true} returns the plan's peak bytes.
    """
    import torch

    probe, current = RateProbe(torch.device("cpu")), list[Trained]()

    def answer(sample: str = "", case: str = "", steps: int = 6, memory: bool = False) -> Any:
        if sample:
            return probe.sample(process_time if sample == "cpu s" else perf_counter)
        if memory:
            return current[0].memory()
        if case:
            current.clear()
            release()
            current.append(Trained(case, rank, world))
        return current[0].train(steps)

    return answer


def measure(world: int, schemas: list[str], ways: tuple[str, ...], rounds: int, clock: str) -> Measured:
    """Train all plans on a number of ranks, alternating with samples of rates."""
    names = [f"{schema} {way}" for schema in schemas for way in ways]
    out, samples = Measured(world, [], {name: [] for name in names}, {}), []
    with ExitStack() as stack:
        ranks = Ranks("plan.py", world, stack)
        ranks.ask(sample=clock)  # one-time costs
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
    """Predict the memory and step time of each plan from the ranks' rates.

    Stored plans of earlier versions (planners that no longer exist) are left out.
    """
    world, rows = measured.world, []
    rates = compute_rates([[sample] for sample in measured.samples])
    for name, turns in measured.turns.items():
        if name not in CASES:
            print(f"{world} ranks, {name}: left out, because this version has no such plan", file=sys.stderr)
            continue
        case, (schema, way) = CASES[name], name.split()
        estimate = ClusterEstimator(config_of(case, world), case.schema, build_unsharded, rates)(
            Cluster(1, world, 64, 256, 256)
        )
        sizes = sum(size for (_, part), size in estimate.memory.parts.items() if part not in NOT_HERE)
        step = estimate.time.step if clock == CLOCKS[0] else critical(estimate.time.busy)
        times = 1e3 * took(turns, clock), 1e3 * step
        memory = measured.memory[name] / MiB, float(sizes.max()) / MiB
        rows.append(Row(world, schema, way, *times, *memory, placement(estimate.tables)))
    return rows


def placement(tables: list[PlannedTable]) -> str:
    """Return a text that identifies a plan up to the numbering of its ranks, which are all on one host."""
    names: dict[int, int] = {}
    of_tables = [
        (table.sharding_type, [(names.setdefault(rank, len(names)), *size) for rank, *size in table.shards])
        for table in tables
    ]
    return repr(of_tables)


def took(turns: list[Any], clock: str) -> float:
    """Return the seconds per step on a clock, as the median over turns."""
    if clock == CLOCKS[0]:
        return statistics.median(max(seconds for seconds, _ in turn) for turn in turns)
    return critical(np.median([[cpu for _, cpu in turn] for turn in turns], axis=0).tolist())


def critical(busy: list[float]) -> float:
    """Return the seconds of a step on this machine's cores, given the CPU seconds of each rank."""
    return max(*busy, sum(busy) / len(os.sched_getaffinity(0)), 0.0)


def summary(rows: list[Row]) -> dict[str, float]:
    """Return the summary's measurements of all rows.

    Returns:
        ways and plans: numbers of rows and of different plans; memory_within_5: number of rows with a memory error of
        at most 5 %; memory_error_max and time_error_median: relative errors; rank_correlation: Spearman's coefficient
        of measured and predicted times; best_picked: share of the cases with several plans in which the step of the
        plan with the lowest predicted time is at most 5 % slower than the fastest.
    """
    groups: dict[tuple, list[Row]] = {}
    plans = of_plans(rows)
    for row in plans:
        groups.setdefault((row.ranks, row.schema), []).append(row)
    choices = [group for group in groups.values() if len(group) > 1]
    good = [min(group, key=lambda row: row.predicted_ms).ms <= 1.05 * min(row.ms for row in group) for group in choices]
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
    """Return a row for each plan, with mean measurements if several ways of sharding lead to the plan."""
    same: dict[tuple, list[Row]] = {}
    for row in rows:
        same.setdefault((row.ranks, row.schema, row.plan), []).append(row)
    return [
        replace(of[0], **{name: statistics.mean(getattr(row, name) for row in of) for name in FIGURES})
        for of in same.values()
    ]


def words(figures: dict[str, float]) -> str:
    """Return the summary as sentences."""
    memory, time = figures["memory_error_max"], figures["time_error_median"]
    picked, places = figures["best_picked"], figures["rank_correlation"]
    sentences = (
        f"The table summarizes {figures['ways']} measurements of {figures['plans']} plans.",
        f"The largest memory error is {memory:.1%}; {figures['memory_within_5']} of {figures['ways']} errors are "
        "within 5%.",
        f"The median time error is {time:.1%}, and the rank correlation of predicted and measured times is "
        f"{places:.2f}.",
        f"In {picked:.0%} of the cases, the step of the chosen plan is at most 5% slower than that of the best plan.",
    )
    return " ".join(sentences)


def show(rows: list[Row], figures: dict[str, float], clock: str) -> None:
    """Print all rows and the summary."""
    cells = []
    for row in rows:
        times = f"{row.ms:.1f}", f"{row.predicted_ms:.1f}", f"{row.time_error:+.0%}"
        memory = f"{row.mib:.0f}", f"{row.predicted_mib:.0f}", f"{row.memory_error:+.1%}"
        cells.append([str(row.ranks), row.schema, row.way, *times, *memory])
    Grid(HEADER, cells, f"A step by {clock}, and memory of the fullest rank", left=3).show()
    print(words(figures))


def document(rows: list[Row], figures: dict[str, float]) -> str:
    """Return the text for docs/planning.md, with errors for each way of sharding; --again prints all rows."""
    header = ("sharding", "plans", "ms per step", "median time error", "largest time error", "largest memory error")
    lines = []
    for way in dict.fromkeys(row.way for row in rows):
        of = [row for row in rows if row.way == way]
        times, memory = ([getattr(row, name) for row in of] for name in ("time_error", "memory_error"))
        span = f"{min(row.ms for row in of):.0f} to {max(row.ms for row in of):.0f}"
        middle = statistics.median(map(abs, times))
        worst = f"{max(times, key=abs):+.0%}", f"{max(memory, key=abs):+.1%}"
        lines.append([way, str(len(of)), span, f"{middle:.0%}", *worst])
    return f"{Grid(header, lines).markdown()}\n\n{words(figures)}"


def main(
    rounds: harness.Rounds = 3,
    smallest: harness.Smallest = False,
    again: Annotated[bool, typer.Option("--again", help="Predict the measured plans of plan.json again.")] = False,
) -> None:
    """Measure (or, with --again, load) and predict all plans, and print the table.

    Without --smallest, the results are stored and docs/planning.md is written, unless a stored plan was left out.
    """
    ways = {2: ("table_wise", "row_wise")} if smallest else WAYS
    schemas, rounds = (["clicks"], 1) if smallest else (list(SCHEMAS), rounds)
    if again:
        stored = harness.load("plan")
        clock, measured = stored["clock"], [Measured(**each) for each in stored["measured"]]
    else:
        clock, measured = CLOCKS[os.getloadavg()[0] > BUSY], []
        for world in ways:
            measured.append(measure(world, schemas, ways[world], rounds, clock))
            if not smallest:  # kept for --again in case a later step fails
                harness.store("plan", {"clock": clock, "measured": [asdict(each) for each in measured]})
    rows = [row for each in measured for row in predict(each, clock)]
    figures = summary(rows)
    show(rows, figures, clock)
    if not smallest and len(rows) == sum(len(each.turns) for each in measured):  # no stored plan was left out
        content = {"clock": clock, "summary": figures, "measured": [asdict(each) for each in measured]}
        harness.publish("plan", content, document(rows, figures), "docs/planning.md")


if __name__ == "__main__":
    run_script(main, side)
