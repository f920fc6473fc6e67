"""Speed of raytrec's service, compared with two other services of one DLRM, and of scoring candidates.

    python benchmarks/serve.py [--rounds 3] [--seconds 4]

HTTP. The model is a DLRM with 26 tables of 100,000 rows and dim 64, and MLPs of 256-64 and 256-128-64. Each
request contains 32 rows. Everything runs on this machine over loopback, with the clients in one process that
keeps 1, 10 or 50 connections busy:

ray           the recommender that Ray's makers published for Serve: an ingress and a model, JSON lists,
              `@serve.batch(max_batch_size=100, batch_wait_timeout_s=0.05)`
fastapi       FastAPI, pydantic, uvicorn and torch, one process (serve_sides.py)
raytrec rows, columns, Arrow
              `raytrec serve`, one replica, with each form of request

All services run at the same time; in each round, they receive requests one after another. The table shows the
medians of the ratios within rounds.

In process. `predict(user=…, candidates=…)` is compared with `predict(rows)` on the same 500 rows, with SASRec
on histories of 50 items, dim 64. Also measured are the rows/s of `predict` in batches of 2,048, and of
`raytrec predict` on one worker.

Writes benchmarks/results/serve.json and the tables in docs/benchmarks.md.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Annotated

import harness
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import typer
import yaml
from harness import HERE, Grid, median_ratio, run_raytrec, seconds_of, take_turns

import raytrec
from raytrec.serving.bodies import ARROW, JSON

ROWS, BODIES, CANDIDATES, LENGTH, ITEMS = 32, 60, 500, 50, 20_000
CLIENTS = (1, 10, 50)
START_S = 180
DENSE, SPARSE = [f"I{i}" for i in range(1, 14)], [f"C{i}" for i in range(1, 27)]
QUIET = {"tracking": {"enabled": False, "report": False}, "scaling": {"num_workers": 1, "device": "cpu"}}
HTTP_HEADER = (
    *("variant", "clients", "requests/s", "p50 ms", "p99 ms"),
    *("requests/s × ray", "p99 ÷ ray's", "requests/s × fastapi"),
)
INSIDE_HEADER = ("in process", "500 rows, ms", "1 user, 500 candidates, ms", "×", "largest difference")
SPEED_HEADER = ("rows/s in batches of 2,048", "`raytrec.load`, one thread", "`raytrec predict`, one worker")


def _dlrm(table_rows: int) -> tuple[str, pa.Table]:
    """Train and export DLRM; return (export, rows)."""
    sizes = ["--rows", "20000", "--multi-hot", "0", "--dim", "64"]
    run_raytrec("prepare", "synthetic", "--out", "data", *sizes)
    schema = Path("data/schema.yaml")
    # The drawn ids are unchanged, so not all rows are read; the tables are as large as in Ray's benchmark.
    text = schema.read_text(encoding="utf-8")
    schema.write_text(re.sub(r"rows: \d+", f"rows: {max(table_rows, 50_000)}", text), encoding="utf-8")
    config = {
        "data": {"train": "data/train", "test": "data/test", "global_batch_size": 2048},
        "model": {"name": "dlrm", "bottom_mlp": [256], "top_mlp": [256, 128, 64]},
        "train": {"epochs": 1},
    }
    raytrec.train(QUIET | config | {"run": {"name": "dlrm", "dir": "dlrm"}})
    return raytrec.export("dlrm", "dlrm-export").path, pq.read_table("data/test").select(DENSE + SPARSE)


def _sasrec() -> tuple[str, pa.Table]:
    """Train and export SASRec on random histories; return (export, rows)."""
    draw = np.random.default_rng(0)
    count = 2 * CANDIDATES
    ids = draw.integers(0, ITEMS, (count, LENGTH + 1))
    table = pa.table(
        {"label": pa.array((ids[:, 0] % 2).astype(np.int8)), "item": ids[:, 0], "history": list(ids[:, 1:])}
    )
    Path("sequences/train").mkdir(parents=True)
    pq.write_table(table, "sequences/train/rows.parquet")
    sparse = {"item": {"table": "item"}, "history": {"table": "item", "pooling": "sequence"}}
    schema = {"labels": ["label"], "dense": [], "sparse": sparse, "tables": {"item": {"rows": ITEMS, "dim": 64}}}
    Path("sequences/schema.yaml").write_text(yaml.safe_dump(schema), encoding="utf-8")
    config = {
        "data": {"train": "sequences/train", "global_batch_size": 500},
        "model": {"name": "sasrec", "max_length": LENGTH},
        "train": {"epochs": 1},
    }
    raytrec.train(QUIET | config | {"run": {"name": "sasrec", "dir": "sasrec"}})
    return raytrec.export("sasrec", "sasrec-export").path, table.drop_columns(["label"])


def _candidates(export: str, rows: pa.Table, user_columns: list[str]) -> dict[str, float]:
    """Return the milliseconds for 500 rows and for a user with the same candidates, and the score gap."""
    model, items = raytrec.load(export), rows.slice(0, CANDIDATES).drop_columns(user_columns)
    first = rows.slice(0, 1).select(user_columns)
    user = {name: first[name][0].as_py() for name in user_columns}
    whole = items
    for name in user_columns:
        values = first[name].combine_chunks().take(pa.array(np.zeros(len(items), np.int64)))
        whole = whole.append_column(name, values)
    as_rows, as_candidates = whole.to_pylist(), items.to_pylist()
    gaps = np.subtract(model.predict(whole)["score"], model.predict(user=user, candidates=items)["score"])
    ways = {
        "rows": lambda: model.predict(as_rows),
        "candidates": lambda: model.predict(user=user, candidates=as_candidates),
        "rows_arrow": lambda: model.predict(whole),
        "candidates_arrow": lambda: model.predict(user=user, candidates=items),
    }
    times = take_turns({name: lambda way=way: 1000 * seconds_of(way) for name, way in ways.items()}, 30)
    return {name: median(each) for name, each in times.items()} | {"apart": float(np.abs(gaps).max())}


def _rows_per_second(export: str) -> dict[str, float]:
    """Return the rows/s of `predict` in batches, and of `raytrec predict` without its startup."""
    model, rows = raytrec.load(export), pq.read_table("data/train").select(DENSE + SPARSE)
    batches = [rows.slice(start, 2048) for start in range(0, len(rows), 2048)]
    seconds = seconds_of(lambda: [model.predict(batch) for batch in batches])
    result = raytrec.predict("dlrm", "data/train", "scores", columns=[], workers=1)
    return {"load": len(rows) / seconds, "predict": result.metrics["predict.rows_per_s"]}


def _sides(stack: ExitStack, export: str, data: pa.Table, table_rows: int) -> dict[str, tuple[int, str, str]]:
    """Run the services until the stack is closed; return side → (port, content type, file of bodies)."""
    ports = dict(zip(("ray", "fastapi", "raytrec"), _free_ports(3), strict=True))
    environment, bodies = {"PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"}, _bodies(data)
    lists, columns = (_first(bodies[form]) for form in ("lists", "columns"))
    stack.enter_context(
        _running(["benchmarks/serve_sides.py", "ray", str(ports["ray"])], ports["ray"], lists, environment)
    )
    fastapi = ["-m", "uvicorn", "serve_sides:app", "--port", str(ports["fastapi"])]
    fastapi += ["--log-level", "warning", "--no-access-log"]
    stack.enter_context(_running(fastapi, ports["fastapi"], lists, environment))
    own = ["-m", "raytrec", "serve", export, "--port", str(ports["raytrec"]), "--no-token"]
    stack.enter_context(_running(own, ports["raytrec"], columns, environment))
    names = {"ray": "lists", "fastapi": "lists", "raytrec rows": "rows", "raytrec columns": "columns"}
    sides = {side: (ports[side.split()[0]], JSON, bodies[form]) for side, form in names.items()}
    return sides | {"raytrec Arrow": (ports["raytrec"], ARROW, bodies["arrow"])}


@contextmanager
def _running(words: list[str], port: int, body: bytes, environment: dict[str, str]):
    """Run a service during the block, which begins when the service answers."""
    words = [str(HERE.parent / word) if word.startswith("benchmarks/") else word for word in words]
    with tempfile.TemporaryFile("w+", encoding="utf-8") as log:
        process = subprocess.Popen([sys.executable, *words], env=os.environ | environment, stdout=log, stderr=log)
        try:
            until = time.monotonic() + START_S
            while not _answers(port, body):
                if process.poll() is not None or time.monotonic() > until:
                    log.seek(0)
                    raise SystemExit(f"{' '.join(words)} does not respond:\n{log.read()[-4000:]}")
                time.sleep(0.5)
            yield
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)


def _answers(port: int, body: bytes) -> bool:
    """Return True if a request succeeds."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}/predict", body, {"Content-Type": JSON})
    try:
        with urllib.request.urlopen(request, timeout=START_S) as answer:
            return answer.status == 200
    except OSError:
        return False


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _bodies(data: pa.Table) -> dict[str, str]:
    """Write the same requests in each form, and return form → file."""
    by_form: dict[str, list[bytes]] = {"lists": [], "rows": [], "columns": [], "arrow": []}
    for place in range(BODIES):
        rows = data.slice(place * ROWS, ROWS).combine_chunks()
        lists = {
            name: np.stack([column.to_numpy() for column in rows.select(names).columns], 1).tolist()
            for name, names in (("dense", DENSE), ("sparse", SPARSE))
        }
        for form, values in (
            ("lists", lists),
            ("rows", {"rows": rows.to_pylist()}),
            ("columns", {"columns": rows.to_pydict()}),
        ):
            by_form[form].append(json.dumps(values, separators=(",", ":")).encode())
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, rows.schema) as writer:
            writer.write_table(rows)
        by_form["arrow"].append(sink.getvalue().to_pybytes())
    for form, bodies in by_form.items():
        Path(form).write_bytes(json.dumps([len(body) for body in bodies]).encode() + b"\n" + b"".join(bodies))
    return {form: str(Path(form).absolute()) for form in by_form}


def _first(file: str) -> bytes:
    sizes, _, rest = Path(file).read_bytes().partition(b"\n")
    return rest[: json.loads(sizes)[0]]


def _round(sides: dict[str, tuple[int, str, str]], seconds: float) -> dict[str, dict[str, dict[str, float]]]:
    """Send requests to each side in turn, and return side → number of clients → figures."""
    figures: dict[str, dict[str, dict[str, float]]] = {side: {} for side in sides}
    for clients in CLIENTS:
        for side, (port, kind, bodies) in sides.items():
            words = [str(HERE / "serve_client.py"), str(port), str(clients)]
            for length in (seconds / 4, seconds):  # the first turn warms up
                done = subprocess.run(
                    [sys.executable, *words, str(length), kind, bodies],
                    stdout=subprocess.PIPE,
                    check=True,
                    timeout=START_S,
                )
            figures[side][str(clients)] = json.loads(done.stdout)
    return figures


def _http_rows(rounds: list[dict]) -> list[list[str]]:
    rows = []
    for side in rounds[0]:
        for clients in map(str, CLIENTS):

            def values(figure: str, of: str, clients: str = clients) -> list[float]:
                return [each[of][clients][figure] for each in rounds]

            rate, p50, p99 = (values(figure, side) for figure in ("rate", "p50", "p99"))
            compared = ((rate, values("rate", "ray")), (p99, values("p99", "ray")), (rate, values("rate", "fastapi")))
            cells = [side, clients, f"{median(rate):,.0f}", f"{median(p50):.1f}", f"{median(p99):.1f}"]
            rows.append([*cells, *(f"{median_ratio(*pair):.2f}" for pair in compared)])
    return rows


def _inside_rows(figures: dict[str, float]) -> list[list[str]]:
    lines = []
    for form, suffix in (("mappings", ""), ("Arrow", "_arrow")):
        rows, candidates = figures[f"rows{suffix}"], figures[f"candidates{suffix}"]
        times, apart = f"{rows / candidates:.1f}", f"{figures['apart']:.0e}"
        lines.append([f"sasrec, {form}", f"{rows:.1f}", f"{candidates:.1f}", times, apart])
    return lines


def main(
    rounds: harness.Rounds = 3,
    seconds: Annotated[float, typer.Option(help="Seconds for each side and number of clients.")] = 4,
    smallest: harness.Smallest = False,
) -> None:
    """Run the services and models, print the tables and write benchmarks/results/serve.json."""
    torch.set_num_threads(1)
    rounds, seconds = (1, 0.5) if smallest else (rounds, seconds)
    table_rows = 1000 if smallest else 100_000
    with tempfile.TemporaryDirectory(prefix="raytrec-serve-") as scratch:
        os.chdir(scratch)
        dlrm, data = _dlrm(table_rows)
        inside = {"sasrec": _candidates(*_sasrec(), ["history"]), "rows": _rows_per_second(dlrm)}
        with ExitStack() as stack:
            sides = _sides(stack, dlrm, data, table_rows)
            results = [_round(sides, seconds) for _ in range(rounds)]
    grids = (
        Grid(HTTP_HEADER, _http_rows(results)),
        Grid(INSIDE_HEADER, _inside_rows(inside["sasrec"])),
        Grid(SPEED_HEADER, [["dlrm", *(f"{inside['rows'][way]:,.0f}" for way in ("load", "predict"))]]),
    )
    for grid in grids:
        grid.show(140)
    if not smallest:
        content = {"rounds": results, "inside": inside}
        harness.publish("serve", content, "\n\n".join(grid.markdown() for grid in grids))


if __name__ == "__main__":
    typer.run(main)
