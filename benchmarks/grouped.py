"""Training on rows that are requests with candidates, compared with one row per candidate.

    python benchmarks/grouped.py [--cases two_tower,din] [--workers 1,2]

Both sides train the same examples on a CPU, with batches in memory: 256 requests per rank and step. Like
impressions in MovieLens-1M, a request has a history of 50 to 200 films and 5 candidates; a wide request has 100
columns, and 10 candidates with 2 columns each. Collating is included, reading is not. The sides take turns, and
the best turn of each is reported.

Writes benchmarks/results/grouped.json and the table in docs/benchmarks.md.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Annotated, Any

import harness
import numpy as np
import pyarrow as pa
import typer
from harness import Grid
from rank_group import Ranks, compare, rig, run_script, trainer

SIDES = {"repeated": False, "grouped": True}
HEADER = ("model", "repeated, examples/s", "grouped, examples/s", "grouped ÷ repeated")
DIM, REQUESTS, PIECES, COLUMNS = 16, 256, 4, 100
ITEMS, SHOWN = {"item": {"rows": 3706, "dim": DIM}, "user": {"rows": 6040, "dim": DIM}}, 5
HISTORY = {"item": {"table": "item"}, "history": {"table": "item", "pooling": "sequence"}}
IMPRESSIONS = {"dense": [], "sparse": {"user": {"table": "user"}, **HISTORY}, "tables": ITEMS}
WIDE = {
    "dense": ["price"],
    "sparse": {f"c{i}": {"table": f"c{i}"} for i in range(COLUMNS + 1)},
    "tables": {f"c{i}": {"rows": 1000, "dim": DIM} for i in range(COLUMNS + 1)},
}
TOP, TOWERS = [128, 64], {"query": ["user", "history"], "item": ["item"]}
OF_ITEM = ["price", f"c{COLUMNS}"]  # columns of candidates; the query tower reads the others
WIDE_TOWERS = {"query": [f"c{i}" for i in range(COLUMNS)], "item": OF_ITEM}
# Name → (schema, model, columns of candidates, number of candidates per request).
CASES: dict[str, tuple[dict, dict, list[str], int]] = {
    "two_tower": (IMPRESSIONS, {"name": "two_tower", "towers": TOWERS, "tower_mlp": TOP}, ["item"], SHOWN),
    "sasrec": (
        IMPRESSIONS | {"sparse": HISTORY, "tables": {"item": ITEMS["item"]}},
        {"name": "sasrec", "history": "history", "item": "item", "max_length": 200},
        ["item"],
        SHOWN,
    ),
    "din": (IMPRESSIONS, {"name": "din", "target": "item", "max_length": 200, "top_mlp": TOP}, ["item"], SHOWN),
    "wide two_tower": (WIDE, {"name": "two_tower", "towers": WIDE_TOWERS, "tower_mlp": TOP}, OF_ITEM, 10),
    "wide dcn": (WIDE, {"name": "dcn", "top_mlp": TOP, "cross_rank": 32}, OF_ITEM, 10),
}


def requests_of(case: str, seed: int) -> pa.Table:
    """Return random requests for a case; histories have 50 to 200 ids."""
    schema, _, candidates, count = CASES[case]
    rng = np.random.default_rng(seed)
    columns: dict[str, Any] = {}
    for name in ("label", *schema["dense"], *schema["sparse"]):
        several = name in ("label", *candidates)
        lengths = np.full(REQUESTS, count if several else 1)
        lengths = rng.integers(50, 201, REQUESTS) if name == "history" else lengths
        rows = schema["tables"][schema["sparse"][name]["table"]]["rows"] if name in schema["sparse"] else 2
        columns[name] = rng.integers(0, rows, lengths.sum())
        if several or name == "history":
            offsets = np.cumsum([0, *lengths]).astype(np.int32)
            columns[name] = pa.ListArray.from_arrays(offsets, columns[name])
    return pa.table(columns)


def repeat_rows(requests: pa.Table, candidates: list[str], count: int) -> pa.Table:
    """Return the requests as a table with one row per candidate."""
    rows, of_one = pa.array(np.repeat(np.arange(requests.num_rows), count)), ("label", *candidates)
    columns = {
        name: column.combine_chunks().flatten() if name in of_one else column.take(rows)
        for name, column in zip(requests.column_names, requests.columns, strict=True)
    }
    return pa.table(columns)


def build(rank: int, world: int, case: str, grouped: bool) -> tuple[Any, Iterator[Any]]:
    """Return the step and the batches of a case.

    Args:
        rank: Rank of this process.
        world: Number of ranks.
        case: Key of CASES.
        grouped: True if a row is a request; False if a row is one candidate of a request.
    """
    from raytrec.common.memory import retain_freed_memory
    from raytrec.data.canonical import canonical
    from raytrec.data.column_conversion import Place

    retain_freed_memory()  # as runs do
    parts, model, candidates, count = CASES[case]
    schema = {"labels": ["label"], **parts} | ({"candidates": ["label", *candidates]} if grouped else {})
    rows = REQUESTS if grouped else REQUESTS * count
    rank_rig = rig(schema, model, world, rows * world, ["history"])
    tables = [requests_of(case, PIECES * rank + i) for i in range(PIECES)]
    tables = tables if grouped else [repeat_rows(table, candidates, count) for table in tables]
    pieces = [rank_rig.pieces(canonical(table, rank_rig.form, Place(case, 0, 0))) for table in tables]
    return rank_rig.step, rank_rig.repeat(pieces)


def document(results: dict[str, Any]) -> str:
    """Return the table for docs/benchmarks.md, with a row for each case with the largest number of workers."""
    rows, most = [], max(point["workers"] for point in results["points"])
    for point in (point for point in results["points"] if point["workers"] == most):
        speeds = [1e3 * point["examples"] / point[side]["step_ms"] for side in SIDES]
        cells = [point["case"], *(f"{speed:,.0f}" for speed in speeds)]
        rows.append([*cells, f"{speeds[1] / speeds[0]:.2f} ×"])
    return Grid(HEADER, rows).markdown()


def main(
    cases: Annotated[str, typer.Option(help="Models, separated by commas.")] = ",".join(CASES),
    workers: harness.Workers = "1,2",
    rounds: harness.Rounds = 5,
    smallest: harness.Smallest = False,
) -> None:
    """Print the table; with all cases and 1,2 workers, write benchmarks/results/grouped.json."""
    cases, workers, rounds = ("two_tower", "1", 1) if smallest else (cases, workers, rounds)
    points = []
    for world in harness.integers(workers):
        with ExitStack() as stack:
            sides = {side: Ranks("grouped.py", world, stack) for side in SIDES}
            for case in harness.split(cases):
                examples = REQUESTS * CASES[case][3] * world
                requests = {side: {"case": case, "grouped": grouped} for side, grouped in SIDES.items()}
                figures = compare(sides, requests, rounds, examples, turn_s=0.8)
                points.append({"case": case, "workers": world, "examples": examples, **figures})
                print(json.dumps(points[-1]), flush=True)
    points.sort(key=lambda point: (list(CASES).index(point["case"]), point["workers"]))
    results = {"cpus": os.cpu_count(), "points": points}
    print(document(results))
    if (harness.split(cases), workers) == (list(CASES), "1,2"):
        harness.publish("grouped", results, document(results))


if __name__ == "__main__":
    run_script(main, trainer(build))
