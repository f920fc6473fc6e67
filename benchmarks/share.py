"""What faults cost a run: rows a second with a worker killed every 30 s, against the same run undisturbed.

    python benchmarks/share.py [--every 30] [--faults 4]

`raytrec train` on a local Ray of this machine, on CPU, with two workers, saving every 5 s: first undisturbed,
then with a random worker killed with SIGKILL every so many seconds, both for the same time after their first
step. What a run has come to is the step that it has reached, so steps that are trained again count once.
Prints both rates and their ratio and writes them into benchmarks/results/share.json.

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
from pathlib import Path
from typing import Annotated

import typer
from moments import FIRST
from start import BATCH, begun, prepare, read_moments, wait

from raytrec.common.messages import METRICS

RESULTS = Path(__file__).parent / "results" / "share.json"


def rows_per_s(config: Path, folder: Path, every_s: float, seconds: float, kills: bool) -> float:
    """Rows of the steps that a run gets further, per second of the time after its first step."""
    rng = random.Random(0)
    with begun(config, folder) as (process, moments):
        wait(process, folder, lambda: len(_pids(moments)) >= 2)
        began = last = time.time()
        while time.time() < began + seconds:
            if process.poll() is not None:
                wait(process, folder, lambda: None)  # says what it has said
            if kills and time.time() > last + every_s:
                last = time.time()
                with suppress(ProcessLookupError):
                    os.kill(rng.choice(_pids(moments)[-2:]), signal.SIGKILL)
            time.sleep(0.1)
    lines = [json.loads(line) for line in (folder / "run" / METRICS).read_text().splitlines()]
    reached = [(each["unix_s"], each["step"]) for each in lines if each.get("kind", "train") == "train"]
    within = [(at, step) for at, step in reached if began <= at <= began + seconds]
    return (within[-1][1] - within[0][1]) * BATCH / (within[-1][0] - within[0][0])


def _pids(moments: Path) -> list[int]:
    """Of ranks that have trained, the newest last."""
    return [moment.pid for moment in read_moments(moments) if moment.name == FIRST]


def main(
    every: Annotated[float, typer.Option(help="Seconds from one fault to the next.")] = 30,
    faults: Annotated[int, typer.Option(help="How many.")] = 4,
    smallest: Annotated[bool, typer.Option("--smallest", help="One fault, and write nothing.")] = False,
) -> None:
    """Prints the share; writes benchmarks/results/share.json."""
    every, faults = (8.0, 1) if smallest else (every, faults)
    with tempfile.TemporaryDirectory(prefix="share-") as place:
        config = prepare(Path(place), save="every_s: 5")
        seconds = every * (faults + 1)
        calm = rows_per_s(config, Path(place) / "calm", every, seconds, kills=False)
        disturbed = rows_per_s(config, Path(place) / "disturbed", every, seconds, kills=True)
    share = disturbed / calm
    print(f"undisturbed {calm:,.0f} rows/s; with a fault every {every:.0f} s {disturbed:,.0f}: {share:.0%}")
    if not smallest:
        values = {"every_s": every, "faults": faults, "rows_per_s": {"calm": calm, "disturbed": disturbed}}
        RESULTS.write_text(json.dumps(values | {"share": share, "cpus": os.cpu_count()}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
