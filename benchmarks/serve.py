"""How fast raytrec serves, next to two other services of the same DLRM, and one user's candidates.

    python benchmarks/serve.py [--rounds 3] [--seconds 4]

HTTP. DLRM with 26 tables of 100,000 rows and dim 64 and MLPs of 256-64 and 256-128-64; 32 rows a request; all
on this machine over loopback, clients in a process that keeps 1, 10 or 50 connections busy:

ray           the recommender that Ray's makers published for Serve: an ingress and a model, JSON lists,
              `@serve.batch(max_batch_size=100, batch_wait_timeout_s=0.05)`
fastapi       FastAPI, pydantic, uvicorn and torch, one process (serve_sides.py)
raytrec rows, columns, Arrow
              `raytrec serve`, one replica, with each form of request

All run at the same time; each is asked in each round, one after the other. What is compared is the median of
the ratios within rounds.

In process. `predict(user=…, candidates=…)` against `predict(rows)` of the same 500 rows: SASRec with
histories of 50 items, dim 64. And rows/s of `predict` in batches of 2,048, next to those of `raytrec predict`
on one worker.

Prints tables; writes benchmarks/results/serve.json and the tables of docs/benchmarks.md.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import typer
import yaml
from documents import fill, keep
from rich.console import Console
from rich.table import Table

import raytrec
from raytrec.serving.bodies import ARROW, JSON

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "serve.json"
ROWS, BODIES, CANDIDATES, LENGTH, ITEMS = 32, 60, 500, 50, 20_000
CLIENTS = (1, 10, 50)
START_S = 180
DENSE, SPARSE = [f"I{i}" for i in range(1, 14)], [f"C{i}" for i in range(1, 27)]
QUIET = {"tracking": {"enabled": False, "report": False}, "scaling": {"num_workers": 1, "device": "cpu"}}


def main(
    rounds: Annotated[int, typer.Option(help="Of all sides.")] = 3,
    seconds: Annotated[float, typer.Option(help="Of a side with so many clients, in a round.")] = 4,
    smallest: Annotated[bool, typer.Option(help="Whether it runs at all; writes nothing.")] = False,
) -> None:
    """Prints the tables."""
    torch.set_num_threads(1)
    rounds, seconds = (1, 0.5) if smallest else (rounds, seconds)
    table_rows = 1000 if smallest else 100_000
    with tempfile.TemporaryDirectory(prefix="raytrec-serve-") as scratch:
        os.chdir(scratch)
        dlrm, data = _dlrm(table_rows)
        inside = {
            "sasrec": _candidates(*_sasrec(), ["history"]),
            "rows": _rows_per_second(dlrm),
        }
        with ExitStack() as stack:
            sides = _sides(stack, dlrm, data, table_rows)
            found = [_round(sides, seconds) for _ in range(rounds)]
    tables = (_http_lines(found), _inside_lines(inside), _speed_lines(inside["rows"]))
    for lines in tables:
        _print(lines)
    if not smallest:
        keep(RESULTS, {"rounds": found, "inside": inside})
        fill("docs/benchmarks.md", "serve", "\n\n".join(map(_markdown, tables)))


def _dlrm(table_rows: int) -> tuple[str, pa.Table]:
    """(an export, rows)."""
    make = ["prepare", "synthetic", "--out", "data", "--rows", "20000", "--multi-hot", "0", "--dim", "64"]
    subprocess.run([sys.executable, "-m", "raytrec", *make], check=True, capture_output=True, timeout=START_S)
    schema = Path("data/schema.yaml")
    # The ids stay those that were drawn: as many rows as in Ray's benchmark are there, not all are read.
    schema.write_text(
        re.sub(r"rows: \d+", f"rows: {max(table_rows, 50_000)}", schema.read_text(encoding="utf-8")),
        encoding="utf-8",
    )
    config = {
        "data": {"train": "data/train", "test": "data/test", "global_batch_size": 2048},
        "model": {"name": "dlrm", "bottom_mlp": [256], "top_mlp": [256, 128, 64]},
        "train": {"epochs": 1},
    }
    raytrec.train(QUIET | config | {"run": {"name": "dlrm", "dir": "dlrm"}})
    return raytrec.export("dlrm", "dlrm-export").path, pq.read_table("data/test").select(DENSE + SPARSE)


def _sasrec() -> tuple[str, pa.Table]:
    """(an export, rows) of made-up histories."""
    draw = np.random.default_rng(0)
    count = 2 * CANDIDATES
    ids = draw.integers(0, ITEMS, (count, LENGTH + 1))
    table = pa.table(
        {"label": pa.array((ids[:, 0] % 2).astype(np.int8)), "item": ids[:, 0], "history": list(ids[:, 1:])}
    )
    Path("sequences/train").mkdir(parents=True)
    pq.write_table(table, "sequences/train/rows.parquet")
    sparse = {"item": {"table": "item"}, "history": {"table": "item", "pooling": "sequence"}}
    schema = {
        "labels": ["label"],
        "dense": [],
        "sparse": sparse,
        "tables": {"item": {"rows": ITEMS, "dim": 64}},
    }
    Path("sequences/schema.yaml").write_text(yaml.safe_dump(schema), encoding="utf-8")
    config = {
        "data": {"train": "sequences/train", "global_batch_size": 500},
        "model": {"name": "sasrec", "max_length": LENGTH},
        "train": {"epochs": 1},
    }
    raytrec.train(QUIET | config | {"run": {"name": "sasrec", "dir": "sasrec"}})
    return raytrec.export("sasrec", "sasrec-export").path, table.drop_columns(["label"])


def _candidates(export: str, rows: pa.Table, mine: list[str]) -> dict[str, float]:
    """Milliseconds of 500 rows, of the same as one user's candidates, and how far the scores are apart."""
    model, rest = raytrec.load(export), rows.slice(0, CANDIDATES).drop_columns(mine)
    first = rows.slice(0, 1).select(mine)
    user = {name: first[name][0].as_py() for name in mine}
    whole = rest
    for name in mine:
        values = first[name].combine_chunks().take(pa.array(np.zeros(len(rest), np.int64)))
        whole = whole.append_column(name, values)
    as_rows, as_candidates = whole.to_pylist(), rest.to_pylist()
    apart = np.subtract(model.predict(whole)["score"], model.predict(user=user, candidates=rest)["score"])
    ways = {
        "rows": lambda: model.predict(as_rows),
        "candidates": lambda: model.predict(user=user, candidates=as_candidates),
        "rows_arrow": lambda: model.predict(whole),
        "candidates_arrow": lambda: model.predict(user=user, candidates=rest),
    }
    took: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(30):
        for name, way in ways.items():
            took[name].append(_milliseconds(way))
    return {name: statistics.median(each) for name, each in took.items()} | {
        "apart": float(np.abs(apart).max())
    }


def _milliseconds(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return 1000 * (time.perf_counter() - began)


def _rows_per_second(export: str) -> dict[str, float]:
    """Of `predict` in batches, and of `raytrec predict` without its start."""
    model, rows = raytrec.load(export), pq.read_table("data/train").select(DENSE + SPARSE)
    began = time.perf_counter()
    for start in range(0, len(rows), 2048):
        model.predict(rows.slice(start, 2048))
    loaded = len(rows) / (time.perf_counter() - began)
    result = raytrec.predict("dlrm", "data/train", "scores", columns=[], workers=1)
    return {"load": loaded, "predict": result.metrics["predict.rows_per_s"]}


def _sides(stack: ExitStack, export: str, data: pa.Table, table_rows: int) -> dict[str, tuple[int, str, str]]:
    """Side → (port, type, file of bodies); all of them run as long as the stack is open."""
    ports = dict(zip(("ray", "fastapi", "raytrec"), _free_ports(3), strict=True))
    here, bodies = {"PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"}, _bodies(data)
    lists, columns = (_first(bodies[form]) for form in ("lists", "columns"))
    stack.enter_context(
        _running(["benchmarks/serve_sides.py", "ray", str(ports["ray"])], ports["ray"], lists, here)
    )
    fastapi = ["-m", "uvicorn", "serve_sides:app", "--port", str(ports["fastapi"])]
    fastapi += ["--log-level", "warning", "--no-access-log"]
    stack.enter_context(_running(fastapi, ports["fastapi"], lists, here))
    own = ["-m", "raytrec", "serve", export, "--port", str(ports["raytrec"]), "--no-token"]
    stack.enter_context(_running(own, ports["raytrec"], columns, here))
    names = {"ray": "lists", "fastapi": "lists", "raytrec rows": "rows", "raytrec columns": "columns"}
    sides = {side: (ports[side.split()[0]], JSON, bodies[form]) for side, form in names.items()}
    return sides | {"raytrec Arrow": (ports["raytrec"], ARROW, bodies["arrow"])}


@contextmanager
def _running(words: list[str], port: int, body: bytes, environment: dict[str, str]):
    """A service, from when it answers."""
    words = [str(HERE.parent / word) if word.startswith("benchmarks/") else word for word in words]
    with tempfile.TemporaryFile("w+", encoding="utf-8") as log:
        process = subprocess.Popen(
            [sys.executable, *words], env=os.environ | environment, stdout=log, stderr=log
        )
        try:
            until = time.monotonic() + START_S
            while not _answers(port, body):
                if process.poll() is not None or time.monotonic() > until:
                    log.seek(0)
                    raise SystemExit(f"{' '.join(words)} does not answer:\n{log.read()[-4000:]}")
                time.sleep(0.5)
            yield
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)


def _answers(port: int, body: bytes) -> bool:
    """Whether a request is answered with scores."""
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
    """Form → file with the same requests in it."""
    made: dict[str, list[bytes]] = {"lists": [], "rows": [], "columns": [], "arrow": []}
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
            made[form].append(json.dumps(values, separators=(",", ":")).encode())
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, rows.schema) as writer:
            writer.write_table(rows)
        made["arrow"].append(sink.getvalue().to_pybytes())
    for form, bodies in made.items():
        Path(form).write_bytes(json.dumps([len(body) for body in bodies]).encode() + b"\n" + b"".join(bodies))
    return {form: str(Path(form).absolute()) for form in made}


def _first(file: str) -> bytes:
    sizes, _, rest = Path(file).read_bytes().partition(b"\n")
    return rest[: json.loads(sizes)[0]]


def _round(sides: dict[str, tuple[int, str, str]], seconds: float) -> dict[str, dict[str, dict[str, float]]]:
    """Side → clients → figures."""
    found: dict[str, dict[str, dict[str, float]]] = {side: {} for side in sides}
    for clients in CLIENTS:
        for side, (port, kind, bodies) in sides.items():
            words = [str(HERE / "serve_client.py"), str(port), str(clients)]
            for length in (seconds / 4, seconds):  # the first is to warm up
                done = subprocess.run(
                    [sys.executable, *words, str(length), kind, bodies],
                    stdout=subprocess.PIPE,
                    check=True,
                    timeout=START_S,
                )
            found[side][str(clients)] = json.loads(done.stdout)
    return found


def _http_lines(rounds: list[dict]) -> list[list[str]]:
    head = [
        "side",
        "clients",
        "requests/s",
        "p50 ms",
        "p99 ms",
        "requests/s × ray",
        "p99 ÷ ray's",
        "requests/s × fastapi",
    ]
    lines = [head]
    for side in rounds[0]:
        for clients in map(str, CLIENTS):
            middle = {
                k: statistics.median(r[side][clients][k] for r in rounds) for k in ("rate", "p50", "p99")
            }

            def ratio(figure: str, other: str, side: str = side, clients: str = clients) -> str:
                each = [r[side][clients][figure] / r[other][clients][figure] for r in rounds]
                return f"{statistics.median(each):.2f}"

            lines.append(
                [
                    *(
                        side,
                        clients,
                        f"{middle['rate']:,.0f}",
                        f"{middle['p50']:.1f}",
                        f"{middle['p99']:.1f}",
                    ),
                    *(ratio("rate", "ray"), ratio("p99", "ray"), ratio("rate", "fastapi")),
                ]
            )
    return lines


def _inside_lines(inside: dict[str, dict[str, float]]) -> list[list[str]]:
    lines = [["in process", "500 rows, ms", "1 user, 500 candidates, ms", "×", "largest difference"]]
    found = inside["sasrec"]
    for form, suffix in (("mappings", ""), ("Arrow", "_arrow")):
        rows, candidates = found[f"rows{suffix}"], found[f"candidates{suffix}"]
        times, apart = f"{rows / candidates:.1f}", f"{found['apart']:.0e}"
        lines.append([f"sasrec, {form}", f"{rows:.1f}", f"{candidates:.1f}", times, apart])
    return lines


def _speed_lines(rows: dict[str, float]) -> list[list[str]]:
    head = ["rows/s in batches of 2,048", "`raytrec.load`, one thread", "`raytrec predict`, one worker"]
    return [head, ["dlrm", f"{rows['load']:,.0f}", f"{rows['predict']:,.0f}"]]


def _print(lines: list[list[str]]) -> None:
    table = Table(*lines[0])
    for line in lines[1:]:
        table.add_row(*line)
    Console(width=140).print(table)


def _markdown(lines: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in [lines[0], ["---"] * len(lines[0]), *lines[1:]])


if __name__ == "__main__":
    typer.run(main)
