"""Conversion of rows from data frames and JSON objects."""

from datetime import datetime

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from raytrec.common.errors import DataError
from raytrec.config.schema import Schema
from raytrec.config.transforms import Cast, DatePart
from raytrec.scoring.request_rows import ObjectRows, RowReader, concat_rows, to_table


def test_empty_dataframe_bags_may_have_another_dtype():
    rows = pd.DataFrame({"words": [np.array([]), np.array(["a", "b"], object)], "other": [1, 2]})
    found = to_table(rows, pa.schema({"words": pa.list_(pa.string())}))
    assert found["words"].to_pylist() == [[], ["a", "b"]]


def test_rows_of_several_requests_are_converted_together():
    schema = pa.schema({"id": pa.int64(), "price": pa.float64()})
    first, second = [{"id": 1, "price": 0.5}, {"id": 2, "price": None}], [{"id": 3, "price": 1, "other": "x"}]
    table = concat_rows([ObjectRows(first, schema), ObjectRows(second, schema)[:1]])
    assert table.to_pydict() == {"id": [1, 2, 3], "price": [0.5, None, 1.0]}
    assert table["id"].num_chunks == 1  # one conversion per request would give one chunk each


@pytest.mark.parametrize(
    ("rows", "where"),
    [
        ([{"id": 1}, ["id"]], "the rows, row 1"),
        ([{"id": 1}, "id"], "the rows, row 1"),
        ([{"id": 1}, {}], "the rows, column id, row 1"),
        ([{"id": 1}, {"id": 1.5}], "the rows, column id, row 1"),
    ],
)
@pytest.mark.parametrize("names", [["id"], ["id", "other"]])
def test_conversion_error_names_the_invalid_row(rows, where, names):
    given = [row | {"other": 0} if isinstance(row, dict) and row else row for row in rows]
    with pytest.raises(DataError) as caught:
        to_table(given, pa.schema([(name, pa.int64()) for name in names]))
    assert caught.value.parts["where"] == where


def test_text_is_not_a_list_of_characters():
    schema = pa.schema({"tags": pa.list_(pa.string())})
    with pytest.raises(DataError, match="column 'tags' has the invalid value 'red'") as caught:
        to_table([{"tags": ["red"]}, {"tags": "red"}], schema)
    assert caught.value.parts["expected"] == "a list of values, each text"


def test_error_for_other_objects_names_their_type():
    with pytest.raises(DataError, match=r"the rows cannot be read as a table: their type is int\n"):
        to_table(3, pa.schema({"id": pa.int64()}))


SEEN = datetime(2026, 5, 31, 12, 0, 0, 576_000)


@pytest.mark.parametrize("unit", ["ms", "us", "ns"])
@pytest.mark.parametrize("zone", [None, "UTC"])
def test_times_are_text_also_in_lists(unit, zone):
    kind = pa.timestamp(unit, zone)
    columns = pa.schema([("seen", kind), ("times", pa.list_(kind)), ("days", pa.list_(pa.date32()))])
    text = f"{SEEN.isoformat()}{'Z' if zone else ''}"
    row = {"seen": text, "times": [text, None], "days": ["2026-05-31"]}
    found = to_table([row, {"seen": None, "times": [], "days": None}], columns)
    expected = pa.array([SEEN], pa.timestamp("us")).cast(pa.timestamp(unit)).cast(pa.int64())[0].as_py()
    assert found["seen"].cast(pa.int64()).to_pylist() == [expected, None]
    assert found["times"].cast(pa.list_(pa.int64())).to_pylist() == [[expected, None], []]
    assert found["days"].to_pylist() == [[SEEN.date()], None]


@pytest.mark.parametrize(
    "kind,value,expected",
    [
        (pa.timestamp("ms"), 1_780_000_000, "ISO 8601"),
        (pa.timestamp("ms"), 5.5, "ISO 8601"),
        (pa.timestamp("ms"), True, "ISO 8601"),
        (pa.timestamp("ms"), "2026-05-31T12:00:00.1234", "exact to milliseconds"),
        (pa.list_(pa.timestamp("us")), [1_780_000_000], "a list of values, each a time in ISO 8601"),
        (pa.date32(), 5.5, "a time in ISO 8601"),
        (pa.duration("s"), 5.7, "a whole number of seconds"),
        (pa.timestamp("s", "UTC"), "2026-05-31T12:00:00", "ISO 8601 with an offset, such as 2026-05-31T12:00:00Z,"),
        (pa.timestamp("s"), "2026-05-31T12:00:00Z", "ISO 8601 without an offset, such as 2026-05-31T12:00:00,"),
    ],
)
def test_other_forms_of_times_are_refused(kind, value, expected):
    with pytest.raises(DataError, match="column 'seen' has the invalid value") as caught:
        to_table({"seen": value}, pa.schema([("seen", kind)]))
    assert expected in caught.value.parts["expected"]
    assert to_table({"seen": 5}, pa.schema([("seen", pa.duration("s"))]))["seen"].cast(pa.int64()).to_pylist() == [5]


TABLE = {"rows": 50, "dim": 4, "out_of_range": "hash"}
TRAINED = pa.schema(
    [("price", pa.float64()), ("user", pa.int64()), ("brand", pa.string()), ("read", pa.list_(pa.int64()))]
)
SENT = {"price": [0.5], "user": [7], "brand": ["a"], "read": [[3]]}


@pytest.fixture(scope="module")
def reader():
    """Return a reader of a model whose tables hash ids or manage them, so that they accept text and numbers."""
    tables = dict.fromkeys(("brand", "read"), TABLE)
    values = {
        "labels": ["y"],
        "dense": ["price"],
        "sparse": {name: {"table": name} for name in ("user", "brand", "read")},
        "tables": tables | {"user": {"rows": 50, "dim": 4, "ids": "managed"}},
    }
    return RowReader(Schema.parse(values, "x"), (), ("read",), TRAINED)


@pytest.mark.parametrize(
    "column,values,text",
    [
        ("user", ["7"], "column 'user' has type string, but int64 in the training data"),
        ("user", pa.array(["7"]).dictionary_encode(), "has type string, but int64"),
        ("read", [["3"]], "has type list<item: string>, but list<item: int64>"),
        ("brand", [3], "has type int64, but string"),
        ("user", [datetime(2026, 1, 1)], "has type timestamp[us], but int64"),
        ("user", [[7]], "has type list<item: int64>, but int64"),
    ],
)
def test_values_of_another_kind_than_in_training_are_rejected(reader, column, values, text):
    """The ids 5 and '5' have different rows of a table that hashes or manages ids.

    Rows that were accepted before, among them nulls of the same type, do not hide values of another kind.
    """
    table = pa.table(SENT)
    assert len(reader.read(table)) == 1
    for accepted in ({"user": pa.array([7.0])}, {"user": pa.array([None])}, {"read": pa.array([3])}):
        assert len(reader.read(pa.table(SENT | accepted))) == 1
    if column != "read":  # pandas writes missing values of any kind as float
        kind = pa.string() if column == "user" else pa.float64()
        assert len(reader.read(pa.table(SENT | {column: pa.array([None], kind)}))) == 1
    assert len(reader.read(pa.table(SENT | {"read": pa.array([[]], pa.list_(pa.string()))}))) == 1
    with pytest.raises(DataError) as caught:
        reader.read(pa.table(SENT | {column: values}))
    assert text in caught.value.what and caught.value.parts["where"] == f"the rows, column {column}"


def test_kinds_are_compared_after_transforms():
    schema = Schema.parse(
        {"labels": ["y"], "dense": ["zip", "hour"], "sparse": {"code": {"table": "t"}}, "tables": {"t": TABLE}}, "x"
    )
    casts = [DatePart(do="date_part", columns=["seen"], part="hour", into=["hour"])]
    casts += [Cast(do="cast", columns=["zip"], to="float32"), Cast(do="cast", columns=["code"], to="string")]
    trained = pa.schema([("zip", pa.string()), ("code", pa.int64()), ("seen", pa.string())])
    reader = RowReader(schema, casts, (), trained)
    texts = {"zip": ["5"], "code": [7], "seen": ["2026-05-31T12:00:00"]}
    for sent in (texts, {"zip": [5.0], "code": ["7"], "seen": [SEEN]}):
        assert len(reader.read(pa.table(sent))) == 1


def test_ambiguous_column_is_not_called_missing(reader):
    table = pa.table(SENT).append_column("brand", pa.array(["b"]))
    with pytest.raises(DataError, match="exists more than once") as caught:
        reader.read(table)
    assert "add the column" not in (caught.value.do or "")


def test_missing_column_of_a_table_has_advice_for_clients(reader):
    with pytest.raises(DataError, match="column 'brand' is missing") as caught:
        reader.read(pa.table(SENT).drop_columns("brand"))
    assert "folders" not in str(caught.value) and "schema" not in str(caught.value)
    assert caught.value.do.startswith("add the column to each row")
