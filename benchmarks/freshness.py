"""Time from a training step until a service serves the rows of this step or a later one.

    python benchmarks/freshness.py [--seconds 60] [--workers 1] [--shards 0]

`raytrec train` trains on Criteo-shaped data and writes a delta every second; `raytrec serve --follow` with one replica
follows. Both run on this machine, as does a client, which asks GET /ready 50 times per second. Steps between two
deltas are assumed to be evenly spaced in time. The percentiles are over all steps that were trained in `seconds`, after
the first delta was served.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from time import sleep, time
from typing import Annotated

import harness
import numpy as np
import typer
from harness import QUIET, REPO, Grid, run_raytrec
from serve_http import find_free_ports

INTERVAL_S, START_TIMEOUT_S, END_TIMEOUT_S = 0.02, 240, 120
Served = list[tuple[float, int]]  # Unix time and step of each response


@contextmanager
def run_process(log: Path, *words: str) -> Iterator[subprocess.Popen]:
    """Run a command of raytrec until the block ends."""
    with log.open("w", encoding="utf-8") as output:
        command, environment = [sys.executable, "-m", "raytrec", *words], os.environ | {"PYTHONPATH": str(REPO)}
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(END_TIMEOUT_S)


def ask(port: int) -> int | None:
    """Return the step that a service serves, or None if it does not respond."""
    connection = HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", "/ready")
        return json.loads(connection.getresponse().read())["freshness"]["step"]
    except (OSError, HTTPException, ValueError):
        return None
    finally:
        connection.close()


def watch(port: int, seconds: float, training: subprocess.Popen, logs: list[Path]) -> Served:
    """Return (time, served step) for each response of a service, from the first response on.

    Raises:
        RuntimeError: The training process ended, or the service responded less than twice before START_TIMEOUT_S or the
            end of `seconds`.
    """
    served, deadline = Served(), time() + START_TIMEOUT_S
    while time() < (served[0][0] + seconds if served else deadline):
        if training.poll() is not None:
            break
        if (step := ask(port)) is not None:
            served.append((time(), step))
        sleep(INTERVAL_S if served else 0.5)
    if len(served) < 2 or training.poll() is not None:
        tails = "\n".join(log.read_text()[-3000:] for log in logs)
        raise RuntimeError(f"training ended, or the service did not respond within {START_TIMEOUT_S} s\n{tails}")
    return served


def compute_delays(folder: Path, served: Served) -> np.ndarray:
    """Return the seconds from each step until it was served, float64 [steps].

    Args:
        folder: Folder of deltas.
        served: Times and served steps, as returned by `watch`.
    """
    manifests = [json.loads(file.read_text()) for file in sorted(folder.glob("deltas/*.json"))]
    cut_s, cut_steps = (np.array([each[key] for each in manifests]) for key in ("cut_unix_s", "step"))
    answer_s, answer_steps = (np.array(each) for each in zip(*served, strict=True))
    steps = np.arange(answer_steps[0] + 1, answer_steps[-1] + 1)
    first = np.searchsorted(answer_steps, steps)  # the first response with this step or a later one
    return answer_s[first] - np.interp(steps, cut_steps, cut_s)


def main(
    seconds: float = 60.0,
    workers: harness.Workers = "1",
    shards: Annotated[int, typer.Option(help="Number of table shards; 0: the replica maps the tables.")] = 0,
    smallest: harness.Smallest = False,
) -> None:
    """Print the table."""
    make_table(measure(seconds, harness.integers(workers), shards, smallest)).show()


def make_table(figures: Sequence[Sequence[float]]) -> Grid:
    """Return the table of the measurements of `measure`."""
    rows = [[str(w), f"{p50:.2f}", f"{p99:.2f}", f"{n:,}", f"{rate:.1f}"] for w, p50, p99, n, rate in figures]
    title = f"Seconds from a step until it is served, deltas every 1 s, {os.cpu_count()} cores"
    return Grid(("workers", "p50 s", "p99 s", "steps", "steps/s"), rows, title, left=0)


def measure(seconds: float, workers: Sequence[int], shards: int, smallest: bool) -> list[list[float]]:
    """Return workers, p50 and p99 in seconds, number of steps, and steps/s for each number of workers."""
    seconds, rows = 3.0 if smallest else seconds, []
    for world in workers:
        with tempfile.TemporaryDirectory(prefix="freshness-") as name:
            folder, (port,) = Path(name), find_free_ports(1)
            run_raytrec("prepare", "synthetic", "--out", f"{name}/data", "--rows", "200000")
            live, logs = folder / "live", [folder / "train.log", folder / "serve.log"]
            words = [f"data.train={name}/data/train", f"run.dir={name}/run", "train.epochs=1000", *QUIET]
            words += [f"scaling.num_workers={world}", f"export.deltas={{to: {live}, every_s: 1, full_every: 1000}}"]
            words += ["checkpoint.every_steps=100", "data.global_batch_size=2048"]
            options = ["--follow", "--no-token", "--port", str(port), "--table-shards", str(shards)]
            with (
                run_process(
                    logs[0], "train", str(REPO / "jobs/synthetic.yaml"), "data.valid=null", "data.test=null", *words
                ) as run,
                run_process(logs[1], "serve", str(live), *options),
            ):
                served = watch(port, seconds, run, logs)
            delays = compute_delays(live, served)
        p50, p99 = np.percentile(delays, (50, 99))
        rate = (served[-1][1] - served[0][1]) / (served[-1][0] - served[0][0])
        rows.append([world, float(p50), float(p99), len(delays), rate])
    return rows


if __name__ == "__main__":
    typer.run(main)
