"""Read task: canonical form of every column kind, and the message for each invalid value."""

import math

import numpy as np
import parquet
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raytrec.common.errors import DataError, SchemaError
from raytrec.config.schema import Schema
from raytrec.data.column_conversion import Place, check_finite
from raytrec.data.fragments import scan
from raytrec.data.ids import _all_below
from raytrec.data.item_reader import read_item
from raytrec.data.order import LaneItem, Part
from raytrec.data.read_plans import ReadPlan, ResolvedReadPlan


def schema(policy="error", weights=None, rows=10):
    return Schema.parse(
        {
            "labels": ["label"],
            "dense": ["price"],
            "sparse": {"user": {"table": "user"}, "tags": {"table": "tag", "weights": weights}},
            "tables": {
                "user": {"rows": rows, "dim": 4, "out_of_range": policy},
                "tag": {"rows": rows, "dim": 4, "out_of_range": policy},
            },
        },
        "test",
    )


GOOD = {"label": [0, 1, 1], "price": [0.5, 1.5, 2.5], "user": [1, 2, 3], "tags": [[1], [], [2, 3]]}


def read(tmp_path, columns=None, spec=None, types=None, first=0, seed=None, skip=0):
    table = pa.table({**GOOD, **(columns or {})})
    for name, kind in (types or {}).items():
        column = table[name].dictionary_encode() if kind == "dictionary" else table[name].cast(kind)
        table = table.set_column(table.schema.get_field_index(name), name, column)
    path = tmp_path / "a.parquet"
    pq.write_table(table, path)
    part = Part(str(path), 0, first, table.num_rows - first)
    form = scan(str(path), ReadPlan(spec or schema())).form
    return parquet.canonical_to_dicts(read_item(LaneItem(0, 0, (part,), seed, skip), form), form)


def test_dense_columns_are_scaled(tmp_path):
    values = schema().model_dump()
    scales = {
        "plain": ({"mean": 2.0, "std": 4.0}, [0.5, 1.5, 2.5], [-0.375, -0.125, 0.125]),
        "log": ({"log": True, "mean": 1.0, "std": 0.5}, [0.0, np.e - 1, 1 - np.e], [-2.0, 0.0, -4.0]),
        "nulls": ({"mean": 2.0, "nulls": "mean"}, [None, np.nan, 3.0], [0.0, 0.0, 1.0]),
    }
    for scale, given, expected in scales.values():
        found = read(tmp_path, {"price": given}, Schema.parse(values | {"scale": {"price": scale}}, "test"))
        assert [row["dense"][0] for row in found] == pytest.approx(expected, abs=1e-6)
    with pytest.raises(DataError, match="column 'price' contains a null"):
        read(tmp_path, {"price": [None, 1.0, 2.0]}, Schema.parse(values | {"scale": {"price": {}}}, "test"))
    with pytest.raises(DataError, match=r"^column 'price' contains inf"):
        spec = Schema.parse(values | {"scale": {"price": {"nulls": "mean"}}}, "test")
        read(tmp_path, {"price": [np.inf, 1.0, 2.0]}, spec)
    with pytest.raises(DataError, match=r"^scaled column 'price' contains inf"):
        spec = Schema.parse(values | {"scale": {"price": {"std": 1e-38}}}, "test")
        read(tmp_path, {"price": [1e38, 1.0, 2.0]}, spec)
    for wrong, message in (({"cost": {}}, "there is no dense column 'cost'"), ({"price": {"sdt": 1}}, "mean 'std'")):
        with pytest.raises(SchemaError, match=message):
            Schema.parse(values | {"scale": wrong}, "test")


def list_bags(rows):
    """Return [user ids, tag ids] for each row."""
    return [[row["user"], row["tags"]] for row in rows]


EXPECTED = [[[1], [1]], [[2], []], [[3], [2, 3]]]


@pytest.mark.parametrize(
    "types",
    [
        {},
        {"user": pa.int32(), "tags": pa.list_(pa.int32())},
        {"user": pa.uint8(), "label": pa.bool_()},
        {"user": "dictionary", "label": pa.float64()},
    ],
)
def test_column_types_give_the_same_canonical_rows(tmp_path, types):
    result = read(tmp_path, types=types)
    assert list_bags(result) == EXPECTED
    assert [row["labels"] for row in result] == [[0.0], [1.0], [1.0]]
    assert [row["dense"] for row in result] == [[0.5], [1.5], [2.5]]


def test_fixed_size_lists_nulls_and_row_offsets_are_read(tmp_path):
    fixed = pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int64(), 2))
    assert [row[1] for row in list_bags(read(tmp_path, {"tags": fixed}))] == [[1, 2], [3, 4], [5, 6]]
    result = read(tmp_path, {"user": [None, 2, 3], "tags": [None, [5], []]})
    assert list_bags(result) == [[[], []], [[2], [5]], [[3], []]]
    assert list_bags(read(tmp_path, first=1)) == EXPECTED[1:]


def test_shuffle_keeps_rows_intact_and_precedes_skip(tmp_path):
    whole = list_bags(read(tmp_path, seed=(1, 2)))
    assert sorted(map(str, whole)) == sorted(map(str, EXPECTED))
    assert list_bags(read(tmp_path, seed=(1, 2), skip=1)) == whole[1:]


@pytest.mark.parametrize(
    "columns,expected_text,row",
    [
        ({"price": [1.0, float("nan"), 2.0]}, "column 'price' contains NaN", 1),
        ({"price": [1.0, 2.0, float("inf")]}, "column 'price' contains inf", 2),
        ({"price": [1.0, 1e300, 2.0]}, "column 'price' contains inf", 1),
        ({"label": [0.0, 1.0, -0.5]}, "label 'label' is -0.5", 2),
        ({"user": pa.array([1, 2, 2**64 - 1], pa.uint64())}, f"id {2**64 - 1} of feature 'user'", 2),
        ({"tags": [[1], [], [None]]}, "feature 'tags' contains a null inside a list", 2),
    ],
)
def test_errors_locate_invalid_values(tmp_path, columns, expected_text, row):
    with pytest.raises(DataError) as error:
        read(tmp_path, columns)
    message = str(error.value)
    assert expected_text in message, message
    assert f"a.parquet, row group 0, column {next(iter(columns))}, row {row}" in message
    with pytest.raises(DataError) as error:
        read(tmp_path, columns, first=1)
    assert f"row {row}" in str(error.value), "row numbers start at the row group"


@pytest.mark.parametrize(
    "columns,weights,expected_advice",
    [
        ({"price": [1.0, 2.0, math.nan]}, None, "fill_null, columns: [price]"),
        ({"price": [1.0, 2.0, math.inf]}, None, "clip, columns: [price]"),
        ({"tags": [[1], [], [None]], "w": [[1.0], [], [1.0]]}, "w", "add to data.transforms: {do: fill_null"),
    ],
)
def test_advice_for_invalid_values_names_a_transform_that_helps(tmp_path, columns, weights, expected_advice):
    with pytest.raises(DataError) as error:
        read(tmp_path, columns, schema(weights=weights))
    assert expected_advice in error.value.do and error.value.do.count("clip") <= 1
    assert ("clip" in error.value.do) == ("clip" in expected_advice)


def test_message_of_nan_keeps_the_column_name():
    with pytest.raises(DataError, match="column 'finance' contains NaN"):
        check_finite(np.array([math.nan]), "finance", Place("a.parquet", 0, 0))


@pytest.mark.parametrize(
    "weights,expected_text",
    [
        ([[0.5], [], [2.0]], "column 'w' has 1 value for 2 ids of 'tags'"),
        ([[0.5], [], [2.0, float("nan")]], "column 'w' contains NaN"),
        ([[0.5], [], [2.0, None]], "column 'w' contains a null inside a list"),
    ],
)
def test_invalid_id_weights_are_rejected(tmp_path, weights, expected_text):
    with pytest.raises(DataError, match=expected_text):
        read(tmp_path, {"w": weights}, schema(weights="w"))


def test_out_of_range_policies_map_ids(tmp_path):
    columns = {"user": [-5, 3, 2**50], "tags": [[12], [], [9, 10]]}
    assert list_bags(read(tmp_path, columns, schema("clamp"))) == [[[0], [9]], [[3], []], [[9], [9, 9]]]
    hashed = list_bags(read(tmp_path, columns, schema("hash")))
    assert hashed[1] == [[3], []] and hashed[2][1][0] == 9, "valid ids are unchanged"
    assert all(0 <= i < 10 for row in hashed for bag in row for i in bag)
    assert hashed == list_bags(read(tmp_path, columns, schema("hash")))
    many = {k: v * 1000 for k, v in GOOD.items()} | {"user": np.arange(10**6, 10**6 + 3000)}
    spread = read(tmp_path, many, schema("hash", rows=100))
    counts = np.bincount([row["user"][0] for row in spread], minlength=100)
    assert counts.min() > 5 and counts.max() < 70, "the hash is uneven"


def test_undecodable_row_group_is_reported(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({k: v * 5000 for k, v in GOOD.items()}), path, compression="zstd")
    raw = bytearray(path.read_bytes())
    raw[200:900] = bytes(700)
    path.write_bytes(raw)
    item = LaneItem(0, 0, (Part(str(path), 0, 0, 15000),), None)
    form = ResolvedReadPlan(ReadPlan(schema()), frozenset({"tags"}))
    with pytest.raises(DataError, match=r"cannot decode the row group") as error:
        read_item(item, form)
    assert "a.parquet, row group 0" in str(error.value)


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int32, np.int64, np.uint64])
@pytest.mark.parametrize("rows", [100, 128, 129, 300, 2**31, 2**40, 2**63 - 1])
def test_all_below_detects_ids_out_of_range(kind, rows):
    """Some integer types hold fewer values than the table has rows; there, -1 looks like 255."""
    least, most = np.iinfo(kind).min, min(np.iinfo(kind).max, rows - 1)
    odd = [value for value in (least, -1, rows, np.iinfo(kind).max) if least <= value <= np.iinfo(kind).max]
    for value in (0, most):
        assert _all_below(np.array([0, value, 1], kind), rows)
    for value in odd:
        assert _all_below(np.array([0, value, 1], kind), rows) == (0 <= value < rows)
