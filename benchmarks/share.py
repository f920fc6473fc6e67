"""Cost of faults: rows/s in periods that begin with the kill of a worker, compared with undisturbed periods.

    python benchmarks/share.py [--every 30] [--faults 3]

`raytrec train` runs on a local Ray cluster on this machine, on CPU, with two workers. Undisturbed periods
of 30 s alternate with periods at the beginning of which a random worker is killed with SIGKILL. The run
saves every 2 s: the best interval is about √(2 · cost of a save · time between faults) (Young 1974), and a
save costs a few hundredths of a second here. A run's progress is the highest
step reached, so repeated steps are counted once. The goal is 85 % with a fault every 30 s.

Writes benchmarks/results/share.json and the sentence in docs/benchmarks.md.
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

import harness
import typer
from moments import FIRST
from start import BATCH, begun, prepare, read_moments, wait

from raytrec.common.messages import METRICS

SETTLES_S = 10.0  # seconds between the first step and the first period


def reached(folder: Path) -> list[tuple[float, int]]:
    """Return (seconds since 1970, step) for each of a run's training reports."""
    lines = [json.loads(line) for line in (folder / "run" / METRICS).read_text().splitlines()]
    return [(each["unix_s"], each["step"]) for each in lines if each.get("kind", "train") == "train"]


def step_at(moment: float, reports: list[tuple[float, int]]) -> float:
    """Return the highest step that the run had reached at a time, interpolated between reports."""
    earlier, later = (0.0, 0), None
    for at, step in reports:
        if at <= moment:
            earlier = max(earlier, (at, step), key=lambda report: report[1])
        elif step >= earlier[1] and later is None:
            later = at, step
    if later is None or not earlier[1]:
        return float(earlier[1])
    return earlier[1] + (later[1] - earlier[1]) * (moment - earlier[0]) / (later[0] - earlier[0])


def measure(config: Path, folder: Path, every_s: float, faults: int) -> dict[str, float]:
    """Train a run, and return its rows per second in periods without and with a fault."""
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
                wait(process, folder, lambda: None)  # raises an error with the driver's output
        time.sleep(1)  # wait for a report after the last period
    steps = [step_at(moment, reached(folder)) for moment in ends]
    rates = [BATCH * (b - a) / (t - s) for (a, s), (b, t) in pairwise(zip(steps, ends, strict=True))]
    return {"calm": mean(rates[::2]), "disturbed": mean(rates[1::2])}


def _pids(moments: Path) -> list[int]:
    """Return the process ids of ranks that have trained, the newest last."""
    return [moment.pid for moment in read_moments(moments) if moment.name == FIRST]


def main(
    every: Annotated[float, typer.Option(help="Length of a period in seconds.")] = 30,
    faults: Annotated[int, typer.Option(help="Number of faults.")] = 3,
    smallest: harness.Smallest = False,
) -> None:
    """Measure and print the share, and write benchmarks/results/share.json."""
    every, faults = (8.0, 1) if smallest else (every, faults)
    with tempfile.TemporaryDirectory(prefix="share-") as place:
        rates = measure(prepare(Path(place), save="every_s: 2"), Path(place) / "run", every, faults)
    values = {"every_s": every, "faults": faults, "rows_per_s": rates}
    values |= {"share": rates["disturbed"] / rates["calm"], "cpus": os.cpu_count()}
    print(document(values))
    if not smallest:
        harness.publish("share", values, document(values))


def document(values: dict[str, Any]) -> str:
    """Return the sentence for docs/benchmarks.md."""
    rates, times, every = values["rows_per_s"], values["faults"], values["every_s"]
    return (
        f"The undisturbed speed is {rates['calm']:,.0f} rows/s. In the {every:.0f} s after a worker is killed "
        f"({times} times), the speed is {rates['disturbed']:,.0f} rows/s ({values['share']:.0%})."
    )


if __name__ == "__main__":
    typer.run(main)
