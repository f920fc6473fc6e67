"""Rows of which only some features are read: batches have the others empty."""

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from raytrec.config.features import Features
from raytrec.config.schema import Schema
from raytrec.data.collate import Collator, Rows
from raytrec.data.fragments import scan
from raytrec.data.order import Item, Part
from raytrec.data.read_plan import ReadPlan
from raytrec.data.rows import read_item

SCHEMA = Schema.parse(
    {
        "labels": ["y"],
        "dense": ["age", "price", "year"],
        "sparse": {
            "user": {"table": "user"},
            "history": {"table": "item", "pooling": "sequence", "weights": "liked"},
            "item": {"table": "item"},
            "tags": {"table": "tag", "pooling": "mean"},
        },
        "tables": {
            "user": {"rows": 9, "dim": 4},
            "item": {"rows": 9, "dim": 4},
            "tag": {"rows": 9, "dim": 4, "out_of_range": "clamp"},
        },
    },
    "here",
)
WHOLE = {
    "age": [1.0, 2.0, 3.0],
    "price": [4.0, 5.0, 6.0],
    "year": [7.0, 8.0, 9.0],
    "user": [1, None, 3],
    "history": [[1, 2, 3], [], [4]],
    "liked": [[1.0, 0.5, 2.0], [], [3.0]],
    "item": [5, 6, 7],
    "tags": [[1, 20], [2], []],
}
NOTHING = {
    "age": 0.0,
    "price": 0.0,
    "year": 0.0,
    "user": None,
    "history": [],
    "liked": [],
    "item": None,
    "tags": [],
}


def batch_of(columns, schema, folder):
    """The Batch of rows, read from a file that has no other columns than these."""
    types = {"history": pa.list_(pa.int64()), "liked": pa.list_(pa.float32()), "tags": pa.list_(pa.int64())}
    file = folder / f"{'-'.join(columns)}.parquet"
    pq.write_table(
        pa.table(
            {
                n: pa.array(v, types.get(n, pa.int64() if n in SCHEMA.sparse else None))
                for n, v in columns.items()
            }
        ),
        file,
    )
    dataset = scan(str(file), ReadPlan(schema, read_labels=False))
    table = read_item(Item(0, 0, (Part(str(file), 0, 0, 3),), None), dataset.form)
    features = Features(SCHEMA, {"history": 2})
    pieces = [Rows.of(batch) for batch in table.to_batches()]
    return Collator(dataset.form, features)(pieces, 4, 3)


def test_what_is_not_read_is_empty(tmp_path):
    for tower in ({"item", "tags", "year"}, {"user", "history", "age", "price"}, {"history"}):
        read = {n: v for n, v in WHOLE.items() if n in tower or (n == "liked" and "history" in tower)}
        batch = batch_of(read, SCHEMA.part(tower), tmp_path)
        emptied = {n: v if n in read else [NOTHING[n]] * 3 for n, v in WHOLE.items()}
        same = batch_of(emptied, SCHEMA, tmp_path)
        assert torch.equal(batch.dense, same.dense) and batch.dense.shape == (4, 3)
        assert batch.sparse.keys() == same.sparse.keys()
        for part in ("values", "weights", "lengths"):
            assert torch.equal(getattr(batch.sparse, part)(), getattr(same.sparse, part)())
        assert batch.sparse.length_per_key() == same.sparse.length_per_key()
        places = [list(SCHEMA.sparse).index(feature) for feature in SCHEMA.part(tower).sparse]
        assert torch.equal(batch.changed, same.changed[:, places])
