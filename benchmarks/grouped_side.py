"""A rank of a side of `benchmarks/grouped.py`: steps of training over requests, when it is told to.

    python benchmarks/grouped_side.py RANK WORLD STORE

It reads lines of JSON: {"case", "grouped"} builds a model and batches, {"steps"} trains so many steps.
To each it answers with a line, [seconds, CPU seconds], of collating and training together.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from rank_group import batches_of, serve_steps

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
OF_ITEM = ["price", f"c{COLUMNS}"]  # what candidates have; the query's tower reads the others
WIDE_TOWERS = {"query": [f"c{i}" for i in range(COLUMNS)], "item": OF_ITEM}
# Schema, model, columns of candidates, candidates of a request.
CASES: dict[str, tuple[dict, dict, list[str], int]] = {
    "two_tower": (IMPRESSIONS, {"name": "two_tower", "towers": TOWERS, "tower_mlp": TOP}, ["item"], SHOWN),
    "sasrec": (
        IMPRESSIONS | {"sparse": HISTORY, "tables": {"item": ITEMS["item"]}},
        {"name": "sasrec", "history": "history", "item": "item", "max_length": 200},
        ["item"],
        SHOWN,
    ),
    "din": (
        IMPRESSIONS,
        {"name": "din", "target": "item", "max_length": 200, "top_mlp": TOP},
        ["item"],
        SHOWN,
    ),
    "wide two_tower": (WIDE, {"name": "two_tower", "towers": WIDE_TOWERS, "tower_mlp": TOP}, OF_ITEM, 10),
    "wide dcn": (WIDE, {"name": "dcn", "top_mlp": TOP, "cross_rank": 32}, OF_ITEM, 10),
}


def requests_of(case: str, seed: int) -> pa.Table:
    """Requests of a case; histories have 50 to 200 ids."""
    schema, _, candidates, count = CASES[case]
    rng = np.random.default_rng(seed)

    def lists(lengths: Any, values: Any) -> pa.ListArray:
        return pa.ListArray.from_arrays(np.cumsum([0, *lengths]).astype(np.int32), values)

    columns: dict[str, Any] = {}
    for name in ("label", *schema["dense"], *schema["sparse"]):
        several = name in ("label", *candidates)
        lengths = np.full(REQUESTS, count if several else 1)
        lengths = rng.integers(50, 201, REQUESTS) if name == "history" else lengths
        rows = schema["tables"][schema["sparse"][name]["table"]]["rows"] if name in schema["sparse"] else 2
        values = rng.integers(0, rows, lengths.sum())
        columns[name] = lists(lengths, values) if several or name == "history" else values
    return pa.table(columns)


def repeated(requests: pa.Table, candidates: list[str], count: int) -> pa.Table:
    """The same with a row for each candidate."""
    rows = np.repeat(np.arange(requests.num_rows), count)
    of_one = ("label", *candidates)
    columns = {
        name: column.combine_chunks().flatten() if name in of_one else column.take(pa.array(rows))
        for name, column in zip(requests.column_names, requests.columns, strict=True)
    }
    return pa.table(columns)


def build(rank: int, world: int, case: str, grouped: bool) -> tuple[Any, Iterator[Any]]:
    """(Step, its batches).

    Args:
        grouped: a row is a request; else one of its candidates.
    """
    from raytrec.config.features import resolve_features
    from raytrec.config.run_config import RunConfig
    from raytrec.config.schema import Schema
    from raytrec.data.batch import Collator
    from raytrec.data.canonical import canonical
    from raytrec.data.columns import Place
    from raytrec.data.form import Form, ReadPlan
    from raytrec.data.pieces import Rows
    from raytrec.worker.build import build_step

    parts, model, candidates, count = CASES[case]
    named = {"candidates": ["label", *candidates]} if grouped else {}
    schema = Schema.parse({"labels": ["label"], **parts, **named}, case)
    rows = REQUESTS if grouped else REQUESTS * count
    config = RunConfig.model_validate(
        {
            "data": {"train": "unused", "global_batch_size": rows * world},
            "scaling": {"num_workers": world},
            "model": model,
        }
    )
    form = Form(ReadPlan(schema), lists=frozenset({"history"}) & set(schema.sparse))
    tables = [requests_of(case, PIECES * rank + i) for i in range(PIECES)]
    tables = tables if grouped else [repeated(table, candidates, count) for table in tables]
    read = [canonical(table, form, Place(case, 0, 0)).combine_chunks() for table in tables]
    pieces = [Rows.of(table.to_batches()[0]) for table in read]
    collate = Collator(form, resolve_features(schema, config.model))
    step, _ = build_step(config, schema, torch.device("cpu"))
    return step, batches_of(collate, pieces, rows, rows * world)


def serve(rank: int, world: int, store: str) -> None:
    """Does what the lines say, until there are none."""
    from raytrec.common.memory import keep_memory

    keep_memory()  # as runs do
    serve_steps(rank, world, store, lambda told: build(rank, world, told["case"], told["grouped"]))


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
