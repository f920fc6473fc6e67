"""Time that each part of a run's start takes, and of its restart after a worker is killed.

    python benchmarks/start.py [--rounds 5]

`raytrec train` runs on a local Ray cluster on this machine, on CPU, with two workers and little data. The
driver and the ranks record moments in a file (moments.py). When the run has saved twice, a random worker is
killed with SIGKILL. When the run trains again, it is terminated, and the next round begins. The table shows
medians, and the CPU seconds of all the run's processes until the first step. The goals are 10 s for the
start and 3 s for the restart, on an idle machine with two cores.

Writes benchmarks/results/start.json and the table in docs/benchmarks.md.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

import harness
import typer
from harness import HERE, Grid, run_raytrec, tree_cpu_s
from moments import FILE, FIRST, RANK, Moment

LONGEST_S = 240.0
LONG_PART_S = 0.3
ROWS, BATCH = 20_000, 512
# Moment → part of a start that ends at the moment.
START = {
    "driver imported": "importing raytrec",
    "data read": "configuration, schema, footers",
    "Ray imported": "Ray's own import",
    "Ray started": "GCS, raylet",
    "controller asked": "coordinator, Ray Train",
    RANK: "controller, worker processes, process group",
    "entered": "rank setup",
    "built": "model, plan, sharding",
    "restored": "checkpoint or initial values",
    "checked": "observers, start checks",
    "first batch": "readers, first batch",
    FIRST: "first step",
}
AGAIN = {"noticed": "failure detection", **dict(list(START.items())[5:])}


class Failed(Exception):
    """Error raised if the run ended or took too long."""


@contextmanager
def begun(config: Path, folder: Path) -> Iterator[tuple[subprocess.Popen, Path]]:
    """Run the command during the block; yield the process and the file of moments.

    Args:
        config: Configuration of the run.
        folder: New folder for the run. The driver's output is written to a file next to the folder.
    """
    folder.mkdir()
    moments = folder / "moments.jsonl"
    command = [sys.executable, str(HERE / "moments.py"), "train", str(config), f"run.dir={folder / 'run'}"]
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"} | {FILE: str(moments)}
    with open(folder.with_suffix(".log"), "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, env=environment)
    try:
        yield process, moments
    finally:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
        process.kill()
        process.wait()


def one_round(config: Path, folder: Path, rng: random.Random) -> dict[str, Any]:
    """Start a run and kill a worker; return start and restart (see `parts`), and cpu_s until the first step.

    Raises:
        Failed: The run ended or took too long.
    """
    with begun(config, folder) as (process, moments):
        began = time.time()
        first = wait(process, folder, lambda: _steps(moments))
        cpu_s = round(tree_cpu_s(process.pid), 2)
        wait(process, folder, lambda: _saved(folder / "run") >= 2)
        killed = time.time()
        os.kill(rng.choice(first).pid, signal.SIGKILL)
        wait(process, folder, lambda: [m for m in _steps(moments) if m.unix_s > killed])
    every = read_moments(moments)
    events = [json.loads(line) for line in (folder / "run" / "events.jsonl").read_text().splitlines()]
    noticed = [Moment("noticed", e["unix_s"], 0) for e in events if e["event"] == "failed"]
    return {
        "cpu_s": cpu_s,
        "start": parts(START, began, [m for m in every if m.unix_s < killed]),
        "restart": parts(AGAIN, killed, [m for m in [*noticed, *every] if m.unix_s > killed]),
    }


def parts(names: dict[str, str], began: float, moments: list[Moment]) -> dict[str, float]:
    """Return part → seconds since the previous moment, using the moment of the last rank; and the sum as `total`."""
    seconds, previous = {}, began
    for name, part in names.items():
        firsts: dict[int, float] = {}
        for moment in moments:
            if moment.name == name:
                firsts[moment.pid] = min(moment.unix_s, firsts.get(moment.pid, moment.unix_s))
        at = max(firsts.values(), default=previous)
        seconds[part], previous = round(at - previous, 3), at
    return seconds | {"total": round(previous - began, 3)}


def read_moments(file: Path) -> list[Moment]:
    """Return the moments recorded in a file; [] if the file does not exist yet."""
    with suppress(FileNotFoundError):
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
        return [Moment(**json.loads(line)) for line in lines if line.endswith("\n")]
    return []


def _steps(file: Path) -> list[Moment]:
    """Return the moments of first steps, or [] until both ranks of a group have recorded theirs."""
    found = [moment for moment in read_moments(file) if moment.name == FIRST]
    return found if len(found) % 2 == 0 else []


def _saved(run: Path) -> int:
    with suppress(FileNotFoundError):
        return (run / "events.jsonl").read_text().count('"saved"')
    return 0


def wait(process: subprocess.Popen, folder: Path, ready: Callable[[], Any]) -> Any:
    """Wait until `ready` returns a true value, and return that value.

    Raises:
        Failed: The driver ended, or LONGEST_S have passed.
    """
    until = time.monotonic() + LONGEST_S
    while not (value := ready()):
        if process.poll() is not None or time.monotonic() > until:
            tail = folder.with_suffix(".log").read_text(errors="replace")[-3000:]
            raise Failed(f"the driver ended, or has not reached the next state within {LONGEST_S:.0f} s\n{tail}")
        time.sleep(0.01)
    return value


def prepare(folder: Path, save: str) -> Path:
    """Write a small data set, and a configuration that trains on the data endlessly.

    Args:
        folder: Folder for the data and the configuration.
        save: Schedule of saves, as a key of the section `checkpoint` with its value.
    """
    sizes = ["--rows", str(ROWS), "--sparse", "8", "--multi-hot", "2", "--table-rows", "1000"]
    run_raytrec("prepare", "synthetic", "--out", folder / "data", *sizes)
    config = folder / "start.yaml"
    config.write_text(
        f"data: {{train: {folder}/data/train, valid: {folder}/data/valid, global_batch_size: {BATCH}}}\n"
        f"model: {{bottom_mlp: [16, 16], top_mlp: [16]}}\nscaling: {{num_workers: 2}}\n"
        f"checkpoint: {{{save}}}\ntrain: {{epochs: 100000}}\ntracking: {{report: false}}\n"
    )
    return config


def grid(values: dict[str, Any], least_s: float = 0.0) -> Grid:
    """Return the table, with a row for the sum and for each part that takes at least `least_s` seconds."""
    rows = []
    for part in [*dict.fromkeys([*START.values(), *AGAIN.values()]), "total"]:
        seconds = [values[which].get(part) for which in ("start", "restart")]
        if max(value or 0.0 for value in seconds) < least_s:
            continue
        rows.append([part, *("" if value is None else f"{value:.2f}" for value in seconds)])
    return Grid(("part", "start, s", "restart, s"), rows)


def document(values: dict[str, Any]) -> str:
    """Return the text for docs/benchmarks.md."""
    of = (
        f"The values are medians of {len(values['rounds'])} runs, without parts of less than {LONG_PART_S} s. "
        f"A run uses {values['cpu_s']:.1f} CPU seconds until its first step."
    )
    return f"{grid(values, LONG_PART_S).markdown()}\n\n{of}"


def main(rounds: harness.Rounds = 5, smallest: harness.Smallest = False) -> None:
    """Measure the rounds and print the table; without --smallest, write benchmarks/results/start.json."""
    load, done, rng = round(os.getloadavg()[0], 1), [], random.Random(0)
    with tempfile.TemporaryDirectory(prefix="start-") as place:
        config = prepare(Path(place), save="every_steps: 100")
        for number in range(1 if smallest else rounds):
            done.append(one_round(config, Path(place, str(number)), rng))
            start, restart = (done[-1][which]["total"] for which in ("start", "restart"))
            print(f"round {number + 1}: start {start:.1f} s, restart {restart:.1f} s", flush=True)
    values: dict[str, Any] = {
        which: {part: round(median(each[which][part] for each in done), 2) for part in done[0][which]}
        for which in ("start", "restart")
    }
    values |= {"cpu_s": median(each["cpu_s"] for each in done), "load": load, "cpus": os.cpu_count()}
    values |= {"rounds": done}
    grid(values).show()
    print(f"medians of {len(done)}; {values['cpu_s']:.1f} CPU seconds until the first step; load {load}")
    if not smallest:
        harness.publish("start", values, document(values))


if __name__ == "__main__":
    typer.run(main)
