"""Side features of sequences: read, checked, truncated and padded like the ids."""

from datetime import UTC, date, datetime

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from reading import collate_table
from reading import read_canonical_rows as read_file

from raytrec.common.errors import DataError, SchemaError
from raytrec.config.features import Features
from raytrec.config.schema import Schema
from raytrec.data.batch import Collator
from raytrec.data.column_conversion import to_float64
from raytrec.data.read_plans import ReadPlan
from raytrec.data.row_slices import Rows
from raytrec.embeddings.pooling import PooledEmbeddings
from raytrec.models.inputs import SequenceLookup

VALUES = {
    "labels": ["y"],
    "dense": [],
    "sparse": {
        "item": {"table": "item"},
        "history": {"table": "item", "pooling": "sequence", "side_features": ["times", "price"]},
    },
    "tables": {"item": {"rows": 50, "dim": 4}},
}
SCHEMA = Schema.parse(VALUES, "test")
HISTORY = [[1, 2, 3, 4], [], [5], [6, 7]]
TIMES = [[10, 20, 30, 40], [], [50], [60, 70]]
PRICE = [[0.5, 1.5, 2.5, 3.5], None, [4.5], [5.5, 6.5]]


def read(folder, times=TIMES, price=PRICE, kind=pa.int64(), history=HISTORY):
    """Write a file; return its rows in canonical form and the resolved read plan."""
    columns = {
        "y": pa.array([0.0, 1, 0, 1]),
        "item": pa.array([1, 2, 3, 4]),
        "history": pa.array(history, pa.list_(pa.int64())),
        "times": pa.array(times, pa.list_(kind)),
        "price": pa.array(price, pa.list_(pa.float64())),
    }
    pq.write_table(pa.table(columns), folder / "a.parquet")
    return read_file(folder / "a.parquet", ReadPlan(SCHEMA))


def test_side_features_follow_their_ids(tmp_path):
    features = Features(SCHEMA, {"history": 3})
    batch = collate_table(*read(tmp_path), features, padding=1)
    assert batch.sparse["history"].values().tolist() == [4, 3, 2, 5, 7, 6]
    side_features = batch.side_features["history"]
    assert side_features.dtype == torch.float64
    assert side_features.tolist() == [[40, 3.5], [30, 2.5], [20, 1.5], [50, 4.5], [70, 6.5], [60, 5.5]]
    embeddings = PooledEmbeddings(SCHEMA, None, features.sequences).to_empty(device="cpu")
    found = embeddings(batch.sparse)
    given = SequenceLookup(features)(found, batch)["history"]
    assert given.side_features.shape == (5, 3, 2) and not given.side_features[~given.present].any()
    times = [[40, 30, 20], [0, 0, 0], [50, 0, 0], [70, 60, 0], [0, 0, 0]]
    assert given.side_features[:, :, 0].tolist() == times
    moved = batch.to(torch.device("cpu"))
    assert torch.equal(moved.side_features["history"], side_features)


def test_pooling_models_get_no_side_features(tmp_path):
    assert collate_table(*read(tmp_path), Features(SCHEMA, {})).side_features is None


def test_row_slices_keep_side_features(tmp_path):
    table, form = read(tmp_path)
    whole = Rows.of(table.combine_chunks().to_batches()[0])
    batch = Collator(form, Features(SCHEMA, {"history": 3}))([whole[2:], whole[:1]], 3, 3)
    assert batch.side_features["history"][:, 0].tolist() == [50, 70, 60, 40, 30, 20]
    nothing = Collator(form, Features(SCHEMA, {"history": 3}))([], 2, 3)
    assert nothing.side_features["history"].shape == (0, 2)


def test_lists_of_one_id_have_side_features(tmp_path):
    """Each row has a list of one id and a list of one time."""
    numbers = [[10], [20], [30], [40]]
    table, form = read(tmp_path, numbers, numbers, history=[[1], [2], [3], [4]])
    sides = collate_table(table, form, Features(SCHEMA, {"history": 3})).side_features["history"]
    assert sides[:, 0].tolist() == [10, 20, 30, 40]


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.timestamp("s"), datetime(2026, 1, 1)),
        (pa.timestamp("ms", "UTC"), datetime(2026, 1, 1, tzinfo=UTC)),
        (pa.timestamp("ns"), datetime(2026, 1, 1)),
        (pa.date32(), date(2026, 1, 1)),
        (pa.date64(), date(2026, 1, 1)),
        (pa.int64(), 1_767_225_600),
        (pa.float32(), 1_767_225_600.0),
        (pa.decimal128(12, 2), 1_767_225_600),
    ],
    ids=str,
)
def test_times_are_converted_to_seconds(kind, value):
    assert to_float64(pa.array([value, None], kind))[0] == 1_767_225_600.0
    assert np.isnan(to_float64(pa.array([value, None], kind))[1])


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("times", [[1, 2, 3, 4], [], [5, 6], [6, 7]], "column 'times' has 2 values for 1 id of 'history'"),
        ("times", [[1, 2, None, 4], [], [5], [6, 7]], "column 'times' contains a null inside a list"),
        ("price", [[1.0, float("nan"), 1, 1], [], [1], [1, 1]], "column 'price' contains NaN"),
    ],
)
def test_invalid_side_features_are_rejected(column, values, message, tmp_path):
    with pytest.raises(DataError) as error:
        read(tmp_path, **{column: values})
    assert message in str(error.value) and "row " in str(error.value)


def test_text_side_features_are_rejected(tmp_path):
    with pytest.raises(DataError, match="side feature 'times' of sequence 'history' has type list<"):
        read(tmp_path, times=[["a"] * 4, [], ["b"], ["c", "d"]], kind=pa.string())


def test_only_sequences_have_side_features():
    values = VALUES | {"sparse": {"item": {"table": "item", "side_features": ["times"]}}}
    with pytest.raises(SchemaError, match=r"item\.side_features: side features require pooling: sequence"):
        Schema.parse(values, "test")
    assert Schema.parse(SCHEMA.model_dump(), "test").columns == ["y", "item", "history", "times", "price"]
    assert "side_features: [times, price]" in SCHEMA.to_yaml()
