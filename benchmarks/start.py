"""How long a run takes to start, and to train again when a worker has been killed, and what takes the time.

    python benchmarks/start.py [--rounds 5]

`raytrec train` runs on a local Ray of this machine, on CPU, with two workers and little data. Its process and
its ranks note moments in a file (moments.py). When it has saved a few times, a random worker is killed with
SIGKILL; when it trains again, the run is ended, and the next one begins. Prints the medians, and the CPU
seconds that all processes of the run had taken by the first step; writes benchmarks/results/start.json and
the table in docs/benchmarks.md.

The goal is 10 s and 3 s on an idle machine with two cores.
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
from typing import Annotated, Any

import psutil
import typer
from documents import fill, keep
from moments import FILE, FIRST, RANK, Moment
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "start.json"
LONGEST_S = 240.0
ROWS, BATCH = 20_000, 512
# What ends at a moment, in its words.
START = {
    "driver imported": "Python, raytrec",
    "data read": "configuration, schema, footers",
    "Ray imported": "Ray's own import",
    "Ray started": "GCS, raylet",
    "controller asked": "coordinator, Ray Train",
    RANK: "controller, worker processes, process group",
    "entered": "the rank's place",
    "built": "model, plan, sharding",
    "restored": "checkpoint or initial values",
    "checked": "observers, start checks",
    "first batch": "readers, first batch",
    FIRST: "first step",
}
AGAIN = {"noticed": "until it is noticed", **dict(list(START.items())[5:])}


class Failed(Exception):
    """A run did not do what it had to."""


@contextmanager
def begun(config: Path, folder: Path) -> Iterator[tuple[subprocess.Popen, Path]]:
    """A block while which a run goes on: its driver, and the file of its moments.

    Args:
        folder: is made; what the driver says goes into a file beside it.
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
    """Parts of a start and of a restart, in seconds.

    Raises:
        Failed: the run ended, or took too long.
    """
    with begun(config, folder) as (process, moments):
        began = time.time()
        first = wait(process, folder, lambda: _steps(moments))
        cpu_s = _cpu_seconds(process.pid)
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
    """What ends at a moment → seconds since the moment before; of ranks, the last one's moment counts."""
    found, before = {}, began
    for name, part in names.items():
        at = max(_first_of_each(moments, name), default=before)
        found[part], before = round(at - before, 3), at
    return found | {"in all": round(before - began, 3)}


def _first_of_each(moments: list[Moment], name: str) -> list[float]:
    pids = {m.pid for m in moments if m.name == name}
    return [min(m.unix_s for m in moments if m.name == name and m.pid == pid) for pid in pids]


def read_moments(file: Path) -> list[Moment]:
    with suppress(FileNotFoundError):
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
        return [Moment(**json.loads(line)) for line in lines if line.endswith("\n")]
    return []


def _steps(file: Path) -> list[Moment]:
    """First steps, once both ranks of a group have made theirs."""
    found = [moment for moment in read_moments(file) if moment.name == FIRST]
    return found if len(found) % 2 == 0 else []


def _saved(run: Path) -> int:
    with suppress(FileNotFoundError):
        return (run / "events.jsonl").read_text().count('"saved"')
    return 0


def _cpu_seconds(pid: int) -> float:
    """Of a process and all below it."""
    total = 0.0
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        with suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return round(total, 2)


def wait(process: subprocess.Popen, folder: Path, found: Callable[[], Any]) -> Any:
    """Waits until something is found.

    Raises:
        Failed: the driver has ended, or it takes too long.
    """
    until = time.monotonic() + LONGEST_S
    while not (value := found()):
        if process.poll() is not None or time.monotonic() > until:
            raise Failed(folder.with_suffix(".log").read_text(errors="replace")[-3000:])
        time.sleep(0.01)
    return value


def prepare(folder: Path, save: str) -> Path:
    """Little data, and a configuration that trains it for ever.

    Args:
        save: when to save, a key of the section `checkpoint` and its value.
    """
    command = [sys.executable, "-m", "raytrec", "prepare", "synthetic", "--out", str(folder / "data")]
    command += ["--rows", str(ROWS), "--sparse", "8", "--multi-hot", "2", "--table-rows", "1000"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    config = folder / "start.yaml"
    config.write_text(
        f"data: {{train: {folder}/data/train, valid: {folder}/data/valid, global_batch_size: {BATCH}}}\n"
        f"model: {{bottom_mlp: [16, 16], top_mlp: [16]}}\nscaling: {{num_workers: 2}}\n"
        f"checkpoint: {{{save}}}\ntrain: {{epochs: 100000}}\ntracking: {{report: false}}\n"
    )
    return config


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {part: round(median(each[part] for each in rounds), 2) for part in rounds[0]}


def rows_of(values: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """(part, seconds of the start, of the restart); the sum last."""
    for part in [*dict.fromkeys([*START.values(), *AGAIN.values()]), "in all"]:
        start, restart = (values[which].get(part) for which in ("start", "restart"))
        yield part, *("" if value is None else f"{value:.2f}" for value in (start, restart))


def document(values: dict[str, Any]) -> str:
    """The table for docs/benchmarks.md, and what it is of."""
    lines = ["| what ends | start, s | restart, s |", "|---|---:|---:|"]
    lines += [f"| {' | '.join(row)} |" for row in rows_of(values)]
    of = f"Medians of {len(values['rounds'])} runs; {values['cpu_s']:.1f} CPU seconds until the first step."
    return "\n".join([*lines, "", of])


def show(values: dict[str, Any], rounds: int) -> None:
    table = Table("", "start, s", "restart, s")
    for row in rows_of(values):
        table.add_row(*row)
    Console().print(table)
    print(
        f"medians of {rounds}; {values['cpu_s']:.1f} CPU seconds until the first step; load {values['load']}"
    )


def main(
    rounds: Annotated[int, typer.Option(help="How often a run is started, and a worker killed.")] = 5,
    smallest: Annotated[bool, typer.Option("--smallest", help="Once, and write nothing.")] = False,
) -> None:
    """Prints the table; writes benchmarks/results/start.json."""
    load, done, rng = round(os.getloadavg()[0], 1), [], random.Random(0)
    with tempfile.TemporaryDirectory(prefix="start-") as place:
        folder = Path(place)
        config = prepare(folder, save="every_steps: 100")
        for number in range(1 if smallest else rounds):
            done.append(one_round(config, folder / f"{number}", rng))
            took = (f"{done[-1][which]['in all']:.1f} s" for which in ("start", "restart"))
            print(f"round {number + 1}: start {next(took)}, restart {next(took)}", flush=True)
    values: dict[str, Any] = {
        which: medians([each[which] for each in done]) for which in ("start", "restart")
    }
    values |= {"cpu_s": median(each["cpu_s"] for each in done), "load": load, "cpus": os.cpu_count()}
    show(values, len(done))
    if not smallest:
        values |= {"rounds": done}
        keep(RESULTS, values)
        fill("docs/benchmarks.md", "start", document(values))


if __name__ == "__main__":
    typer.run(main)
