"""What faults cost a run: rows a second with a worker killed every 30 s, against the same run undisturbed.

    python benchmarks/share.py [--every 30] [--faults 3]

`raytrec train` on a local Ray of this machine, on CPU, with two workers. Periods of 30 s take turns: one
undisturbed, one at whose beginning a random worker is killed with SIGKILL. It saves every 2 s: the best
interval is about the root of 2 · cost of a save · time between faults (Young 1974), and a save costs some
hundredths of a second here. What a run has come to is the step that it has reached, so steps that are trained
again count once.
Prints both rates and their ratio and writes them into benchmarks/results/share.json and docs/benchmarks.md.

The goal is 85 % with a fault every 30 s.
"""

from __future__ import annotations

import json
import os
import random
import signal
import tempfile
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import typer
from documents import fill, keep
from moments import FIRST
from start import BATCH, begun, prepare, read_moments, wait

from raytrec.common.messages import METRICS

RESULTS = Path(__file__).parent / "results" / "share.json"
SETTLES_S = 10.0  # a run, after its first step


def reached(folder: Path) -> list[tuple[float, int]]:
    """(seconds since 1970, step) of a run's reports of training."""
    lines = [json.loads(line) for line in (folder / "run" / METRICS).read_text().splitlines()]
    return [(each["unix_s"], each["step"]) for each in lines if each.get("kind", "train") == "train"]


def step_at(moment: float, reports: list[tuple[float, int]]) -> float:
    """The highest step that the run had reached at a moment, between reports in proportion."""
    before, after = (0.0, 0), None
    for at, step in reports:
        if at <= moment:
            before = max(before, (at, step), key=lambda report: report[1])
        elif step >= before[1] and after is None:
            after = at, step
    if after is None or not before[1]:
        return float(before[1])
    return before[1] + (after[1] - before[1]) * (moment - before[0]) / (after[0] - before[0])


def measure(config: Path, folder: Path, every_s: float, faults: int) -> dict[str, float]:
    """Rows a second of the periods without a fault, and of those with one."""
    rng, ends = random.Random(0), []
    with begun(config, folder) as (process, moments):
        wait(process, folder, lambda: len(_pids(moments)) >= 2)
        time.sleep(SETTLES_S)
        ends.append(time.time())
        for _ in range(faults):
            time.sleep(every_s)
            ends.append(time.time())
            with suppress(ProcessLookupError):
                os.kill(rng.choice(_pids(moments)[-2:]), signal.SIGKILL)
            time.sleep(every_s)
            ends.append(time.time())
            if process.poll() is not None:
                wait(process, folder, lambda: None)  # says what it has said
        time.sleep(1)  # for a report after the last period
    steps = [step_at(moment, reached(folder)) for moment in ends]
    rates = [BATCH * (b - a) / (t - s) for (a, s), (b, t) in pairwise(zip(steps, ends, strict=True))]
    return {"calm": mean(rates[::2]), "disturbed": mean(rates[1::2])}


def _pids(moments: Path) -> list[int]:
    """Of ranks that have trained, the newest last."""
    return [moment.pid for moment in read_moments(moments) if moment.name == FIRST]


def main(
    every: Annotated[float, typer.Option(help="Seconds of a period.")] = 30,
    faults: Annotated[int, typer.Option(help="How many.")] = 3,
    smallest: Annotated[bool, typer.Option("--smallest", help="One fault, and write nothing.")] = False,
) -> None:
    """Prints the share; writes benchmarks/results/share.json."""
    every, faults = (8.0, 1) if smallest else (every, faults)
    with tempfile.TemporaryDirectory(prefix="share-") as place:
        rates = measure(prepare(Path(place), save="every_s: 2"), Path(place) / "run", every, faults)
    values = {"every_s": every, "faults": faults, "rows_per_s": rates}
    values |= {"share": rates["disturbed"] / rates["calm"], "cpus": os.cpu_count()}
    print(document(values))
    if not smallest:
        keep(RESULTS, values)
        fill("docs/benchmarks.md", "share", document(values))


def document(values: dict[str, Any]) -> str:
    """The sentence for docs/benchmarks.md."""
    rates, times, every = values["rows_per_s"], values["faults"], values["every_s"]
    return (
        f"Undisturbed {rates['calm']:,.0f} rows/s; in {times} periods of {every:.0f} s that begin with a "
        f"killed worker {rates['disturbed']:,.0f} rows/s: {values['share']:.0%}."
    )


if __name__ == "__main__":
    typer.run(main)
