"""How processes end that have used everything: a test process and `raytrec train`, many times, under load.

    python benchmarks/exits.py [--times 50] [--busy 2] [--at-once 2]

The test process has used Ray, Ray Data, ranks joined by gloo, MLflow and Arrow's file systems; the run is a
tiny one with MLflow and its report. Meanwhile other processes keep the cores busy, so that threads are
interrupted at any place. Prints how often each exit code came; fails when one of them is not 0.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Annotated

import typer

ROOT = Path(__file__).parent.parent
TESTS = (
    "tests/driver/test_left_behind.py::test_steps_leave_nothing",
    "tests/tracking/test_mlflow.py::test_what_is_handed_over_is_in_the_store",
    "tests/checkpoint/test_storage.py::test_no_pickle",
    "tests/data/test_stream.py::test_file_order",
)
LONGEST_S = 600


def run_tests(folder: Path) -> list[str]:
    """The command of a test process."""
    return [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--basetemp={folder}/tmp",
        *TESTS,
    ]


def run_training(folder: Path) -> list[str]:
    """The command of a run."""
    data, config = folder / "data", folder / "config.yaml"
    prepare = ["prepare", "synthetic", "--out", str(data), "--rows", "2000"]
    subprocess.run([sys.executable, "-m", "raytrec", *prepare], check=True, stdout=subprocess.DEVNULL)
    config.write_text(f"data: {{train: {data}/train, test: {data}/test, global_batch_size: 256}}\n")
    return [sys.executable, "-m", "raytrec", "train", str(config), f"run.dir={folder}/run"]


def end(make: object, folder: Path) -> int:
    """The exit code of one process; what it has said is shown if it is not 0."""
    folder.mkdir()
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    ended = subprocess.run(
        make(folder), cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LONGEST_S
    )
    if ended.returncode:
        print(f"{folder.name}: exit code {ended.returncode}\n{ended.stdout[-2000:]}\n{ended.stderr[-6000:]}")
    return ended.returncode


@contextmanager
def load(processes: int) -> Iterator[None]:
    """A block in which so many processes keep a core busy each."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def main(
    times: Annotated[int, typer.Option(help="Processes of each kind.")] = 50,
    busy: Annotated[int, typer.Option(help="Processes that keep a core busy.")] = 2,
    at_once: Annotated[int, typer.Option(help="Processes at the same time.")] = 2,
    only: Annotated[str | None, typer.Option(help="One kind: tests or train.")] = None,
    seconds: Annotated[float, typer.Option(help="Start none after so long.")] = float("inf"),
) -> None:
    """Prints the exit codes and how often each came."""
    began, kinds = monotonic(), {"tests": run_tests, "train": run_training}
    with (
        tempfile.TemporaryDirectory(prefix="exits-") as name,
        load(busy),
        ThreadPoolExecutor(at_once) as pool,
    ):

        def one(kind: str, number: int) -> int | None:
            if monotonic() - began > seconds:
                return None
            return end(kinds[kind], Path(name) / f"{kind}-{number}")

        codes = {
            kind: Counter(code for code in pool.map(one, [kind] * times, range(times)) if code is not None)
            for kind in kinds
            if only in (None, kind)
        }
    print(json.dumps({"times": times, "busy": busy, "at_once": at_once, "exit_codes": codes}))
    if any(code for of_kind in codes.values() for code in of_kind):
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
