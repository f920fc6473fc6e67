"""Requests with 0 to 5 candidates each, and the same data with one row per candidate."""

import numpy as np
import pyarrow as pa

from raytrec.config.schema import Schema

CANDIDATE_COLUMNS = ["y", "price", "item", "shop"]
REQUEST_SCHEMA_PARTS = {
    "labels": ["y"],
    "dense": ["age", "price", "hour"],
    "scale": {"price": {"mean": 1.0, "std": 2.0}},
    "sparse": {
        "user": {"table": "user"},
        "history": {"table": "item", "pooling": "sequence"},
        "tags": {"table": "tag", "pooling": "mean", "weights": "tag_weights"},
        "item": {"table": "item"},
        "shop": {"table": "shop", "pooling": "mean"},
    },
    "tables": {
        "user": {"rows": 40, "dim": 8},
        "item": {"rows": 30, "dim": 8},
        "tag": {"rows": 7, "dim": 8},
        "shop": {"rows": 5, "dim": 8},
    },
}
REPEATED_SCHEMA = Schema.parse(REQUEST_SCHEMA_PARTS, "repeated")
SCHEMA = Schema.parse(REQUEST_SCHEMA_PARTS | {"candidates": CANDIDATE_COLUMNS}, "requests")
LIST_FEATURES = frozenset({"history"})


def make_request_table(rows, seed, most=5):
    """Return random requests in the file format; on average one in six has no candidates."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, most + 1, rows)

    def lists(lengths, draw):
        return [draw(n).tolist() for n in lengths]

    tags = rng.integers(0, 4, rows)
    return pa.table(
        {
            "user": rng.integers(0, 40, rows),
            "age": rng.normal(size=rows),
            "hour": rng.normal(size=rows),
            "history": lists(rng.integers(0, 9, rows), lambda n: rng.integers(0, 30, n)),
            "tags": lists(tags, lambda n: rng.integers(0, 7, n)),
            "tag_weights": lists(tags, lambda n: rng.random(n)),
            "row": np.arange(rows),
            "w": rng.random(rows),
            "y": lists(counts, lambda n: rng.integers(0, 2, n)),
            "price": lists(counts, lambda n: rng.normal(size=n)),
            "item": lists(counts, lambda n: rng.integers(0, 30, n)),
            "shop": lists(counts, lambda n: rng.integers(0, 5, n)),
            "shown": lists(counts, lambda n: rng.integers(0, 2, n)),
        }
    )


def repeat_by_candidate(requests):
    """Convert requests to one row per candidate."""
    rows = requests.to_pylist()
    listed = [*CANDIDATE_COLUMNS, "shown"]
    found = [row | {k: row[k][i] for k in listed} for row in rows for i in range(len(row["y"]))]
    kinds = [(f.name, f.type.value_type if f.name in listed else f.type) for f in requests.schema]
    return pa.Table.from_pylist(found, pa.schema(kinds))


def requests_to_batch(requests, schema, features=None, padding=0, plan=None, global_rows=None):
    """Convert a table of requests to a Batch like a run."""
    from raytrec.data.batch import Collator
    from raytrec.data.canonical import canonical
    from raytrec.data.column_conversion import Place
    from raytrec.data.read_plans import ReadPlan, ResolvedReadPlan
    from raytrec.data.row_slices import Rows

    form = ResolvedReadPlan(plan or ReadPlan(schema), lists=LIST_FEATURES)
    made = canonical(requests, form, Place("test", 0, 0)).combine_chunks().to_batches()
    rows = requests.num_rows
    pieces = [Rows.of(piece) for piece in made]
    return Collator(form, features)(pieces, rows + padding, global_rows or rows)
