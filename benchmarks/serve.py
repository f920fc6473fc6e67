"""Speed of raytrec's service, compared with other services of the same DLRM, and of scoring candidates.

    python benchmarks/serve.py [--rounds 3] [--seconds 4]

HTTP. The model is a DLRM with 26 tables of 100,000 rows and dim 64, and MLPs of 256-64 and 256-128-64. Each
request contains 32 rows. Everything runs on this machine over loopback, with the clients in one process that
keeps 1, 10 or 50 connections busy:

ray           the recommender that Ray's makers published for Serve: an ingress and a model, JSON lists,
              `@serve.batch(max_batch_size=100, batch_wait_timeout_s=0.05)`
pydantic, orjson, stacked
              FastAPI, uvicorn and torch, one process; stacked has one table instead of 26 (serve_sides.py)
raytrec       `raytrec serve`, one replica, with each form of request (OIP: Open Inference Protocol)

All services run at the same time with the same weights, and must return the scores of `raytrec.load`. In each
round, they receive requests one after another. The table shows the medians of the ratios within rounds, and the
CPU time of all processes of a service and of the serving process.

In process. `predict(user=…, candidates=…)` is compared with `predict(rows)` on the same 500 rows, with SASRec
on histories of 50 items, dim 64. Also measured are the rows/s of `predict` in batches of 2,048, and of
`raytrec predict` on one worker.

Writes benchmarks/results/serve.json and the tables in docs/benchmarks.md.
"""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import harness
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import serve_http
import torch
import typer
import yaml
from harness import Grid, run_raytrec, seconds_of, take_turns
from serve_http import DENSE, ROWS, SPARSE

import raytrec

CANDIDATES, LENGTH, ITEMS = 500, 50, 20_000
QUIET = {"tracking": {"enabled": False, "report": False}, "scaling": {"num_workers": 1, "device": "cpu"}}
SHOWN_CLIENTS = "10"  # docs/benchmarks.md has latencies and CPU times with this number of clients
INSIDE_HEADER = ("in process", "500 rows, ms", "1 user, 500 candidates, ms", "×", "largest difference")
SPEED_HEADER = ("rows/s in batches of 2,048", "`raytrec.load`, one thread", "`raytrec predict`, one worker")


def make_dlrm(table_rows: int) -> tuple[str, pa.Table]:
    """Train and export DLRM in the working directory; return (export, rows of the test data)."""
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
    """Train and export SASRec on random histories in the working directory; return (export, rows)."""
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


def _inside_rows(figures: dict[str, float]) -> list[list[str]]:
    lines = []
    for form, suffix in (("mappings", ""), ("Arrow", "_arrow")):
        rows, candidates = figures[f"rows{suffix}"], figures[f"candidates{suffix}"]
        times, apart = f"{rows / candidates:.1f}", f"{figures['apart']:.0e}"
        lines.append([f"sasrec, {form}", f"{rows:.1f}", f"{candidates:.1f}", times, apart])
    return lines


def document(content: dict[str, Any]) -> str:
    """Return the text for docs/benchmarks.md: the speed of each variant, and of models in process."""
    cells: dict[str, dict[str, list[str]]] = {}
    for side, clients, *figures in serve_http.make_rows(content["rounds"]):
        cells.setdefault(side, {})[clients] = figures
    rows = []
    for side, by_clients in cells.items():
        _, p50, p99, cpu_us, *_ = by_clients[SHOWN_CLIENTS]
        rows.append([side, *(figures[0] for figures in by_clients.values()), p50, p99, cpu_us])
    header = ("variant", "requests/s, 1 client", "10 clients", "50 clients", "p50 ms", "p99 ms", "CPU-µs/request")
    candidates, speeds = content["inside"]["sasrec"], content["inside"]["rows"]
    inside = (
        f"In process, `sasrec` scores {CANDIDATES} candidates of one user in {candidates['candidates']:.1f} ms, and "
        f"{CANDIDATES} equivalent rows in {candidates['rows']:.0f} ms. In batches of 2,048 rows, DLRM scores "
        f"{speeds['load']:,.0f} rows/s with `raytrec.load` and one thread, and {speeds['predict']:,.0f} rows/s with "
        "`raytrec predict` and one worker."
    )
    return f"{Grid(header, rows).markdown()}\n\n{inside}"


def main(
    rounds: harness.Rounds = 3,
    seconds: Annotated[float, typer.Option(help="Seconds for each side and number of clients.")] = 4,
    smallest: harness.Smallest = False,
) -> None:
    """Run the services and models and print the tables; without --smallest, write benchmarks/results/serve.json."""
    torch.set_num_threads(1)
    rounds, seconds = (1, 0.5) if smallest else (rounds, seconds)
    table_rows = 1000 if smallest else 100_000
    with tempfile.TemporaryDirectory(prefix="raytrec-serve-") as scratch:
        os.chdir(scratch)
        dlrm, data = make_dlrm(table_rows)
        inside = {"sasrec": _candidates(*_sasrec(), ["history"]), "rows": _rows_per_second(dlrm)}
        serve_http.write_weights(dlrm, "weights.pt")
        with serve_http.run_services(dlrm, "weights.pt", data) as sides:
            serve_http.check_scores(sides, raytrec.load(dlrm).predict(data.slice(0, ROWS))["score"].to_numpy())
            results = [serve_http.measure_round(sides, number, seconds) for number in range(rounds)]
    grids = (
        Grid(serve_http.HEADER, serve_http.make_rows(results)),
        Grid(INSIDE_HEADER, _inside_rows(inside["sasrec"])),
        Grid(SPEED_HEADER, [["dlrm", *(f"{inside['rows'][way]:,.0f}" for way in ("load", "predict"))]]),
    )
    for grid in grids:
        grid.show(140)
    if not smallest:
        content = {"rounds": results, "inside": inside}
        harness.publish("serve", content, document(content))


if __name__ == "__main__":
    typer.run(main)
