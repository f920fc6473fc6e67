"""Ids of tables with managed ids reach batches unchanged."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pandas.util import hash_array
from reading import collate_table, read_canonical_rows

from raytrec.config.schema import Schema
from raytrec.data.read_plans import ReadPlan

MIN_INT64 = -(2**63)
SCHEMA = {
    "labels": ["y"],
    "sparse": {"user": {"table": "user"}, "item": {"table": "item"}, "seen": {"table": "item"}},
    "tables": {"user": {"rows": 9, "dim": 4}, "item": {"rows": 3, "dim": 4, "ids": "managed"}},
}


def read_batch_ids(tmp_path, item, seen):
    """Return the ids of each row by feature, from a batch with two padding rows."""
    path = tmp_path / "a.parquet"
    users = pa.array([8, None, 0, 1][: len(item)], pa.int16())
    pq.write_table(pa.table({"y": [0.0] * len(item), "user": users, "item": item, "seen": seen}), path)
    sparse = collate_table(*read_canonical_rows(path, ReadPlan(Schema.parse(SCHEMA, "test"))), padding=2).sparse
    return {name: [ids.tolist() for ids in sparse[name].to_dense()] for name in SCHEMA["sparse"]}


def test_managed_ids_accept_any_int64(tmp_path):
    item = pa.array([-1, 2**63 - 1, None, MIN_INT64])
    seen = pa.array([[5, MIN_INT64], [], [-7, -1], None])
    assert read_batch_ids(tmp_path, item, seen) == {
        "user": [[8], [], [0], [1], [], []],
        "item": [[-1], [2**63 - 1], [], [MIN_INT64 + 1], [], []],
        "seen": [[5, MIN_INT64 + 1], [], [-7, -1], [], [], []],
    }


def test_unsigned_integers_keep_their_bits(tmp_path):
    item = pa.array([2**64 - 1, 2**63 + 5, 3], pa.uint64())
    got = read_batch_ids(tmp_path, item, pa.array([[2**64 - 2], [], []], pa.list_(pa.uint64())))
    assert got["item"][:3] == [[-1], [MIN_INT64 + 5], [3]] and got["seen"][0] == [-2]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_binary(), pa.dictionary(pa.int8(), pa.string())])
def test_managed_text_ids_keep_all_bits_of_the_hash(tmp_path, kind):
    plain = kind.value_type if pa.types.is_dictionary(kind) else kind
    values = ["a", "b", "a", None] if pa.types.is_string(plain) else [b"a", b"b", b"a", None]
    expected = hash_array(np.array(values[:2], dtype=object)).astype(np.int64).tolist()
    item = pa.array(values, plain).cast(kind)
    got = read_batch_ids(tmp_path, item, pa.array([[values[1]], [], [], []], pa.list_(plain)))
    assert got["item"] == [[expected[0]], [expected[1]], [expected[0]], [], [], []]
    assert got["seen"][0] == [expected[1]]
