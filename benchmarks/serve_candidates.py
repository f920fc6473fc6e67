"""Speed of scoring one user's candidates, compared with the same rows in full.

    python benchmarks/serve_candidates.py [--rounds 3] [--seconds 4]

The models are SASRec, whose user is a history of 50 items, and a DLRM with 13 numbers and 26 ids, of which all
numbers and 20 ids are the user's. `predict(user=…, candidates=…)` is compared with `predict(rows)`, in this process
and over HTTP with 10 clients, each request with another user. The sides take turns.
"""

from __future__ import annotations

import json
import os
import pickle
import tempfile
from statistics import median
from typing import Annotated

import harness
import pyarrow as pa
import torch
import typer
from harness import Grid, median_ratio, seconds_of, take_turns
from serve import _sasrec, make_dlrm
from serve_http import DENSE, JSON, SPARSE, find_free_ports, measure, run_service

import raytrec

COUNTS, USERS, CLIENTS = (100, 500, 2000), 20, 10
HEADER = ("model, candidates", "in", "rows, ms", "user and candidates, ms", "×", "largest difference")
Request = dict[str, dict | list]


def _requests(rows: pa.Table, names: list[str], count: int) -> list[tuple[Request, Request]]:
    """Return the same requests with full rows, and with a user and candidates."""
    users, items = rows.select(names).to_pylist(), rows.drop_columns(names).to_pylist()
    items *= 1 + count // len(items)
    pairs = [(users[i], items[i : i + count]) for i in range(USERS)]
    return [({"rows": [user | each for each in few]}, {"user": user, "candidates": few}) for user, few in pairs]


def candidates_in_process(export: str, rows: pa.Table, names: list[str], count: int, rounds: int) -> list[str]:
    """Return the cells of a table for requests as mappings in this process."""
    model, ((whole, parts), *_) = raytrec.load(export), _requests(rows, names, count)
    sides = {"rows": lambda: model.predict(whole["rows"]), "candidates": lambda: model.predict(**parts)}
    one, other = (side()["score"].to_numpy() for side in sides.values())
    times = take_turns(
        {name: lambda side=side: 1000 * seconds_of(side) for name, side in sides.items()}, 10 * rounds, 2
    )
    return ["process", *_cells(times), f"{abs(one - other).max():.0e}"]


def candidates_over_http(
    export: str, rows: pa.Table, names: list[str], counts: tuple[int, ...], rounds: int, seconds: float
) -> list[list[str]]:
    """Return the cells of a table for JSON over HTTP, for each number of candidates."""
    (port,), lines = find_free_ports(1), []
    command = ["-m", "raytrec", "serve", export, "--port", str(port), "--no-token"]
    service = {"port": port, "path": "/predict", "headers": {"Content-Type": JSON}}
    with run_service(command, service | {"bodies": _write(_requests(rows, names, 1)[0])}, {}):
        for count in counts:
            files = dict(
                zip(("rows", "candidates"), map(_write, zip(*_requests(rows, names, count), strict=True)), strict=True)
            )
            sides = {
                name: lambda file=file: 1000 * CLIENTS / measure(service | {"bodies": file}, CLIENTS, seconds)["rate"]
                for name, file in files.items()
            }
            lines.append(["HTTP", *_cells(take_turns(sides, rounds, 1)), ""])
    return lines


def _write(requests: tuple[Request, ...]) -> str:
    """Write bodies to a file for serve_client.py, and return its path."""
    bodies = [json.dumps(request, separators=(",", ":")).encode() for request in requests]
    with tempfile.NamedTemporaryFile(dir=".", delete=False) as file:
        file.write(pickle.dumps(bodies))
    return file.name


def _cells(times: dict[str, list[float]]) -> list[str]:
    ratio = median_ratio(times["rows"], times["candidates"])
    return [*(f"{median(values):.1f}" for values in times.values()), f"{ratio:.1f}"]


def candidates_of_dlrm(rounds: int, seconds: float, table_rows: int, counts: tuple[int, ...] = COUNTS) -> Grid:
    """Train both models in the working directory, and return the table of measurements."""
    dlrm, sasrec, lines = make_dlrm(table_rows), _sasrec(), []
    cases = {"dlrm": (*dlrm, DENSE + SPARSE[:20]), "sasrec": (*sasrec, ["history"])}
    for name, (export, rows, names) in cases.items():
        inside = [candidates_in_process(export, rows, names, count, rounds) for count in counts]
        over_http = candidates_over_http(export, rows, names, counts, rounds, seconds)
        lines += [
            [f"{name}, {count:,}", *cells]
            for part in (inside, over_http)
            for count, cells in zip(counts, part, strict=True)
        ]
    return Grid(HEADER, lines, left=2)


def main(
    rounds: harness.Rounds = 3,
    seconds: Annotated[float, typer.Option(help="Seconds of each turn over HTTP.")] = 4,
    smallest: harness.Smallest = False,
) -> None:
    """Print the table of measurements."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="raytrec-candidates-") as scratch:
        os.chdir(scratch)
        sizes = (1, 0.5, 1000, (20,)) if smallest else (rounds, seconds, 100_000, COUNTS)
        candidates_of_dlrm(*sizes).show(140)


if __name__ == "__main__":
    typer.run(main)
