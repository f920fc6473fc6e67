"""Parquet columns of every type: read correctly, or rejected before the run with advice that works."""

import re
from datetime import datetime, timedelta

import parquet
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from reading import parse_transforms, read_canonical_rows

from raytrec.common.errors import DataError
from raytrec.config.schema import Schema
from raytrec.data.arrow import find_required_columns
from raytrec.data.fragments import scan
from raytrec.data.read_plans import ReadPlan
from raytrec.inspection.propose import inspect

BASE = {"label": [0, 1, 1], "user": [1, 2, 3]}
IDS = {"hash": {"rows": 400, "dim": 4, "out_of_range": "hash"}, "error": {"rows": 400, "dim": 4}}


def write_and_read_rows(tmp_path, table, schema, transforms=()):
    """Write a table to a file and return the rows that a run reads from it."""
    path = tmp_path / "a.parquet"
    pq.write_table(table if isinstance(table, pa.Table) else pa.table(table), path)
    plan = ReadPlan(Schema.parse(schema, "test"), transforms=parse_transforms(transforms))
    return parquet.canonical_to_dicts(*read_canonical_rows(path, plan))


def schema(dense=(), policy="error", **features):
    features = features or {"user": {}}
    return {
        "labels": ["label"],
        "dense": list(dense),
        "sparse": {name: {"table": "t", **spec} for name, spec in features.items()},
        "tables": {"t": IDS[policy]},
    }


def ids(tmp_path, array, policy="error", name="x"):
    rows = write_and_read_rows(tmp_path, {**BASE, name: array}, schema(policy=policy, **{name: {}}))
    return [row[name] for row in rows]


VALUES = [[5, 6], None, [7]]
RAW = [b"a" * 16, None, b"b" * 16]
TEXTS, WORDS = ["a", None, "bb"], [["a"], None, ["bb"]]
CODED = pa.dictionary(pa.int32(), pa.string())


@pytest.mark.parametrize(
    "kind",
    [*(pa.list_(pa.int32()), pa.large_list(pa.uint64()), pa.list_view(pa.int32())), pa.large_list_view(pa.int16())],
)
def test_all_list_types_are_read_as_ids(tmp_path, kind):
    assert ids(tmp_path, pa.array(VALUES, kind)) == [[5, 6], [], [7]]


@pytest.mark.slow
@pytest.mark.parametrize(
    "arrays",
    [
        [
            *(pa.array(TEXTS, kind) for kind in (pa.string(), pa.large_string(), pa.string_view(), CODED)),
            *(pa.array(WORDS, kind) for kind in (pa.list_view(pa.string_view()), pa.list_(CODED))),
        ],
        [
            *(pa.array(RAW, kind) for kind in (pa.binary(), pa.binary(16), pa.large_binary(), pa.binary_view())),
            pa.ExtensionArray.from_storage(pa.uuid(), pa.array(RAW, pa.binary(16))),
        ],
    ],
    ids=["text", "bytes"],
)
def test_all_text_types_give_the_same_ids(tmp_path, arrays):
    first, *others = (ids(tmp_path, array, "hash") for array in arrays)
    assert first[1] == [] and first[0] != first[2]
    assert others == [first] * len(others)


@pytest.mark.parametrize(
    "kind",
    [
        *(pa.float16(), pa.float64(), pa.decimal32(5, 2), pa.decimal64(9, 2), pa.decimal256(50, 2)),
        pa.dictionary(pa.int8(), pa.float64()),
    ],
)
def test_all_number_types_are_read_as_dense(tmp_path, kind):
    numbers = pa.array([0.5, 1.5, 2.5])
    numbers = numbers.dictionary_encode() if pa.types.is_dictionary(kind) else numbers.cast(kind)
    flags = pa.ExtensionArray.from_storage(pa.bool8(), pa.array([1, 0, 1], pa.int8()))
    rows = write_and_read_rows(tmp_path, {**BASE, "price": numbers, "flag": flags}, schema(["price", "flag"]))
    assert [row["dense"] for row in rows] == [[0.5, 1], [1.5, 0], [2.5, 1]]


@pytest.mark.parametrize("kind", [pa.float16(), pa.float32(), pa.float64()])
@pytest.mark.parametrize("policy", ["error", "hash"])
def test_whole_floats_give_the_same_ids_as_integers(tmp_path, kind, policy):
    assert ids(tmp_path, pa.array([4.0, None, 6.0], kind), policy) == [[4], [], [6]]
    assert ids(tmp_path, pa.array([4.0, float("nan"), -0.0], kind), policy) == [[4], [], [0]]
    coded = pa.array([399.0, None, 399.0]).dictionary_encode()
    assert ids(tmp_path, coded, policy) == [[399], [], [399]]


def test_large_whole_floats_hash_like_integers(tmp_path):
    values = [2**53 - 1, None, -(2**40)]
    assert ids(tmp_path, pa.array(values, pa.float64()), "hash") == ids(tmp_path, pa.array(values), "hash")


@pytest.mark.parametrize("value", [1.5, 2.0**53, float("inf"), float("-inf"), -1e300])
@pytest.mark.parametrize("policy", ["error", "hash"])
def test_invalid_float_ids_are_reported(tmp_path, value, policy):
    with pytest.raises(DataError, match=r"(?s)a\.parquet, row group 0, column x, row 2") as error:
        ids(tmp_path, pa.array([1.0, float("nan"), value]), policy)
    assert f"feature 'x' contains the value {value:.17g}" in str(error.value)


def test_half_float_weights_are_read(tmp_path):
    table = {**BASE, "x": pa.array(VALUES), "w": pa.array([[0.5, 1.5], None, [2.0]], pa.list_view(pa.float16()))}
    rows = write_and_read_rows(tmp_path, table, schema(x={"weights": "w"}))
    assert [row["weights"]["x"] for row in rows] == [[0.5, 1.5], [], [2.0]]


def test_all_null_column_has_no_ids(tmp_path):
    assert ids(tmp_path, pa.nulls(3)) == [[], [], []]
    assert ids(tmp_path, pa.array([[], None, []], pa.list_(pa.null()))) == [[], [], []]
    filled = [{"do": "fill_null", "columns": ["x"], "value": 0.5}]
    rows = write_and_read_rows(tmp_path, {**BASE, "x": pa.nulls(3)}, schema(["x"]), filled)
    assert [row["dense"] for row in rows] == [[0.5]] * 3


USER = pa.array([{"age": 1, "geo": {"zip": 7}}, None, {"age": 3, "geo": None}])


def test_struct_fields_can_be_used_as_columns(tmp_path):
    bought = pa.array([[{"id": 4, "n": 0.5}, {"id": 5, "n": 1.0}], None, []])
    scores = pa.array([[(8, 0.5)], [], [(9, 2.0), (6, 1.0)]], pa.map_(pa.int64(), pa.float64()))
    table = {**BASE, "who": USER, "bought": bought, "scores": scores}
    spec = schema(
        ["who.age"],
        zip={"column": "who.geo.zip"},
        bought={"column": "bought.id", "weights": "bought.n"},
        scored={"column": "scores.key", "weights": "scores.value"},
    )
    fill = [{"do": "fill_null", "columns": ["who.age"], "value": 9}]
    rows = write_and_read_rows(tmp_path, table, spec, fill)
    assert [row["dense"] for row in rows] == [[1], [9], [3]]
    assert [row["zip"] for row in rows] == [[7], [], []]
    assert [row["bought"] for row in rows] == [[4, 5], [], []]
    assert [row["weights"]["scored"] for row in rows] == [[0.5], [], [2.0, 1.0]]


def test_exact_column_name_takes_precedence_over_struct_path(tmp_path):
    table = {**BASE, "who": USER, "who.age": [40, 50, 60], "who.geo": pa.array([{"zip": 1}] * 3)}
    rows = write_and_read_rows(tmp_path, table, schema(["who.age"]))
    assert [row["dense"] for row in rows] == [[40], [50], [60]]
    with pytest.raises(DataError, match=r"'who.geo.zip' exists more than once") as error:
        write_and_read_rows(tmp_path, table, schema(["who.geo.zip"]))
    assert "a.parquet, column who.geo.zip" in str(error.value)


def test_only_required_struct_fields_are_read():
    arrow = pa.schema([("who", USER.type), ("a.b", pa.int64())])
    assert find_required_columns(arrow, ["who.geo.zip", "a.b"]) == ["who.geo.zip", "a.b"]


@pytest.mark.parametrize("name", ["a b", "größe", "a:b", "a.b", "", "[x]", "'", "a\nb", "ids", "0"])
def test_unusual_column_names_are_read(tmp_path, name):
    rows = write_and_read_rows(tmp_path, {**BASE, name: [0.5, 1.5, 2.5]}, schema([name]))
    assert [row["dense"] for row in rows] == [[0.5], [1.5], [2.5]]
    if name != "":
        assert ids(tmp_path, pa.array([4, 5, 6]), name=name) == [[4], [5], [6]]


def test_duplicate_column_names_are_rejected(tmp_path):
    twice = pa.table([[0, 1], [1, 2], [1, 2], [3, 4]], names=["label", "user", "user", "other"])
    with pytest.raises(DataError, match="column 'user' exists more than once") as error:
        write_and_read_rows(tmp_path, twice, schema())
    assert "a.parquet" in str(error.value)
    fine = twice.rename_columns(["label", "other", "other", "user"])
    assert [row["user"] for row in write_and_read_rows(tmp_path, fine, schema())] == [[3], [4]]
    both = pa.StructArray.from_arrays([pa.array([1, 2, 3])] * 2, names=["a", "a"])
    with pytest.raises(DataError, match=r"'s.a' exists more than once"):
        write_and_read_rows(tmp_path, {**BASE, "s": both}, schema(["s.a"]))


DEEP = pa.array([[[1]], [[2, 3]], None])
TIMES = pa.array([datetime(2026, 11, 1, 13), datetime(2026, 11, 2, 14), datetime(2026, 11, 3, 15)])


@pytest.mark.slow
@pytest.mark.parametrize(
    "column,roles",
    [
        (DEEP, "dense sparse weights label"),
        (pa.array(DEEP.to_pylist(), pa.list_view(pa.list_(pa.int64()))), "sparse"),
        (pa.array([["a"]] * 3), "weights label"),
        (TIMES, "weights"),
        (USER, "dense sparse weights label"),
        (pa.array([[{"a": 1}]] * 3), "sparse dense"),
        (pa.array([[0.5]] * 3), "dense label"),
        (pa.array([True] * 3), "sparse"),
        (pa.nulls(3), "dense label"),
    ],
)
def test_unreadable_columns_are_rejected_before_the_run(tmp_path, column, roles):
    for role in roles.split():
        spec = {
            "dense": schema(["x"]),
            "sparse": schema(policy="hash", other={"column": "x"}),
            "weights": schema(user={"weights": "x"}),
            "label": {**schema(), "labels": ["x"]},
        }[role]
        pq.write_table(pa.table({**BASE, "x": column}), tmp_path / "a.parquet")
        with pytest.raises(DataError) as error:
            scan(str(tmp_path), ReadPlan(Schema.parse(spec, "test")))
        message = str(error.value)
        assert "a.parquet, column x" in message and "  do:" in message, message


def get_advised_transform(tmp_path, table, spec):
    """Return the transform that the error for this table advises, with 0 for NUMBER, and the error's text."""
    with pytest.raises(DataError) as error:
        write_and_read_rows(tmp_path, table, spec)
    advised = re.search(r"data\.transforms: (\{.*?\})", str(error.value))[1]
    return yaml.safe_load(advised.replace("NUMBER", "0")), str(error.value)


TIME_COLUMNS = {  # (column, numbers after the advised transform)
    "timestamp": (TIMES, [13, 14, 15]),
    "zoned": (TIMES.cast(pa.timestamp("ns", "Europe/Zurich")), [14, 15, 16]),
    "date": (TIMES.cast(pa.date32()), [6, 0, 1]),
    "date64": (TIMES.cast(pa.date64()), [6, 0, 1]),
    "time32": (TIMES.cast(pa.time32("s")), [13, 14, 15]),
    "time64": (TIMES.cast(pa.time64("us")), [13, 14, 15]),
    "duration": (pa.array([timedelta(hours=h) for h in (36, 12, 0)]), [1.5, 0.5, 0]),
    "text": (pa.array(["1.5", " 2", "3"]), [1.5, 2, 3]),
    "strange: name": (TIMES, [13, 14, 15]),
}


@pytest.mark.parametrize("name", TIME_COLUMNS)
def test_advised_transform_makes_dense_column_readable(tmp_path, name):
    column, numbers = TIME_COLUMNS[name]
    table = {**BASE, name: column}
    transform, error = get_advised_transform(tmp_path, table, schema([name]))
    made = transform.get("into", transform["columns"])
    assert made == [name] or f"add {made[0]} to the schema" in error
    rows = write_and_read_rows(tmp_path, table, schema(made), [transform])
    assert [row["dense"] for row in rows] == [[n] for n in numbers]


@pytest.mark.parametrize(
    "column,expected",
    [
        (TIMES, [[13], [14], [15]]),
        (pa.array([True, None, False]), [[1], [], [0]]),
        (pa.array([4, None, 6]).cast(pa.decimal128(20, 0)), [[4], [], [6]]),
        (pa.array([[4.0], None, [6.0, 7.0]]), [[4], [], [6, 7]]),
        (pa.array([[datetime(2026, 1, 1, 5)], None, []]), [[5], [], []]),
        (pa.array([[True, None, False], None, []]), [[1, 0], [], []]),
    ],
)
def test_advised_transform_makes_id_column_readable(tmp_path, column, expected):
    table = {**BASE, "x": column}
    transform, _ = get_advised_transform(tmp_path, table, schema(x={}))
    (made,) = transform.get("into", ["x"])
    rows = write_and_read_rows(tmp_path, table, schema(x={"column": made}), [transform])
    assert [row["x"] for row in rows] == expected


def test_inspect_advises_the_same_transform_for_bool_lists(tmp_path):
    table = {"label": [0, 1, 1] * 9, "user": [1, 2, 3] * 9, "x": [[True, None, False], None, []] * 9}
    transform, _ = get_advised_transform(tmp_path, table, schema(x={}))
    (skipped,) = [f for f in inspect(str(tmp_path)).findings if f.stats.name == "x"]
    assert yaml.safe_load(skipped.why.partition("add to data.transforms: ")[2].rpartition(", and a")[0]) == transform


def test_error_for_ids_beyond_63_bits_suggests_managed_ids(tmp_path):
    table = {**BASE, "x": pa.array([[2**63], [2**64 - 1, 5], [2**63]], pa.list_(pa.uint64()))}
    with pytest.raises(DataError, match=r"(?s)id 9223372036854775808 .* or set tables\.t\.ids to managed") as error:
        write_and_read_rows(tmp_path, table, schema(x={}))
    assert "row 0" in str(error.value)


@pytest.mark.parametrize(
    "values", [pa.array([1, 500, 1]), pa.array([1.5, 2, 3]), pa.array([[1], [500], []]), pa.array([[1], [None], []])]
)
def test_errors_of_ids_name_their_column_and_not_their_feature(tmp_path, values):
    with pytest.raises(DataError) as error:
        write_and_read_rows(tmp_path, {**BASE, "clicked": values}, schema(x={"column": "clicked"}))
    assert "column clicked, row" in error.value.where


def test_advised_struct_field_is_readable(tmp_path):
    with pytest.raises(DataError) as error:
        write_and_read_rows(tmp_path, {**BASE, "who": USER}, schema(x={"column": "who"}))
    named = re.search(r"use a field of the column: (\S+), (\S+)", str(error.value)).groups()
    assert named == ("who.age", "who.geo.zip")
    rows = write_and_read_rows(tmp_path, {**BASE, "who": USER}, schema(x={"column": named[1]}))
    assert [row["x"] for row in rows] == [[7], [], []]


@pytest.mark.parametrize(
    "columns,spec",
    [
        ({"x": [0.5, None, 1.0]}, schema(["x"])),
        ({"x": [0.5, float("nan"), 1.0]}, schema(["x"])),
        ({"x": [[1], [None, 2], []]}, schema(x={})),
        ({"column with, comma": [[1], [None, 2], []]}, schema(x={"column": "column with, comma"})),
    ],
)
def test_advised_transform_fixes_nulls(tmp_path, columns, spec):
    transform, _ = get_advised_transform(tmp_path, {**BASE, **columns}, spec)
    rows = write_and_read_rows(tmp_path, {**BASE, **columns}, spec, [transform])
    assert len(rows) == 3 and rows[1].get("x") in (None, [2])


def test_advised_transform_makes_text_labels_readable(tmp_path):
    table = {"user": [1, 2, 3], "label": ["yes", "no", "yes"]}
    transform, _ = get_advised_transform(tmp_path, table, schema())
    rows = write_and_read_rows(tmp_path, table, schema(), [transform | {"positive": ["yes"]}])
    assert [row["labels"] for row in rows] == [[1], [0], [1]]
