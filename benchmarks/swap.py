"""Latency of a service while it loads another export and switches to it.

    python benchmarks/swap.py [--rounds 3] [--swaps 10] [--against TREE]

`raytrec serve` with one replica serves a DLRM with 26 tables of 100,000 rows and dim 64 (0.7 GB). A client process
sends 50 requests/s of 32 rows, even while others wait for their responses; latency counts from the time at which a
request is due. Each turn begins without swaps (before). Then exports of three steps of one run are promoted one after
another, and the service loads each of them (during: requests that overlap with a promotion). With --against, another
checkout serves the same exports and takes turns with this one. `mixed` counts responses whose scores are not those of
the version that they name. Writes benchmarks/results/swap.json and the table in docs/benchmarks.md.
"""

import asyncio
import json
import os
import pickle
import re
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import aiohttp
import harness
import numpy as np
import pyarrow.parquet as pq
import typer
from harness import REPO, Grid, run_raytrec, take_turns
from serve import QUIET
from serve_http import DENSE, SPARSE, find_free_ports, run_service

import raytrec
from raytrec.serving.command import promote

RATE, ROWS, BODIES, STEPS, PAUSE_S, MAX_GAP = 50, 32, 60, (3, 6, 9), 2, 1e-5
HEADER = ("tree", "p50 before", "p99 before", "p50 during", "p99 during", "p99 ÷ before", "load s", "failed", "mixed")
Scores = dict[str, list[list[float]]]  # by version and body


def export_steps(table_rows: int) -> Scores:
    """Train DLRM, export STEPS, and write request bodies; return the expected scores."""
    run_raytrec("prepare", "synthetic", "--out", "data", "--rows", "20000", "--multi-hot", "0", "--dim", "64")
    schema = Path("data/schema.yaml")
    schema.write_text(re.sub(r"rows: \d+", f"rows: {table_rows}", schema.read_text("utf-8")), "utf-8")
    config = {
        "data": {"train": "data/train", "global_batch_size": 1600},
        "model": {"name": "dlrm", "bottom_mlp": [256], "top_mlp": [256, 128, 64]},
        "checkpoint": {"every_steps": STEPS[0], "keep_last": 10},
    }
    raytrec.train(QUIET | config | {"run": {"name": "dlrm", "dir": "dlrm"}, "train": {"epochs": 1}})
    rows = pq.read_table("data/train").select(DENSE + SPARSE)
    parts, expected = [rows.slice(first, ROWS) for first in range(0, BODIES * ROWS, ROWS)], {}
    for step in STEPS:
        model = raytrec.load(raytrec.export("dlrm", f"exports/{step}", checkpoint=step).path)
        expected[model.version] = [model.predict(part)["score"].to_pylist() for part in parts]
    Path("bodies").write_bytes(pickle.dumps([json.dumps({"columns": part.to_pydict()}).encode() for part in parts]))
    return expected


async def send_requests(port: str) -> list[dict[str, Any]]:
    """Send requests at a fixed rate until standard input ends; return the due time, end and response of each."""
    bodies, tasks = pickle.loads(Path("bodies").read_bytes()), []
    stop, began = asyncio.create_task(asyncio.to_thread(sys.stdin.read)), time.monotonic()
    options = {"connector": aiohttp.TCPConnector(limit=0), "headers": {"Content-Type": "application/json"}}

    async def ask(due: float, body: int) -> dict[str, Any]:
        result = {"due": due, "body": body, "status": 0}
        with suppress(aiohttp.ClientError, TimeoutError):
            async with session.post(f"http://127.0.0.1:{port}/predict", data=bodies[body]) as answer:
                result |= {"answer": await answer.json(), "status": answer.status}
        return result | {"end": time.monotonic()}

    async with aiohttp.ClientSession(**options) as session:
        print("ready", flush=True)
        while not stop.done():
            due = began + len(tasks) / RATE
            await asyncio.sleep(due - time.monotonic())
            tasks.append(asyncio.create_task(ask(due, len(tasks) % len(bodies))))
        return await asyncio.gather(*tasks)


def is_mixed(result: dict[str, Any], expected: Scores) -> bool:
    """Return True if the scores of a response are not those of the version that it names."""
    scores = expected[result["answer"]["version"]][result["body"]]
    return not np.allclose(result["answer"]["predictions"]["score"], scores, rtol=0, atol=MAX_GAP)


def measure(port: int, uris: list[str], expected: Scores) -> dict[str, float]:
    """Send requests without swaps, then with swaps, and return the measurements of this turn."""
    words, times = [sys.executable, __file__, "client", str(port)], []
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as client:
        client.stdout.readline()  # the client has imported its modules
        time.sleep(PAUSE_S * (len(uris) + 2))
        for uri in uris:
            began = time.monotonic()
            promote(uri, service=f"http://127.0.0.1:{port}", name=None)
            times.append((began, time.monotonic()))
            time.sleep(PAUSE_S)
        results = json.loads(client.communicate()[0])[PAUSE_S * RATE :]  # the first ones open connections
    answered = [each for each in results if each["status"] == 200]
    figures = {"load": median(end - start for start, end in times), "failed": len(results) - len(answered)}
    figures["mixed"] = sum(is_mixed(each, expected) for each in answered)
    for name, spans in (("before", [(0, times[0][0])]), ("during", times)):
        ends = [each for each in answered if any(each["due"] < end and each["end"] > start for start, end in spans)]
        for p in (50, 99):
            figures[f"{name} p{p}"] = 1000 * float(np.percentile([each["end"] - each["due"] for each in ends], p))
    return figures


def make_row(name: str, turns: list[dict[str, float]]) -> list[str]:
    """Return the cells of a side: medians of its turns, and sums of failed and mixed responses."""
    times = [f"{median(each[f'{when} p{p}'] for each in turns):.1f}" for when in ("before", "during") for p in (50, 99)]
    ratio = median(each["during p99"] / each["before p99"] for each in turns)
    counts = [f"{sum(each[key] for each in turns)}" for key in ("failed", "mixed")]
    return [name, *times, f"{ratio:.2f}", f"{median(each['load'] for each in turns):.1f}", *counts]


def main(
    rounds: harness.Rounds = 3,
    swaps: Annotated[int, typer.Option(help="Promotions in each turn.")] = 10,
    against: Annotated[Path | None, typer.Option(help="Checkout of raytrec to compare with.")] = None,
    smallest: harness.Smallest = False,
) -> None:
    """Run the services, print the table and write benchmarks/results/swap.json."""
    rounds, swaps = (1, 2) if smallest else (rounds, swaps)
    trees = {"this": REPO} | ({"other": against.resolve()} if against else {})
    with tempfile.TemporaryDirectory(prefix="raytrec-swap-") as scratch, ExitStack() as stack:
        os.chdir(scratch)
        expected, sides = export_steps(50_000 if smallest else 100_000), {}
        side = {"path": "/predict", "headers": {"Content-Type": "application/json"}, "bodies": "bodies"}
        for (name, tree), port in zip(trees.items(), find_free_ports(len(trees)), strict=True):
            words = ["-m", "raytrec", "serve", f"exports/{STEPS[0]}", "--port", str(port), "--no-token"]
            path = os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")])
            stack.enter_context(run_service(words, side | {"port": port}, {"PYTHONPATH": path}))
            uris = cycle(f"exports/{step}" for step in (*STEPS[1:], STEPS[0]))
            sides[name] = lambda port=port, uris=uris: measure(port, list(islice(uris, swaps)), expected)
        turns = take_turns(sides, rounds)
    grid = Grid(HEADER, [make_row(name, values) for name, values in turns.items()], "milliseconds")
    grid.show(140)
    if not smallest:
        harness.publish("swap", turns, grid.markdown())


if __name__ == "__main__":
    if sys.argv[1:2] == ["client"]:
        print(json.dumps(asyncio.run(send_requests(sys.argv[2]))))
    else:
        typer.run(main)
