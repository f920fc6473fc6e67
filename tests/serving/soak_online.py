"""`make soak-online`: continuous requests to a service that follows a run, while ranks, replicas and shards are killed.

    python tests/serving/soak_online.py [--requests 100000] [--clients 8] [--smallest]

`raytrec train` writes a delta every second. `raytrec serve --follow --table-shards 2 --replicas 2` follows the run, and
clients in a separate process send requests, with the retries of docs/serving.md. Meanwhile a table shard, a replica and
a rank are killed in turn. At the end, every answer is compared with the scores of the state that it names, which are
computed by applying the deltas one after another in this process, and `raytrec verify` compares each replica with the
run's last checkpoint. The exit status is 1 after a wrong answer, an answer of an unknown state, a request that fails
despite its retries, or a difference from the checkpoint.
"""

from __future__ import annotations

import json
import multiprocessing
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from pathlib import Path
from typing import Annotated

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "helpers"), str(TESTS / "parity")]

import numpy as np  # noqa: E402
import psutil  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402
import typer  # noqa: E402
from deltas import iterate_states  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from services import TOKEN, command_line, run_service  # noqa: E402
from soak_clients import SoakState, make_retry  # noqa: E402
from urllib3 import PoolManager  # noqa: E402
from urllib3.exceptions import HTTPError  # noqa: E402
from waiting import wait_for  # noqa: E402

from raytrec.verification.verify import verify  # noqa: E402

REPO, REPLICAS, BODIES, ROWS, KILLS, TOLERANCE = TESTS.parent, 2, 16, 4, 9, 1e-6
RETRIES = 20  # a shard that restarts loads an export and deltas meanwhile
SERVICE_OPTIONS = ["--follow", "--table-shards", "2", "--table-timeout-ms", "1000"]


def run_raytrec(log, *words):
    """Start a command of raytrec."""
    output = log.open("w")
    return subprocess.Popen([sys.executable, "-m", "raytrec", *words], stdout=output, stderr=output, cwd=REPO)


def send_requests(url, bodies, state, clients, outcome):
    """Send requests in threads, and put (counts, distinct answers) into a queue.

    An answer is (number of the body, version, scores).
    """
    counts, answers = Counter(), Counter()

    def run(seed):
        http, number = PoolManager(), seed
        while state.take():
            number = (number + 1) % len(bodies)
            try:
                answer = http.request(
                    "POST",
                    f"{url}/predict",
                    body=bodies[number],
                    headers={"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"},
                    retries=make_retry(RETRIES),
                    timeout=60,
                )
            except HTTPError as error:
                counts[f"failed: {error!r}"] += 1
                continue
            counts["retried"] += len(answer.retries.history) > 0
            if answer.status != 200:
                counts[f"failed: {answer.data[:200]!r}"] += 1
                continue
            content = answer.json()
            answers[number, content["version"], tuple(content["predictions"]["score"])] += 1

    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(run, range(clients)))
    outcome.put((counts, answers))


def kill_in_turn(service, training, state, requests, kills):
    """Kill a shard, a replica and a rank in turn, spread over the requests; return their command lines."""
    killed, kinds = [], cycle(["ray::TableShard", "ServeReplica", "ray::"])
    for number in range(1, kills + 1):
        until = number * requests // (kills + 1)
        wait_for(lambda until=until: state.asked.value >= until, f"{until:,} requests", 3600)
        kind = next(kinds)
        parent = psutil.Process(training.pid if kind == "ray::" else service.process.pid)
        found = [each for each in parent.children(recursive=True) if kind in command_line(each)]
        found = [each for each in found if kind != "ray::" or "RayTrainWorker" in command_line(each)]
        if found:
            killed.append(command_line(found[0])[:40])
            found[0].send_signal(signal.SIGKILL)
            print(f"{state.asked.value:,} requests: killed {killed[-1]}", flush=True)
    return killed


def compute_states(folder, tables):
    """Return version → scores of each table, for the oldest full export and every delta after it."""
    states = {}
    for position, scorer in iterate_states(folder):
        scores = [scorer.predict(table)["score"].to_pylist() for table in tables]
        states |= {scorer.version: scores, position.version: scores}
    return states


def count_wrong(answers, states):
    """Return (answers with other scores, answers of unknown states, largest difference)."""
    wrong = unknown = largest = 0
    for (number, version, scores), times in answers.items():
        if (expected := states.get(version)) is None:
            unknown += times
            continue
        difference = float(np.abs(np.array(scores) - np.array(expected[number])).max())
        largest, wrong = max(largest, difference), wrong + times * (difference > TOLERANCE)
    return wrong, unknown, largest


def soak(root, requests, clients, kills):
    """Run the processes, and return the figures."""
    run_raytrec(root / "prepare.log", "prepare", "synthetic", "--out", f"{root}/data", "--rows", "1000000").wait(600)
    live, run = root / "live", root / "run"
    words = [f"data.train={root}/data/train", f"run.dir={run}", "train.epochs=10000", "scaling.num_workers=1"]
    words += [f"export.deltas={{to: {live}, every_s: 1, full_every: 30, keep: 1000}}", "checkpoint.every_steps=60"]
    words += ["data.valid=null", "data.test=null", "tracking.enabled=false", "tracking.report=false"]
    training = run_raytrec(root / "train.log", "train", str(REPO / "jobs/synthetic.yaml"), *words)
    rows = pq.read_table(root / "data/train")
    tables = [rows.slice(first, ROWS) for first in range(0, BODIES * ROWS, ROWS)]
    try:
        with run_service(str(live), REPLICAS, root, promote_from=None, options=SERVICE_OPTIONS) as service:
            state, outcome = SoakState(requests), multiprocessing.Queue()
            columns = list(service.ask("/example")["rows"][0])
            tables = [table.select(columns) for table in tables]
            bodies = [json.dumps({"rows": table.to_pylist()}) for table in tables]
            arguments = service.url, bodies, state, clients, outcome
            sending = multiprocessing.Process(target=send_requests, args=arguments)
            sending.start()
            killed = kill_in_turn(service, training, state, requests, kills)
            state.end()
            counts, answers = outcome.get(timeout=3600)
            training.send_signal(signal.SIGTERM)
            training.wait(300)
            newest = max(live.glob("deltas/*.json"))
            number = json.loads(newest.read_text())["number"]
            wait_until_followed(service, number)
            verified = verify(service.url, str(run)).metrics
    finally:
        if training.poll() is None:
            training.terminate()
            training.wait(300)
    wrong, unknown, largest = count_wrong(answers, compute_states(live, tables))
    failed = {name: count for name, count in counts.items() if name.startswith("failed")}
    return {
        "answers": sum(answers.values()),
        "states": len({version for _, version, _ in answers}),
        "killed": killed,
        "wrong": wrong,
        "of unknown states": unknown,
        "largest difference": largest,
        "failed": failed,
        "retried": counts["retried"],
        "verify": f"{verified['result']}, {len(verified['replicas'])} replicas, {verified['rows']:,} rows",
    }


def wait_until_followed(service, number, timeout_s=120):
    """Wait until all replicas, which answer in turn, have applied a delta."""
    deadline = time.monotonic() + timeout_s
    found = [{}]
    while {each.get("delta") for each in found} != {number}:
        found = [service.ask("/ready")["freshness"] for _ in range(8)]
        assert time.monotonic() < deadline, f"delta {number}: not within {timeout_s} s; {found}"
        time.sleep(0.2)


def main(
    requests: Annotated[int, typer.Option(help="Number of requests.")] = 100_000,
    clients: int = 8,
    smallest: Annotated[bool, typer.Option("--smallest", help="3,000 requests and 3 kills.")] = False,
) -> None:
    """Print the figures; the exit status is 1 after a wrong answer."""
    requests, kills = (3000, 3) if smallest else (requests, KILLS)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="soak-online-") as folder:
        figures = soak(Path(folder), requests, clients, kills)
    figures["seconds"] = round(time.monotonic() - began)
    table = Table("figure", "value", title=f"{requests:,} requests to a service that follows a run")
    for name, value in figures.items():
        table.add_row(name, str(value))
    Console(width=140).print(table)
    is_wrong = figures["wrong"] or figures["of unknown states"] or figures["failed"]
    raise SystemExit(1 if is_wrong or not figures["verify"].startswith("equal") else 0)


if __name__ == "__main__":
    typer.run(main)
