"""Columns that predictions take over from input files, transforms and partition folders."""

import datetime
import decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raytrec.common.errors import DataError
from raytrec.config.features import resolve_input_columns, select_needed_transforms
from raytrec.config.run_config import load_config
from raytrec.data.order import Part
from raytrec.prediction.inputs import CarriedColumns

ROWS = 5
TABLE = pa.table(
    {
        "id": pa.array(range(ROWS), pa.int64()),
        "text": pa.array(["a", None, "c", "d", "e"]),
        "city": pa.array(["x", "y", "x", "x", "y"]).dictionary_encode(),
        "when": pa.array([datetime.datetime(2026, 11, 7, h) for h in range(ROWS)], pa.timestamp("us", "UTC")),
        "price": pa.array([decimal.Decimal(f"{i}.25") for i in range(ROWS)], pa.decimal128(9, 2)),
        "list": pa.array([[1, 2], [], None, [3], [4]]),
        "user": pa.array([{"id": i, "age": 20 + i} for i in range(ROWS)]),
    }
)


@pytest.fixture
def file(tmp_path):
    (tmp_path / "day=7").mkdir()
    path = tmp_path / "day=7" / "a.parquet"
    pq.write_table(TABLE, path, row_group_size=3)
    return str(path)


def load_transforms(*settings):
    return tuple(load_config({"data": {"train": "x", "transforms": list(settings)}}).data.transforms)


def test_carried_columns_keep_values_and_types(file):
    names = ("price", "list", "text", "when", "user.age", "city")
    carried = CarriedColumns(names)
    read = [carried.read(part) for part in (Part(file, 0, 1, 2), Part(file, 1, 0, 2))]
    found = pa.concat_tables(read)
    assert found.schema == carried.schema(file) and found.column_names == list(names)
    assert found["price"].equals(TABLE["price"].slice(1)) and found["when"].equals(TABLE["when"].slice(1))
    assert found["list"].to_pylist() == [[], None, [3], [4]] and found["text"].null_count == 1
    assert found["user.age"].to_pylist() == [21, 22, 23, 24]
    assert found["city"].to_pylist() == ["y", "x", "x", "y"] and found["city"].type == pa.string()
    assert CarriedColumns(()).schema(file) == pa.schema([])


def test_carried_columns_prefer_file_values_over_transforms(file):
    made = load_transforms(
        {"do": "hash", "columns": ["text"], "rows": 9},
        {"do": "date_part", "columns": ["when"], "part": "hour", "into": ["hour"]},
    )
    carried = CarriedColumns(("text", "hour", "day"), made, {"day": pa.int64()})
    found = carried.read(Part(file, 0, 0, 3))
    assert found.to_pydict() == {"text": ["a", None, "c"], "hour": [0, 1, 2], "day": [7, 7, 7]}
    assert carried.schema(file).types == [pa.string(), pa.int64(), pa.int64()]


def test_transforms_can_read_partition_columns(file):
    made = load_transforms(
        {"do": "cast", "columns": ["day"], "to": "string"},
        {"do": "hash", "columns": ["day"], "rows": 9, "into": ["hashed"]},
    )
    found = CarriedColumns(("day", "hashed", "id"), made, {"day": pa.int64()}).read(Part(file, 0, 0, 3))
    assert found["day"].to_pylist() == [7, 7, 7] and found["id"].to_pylist() == [0, 1, 2]
    assert len(set(found["hashed"].to_pylist())) == 1


def test_missing_carried_column_suggests_a_similar_name(file):
    with pytest.raises(DataError, match="column 'txet' does not exist in the input; did you mean 'text'"):
        CarriedColumns(("id", "txet")).schema(file)


def test_transforms_that_only_make_labels_are_skipped():
    given = load_transforms(
        {"do": "fill_null", "columns": ["rating", "price"], "value": 0},
        {"do": "binarize", "columns": ["rating"], "at_least": 4, "into": ["label"]},
        {"do": "log", "columns": ["price"]},
        {"do": "age", "columns": ["joined"], "until_column": "seen_at", "into": ["days"]},
    )
    needed = select_needed_transforms(given, ["price", "days", "user"])
    assert [(t.do, t.columns, t.writes) for t in needed] == [
        ("fill_null", ["price"], ["price"]),
        ("log", ["price"], ["price"]),
        ("age", ["joined"], ["days"]),
    ]
    assert sorted(resolve_input_columns(needed, ["price", "days", "user"])) == ["joined", "price", "seen_at", "user"]
    assert needed[1] is given[2] and given[0].columns == ["rating", "price"]
    assert select_needed_transforms(given, ["label", "price"])[:2] == given[:2]
    mine = load_transforms({"do": "os:getcwd", "reads": ["rating"], "writes": ["label"]})
    assert select_needed_transforms(mine, ["price"]) == () and select_needed_transforms(mine, ["label"]) == mine


def test_ambiguous_and_incomplete_carried_columns_are_reported(file):
    repeated = TABLE.select(["id", "text"]).append_column("text", TABLE["city"])
    pq.write_table(repeated, file)
    with pytest.raises(DataError, match="column text exists more than once") as error:
        CarriedColumns(("id", "text")).schema(file)
    assert error.value.where == file and "--columns" in error.value.do
    made = load_transforms({"do": "hash", "columns": ["price"], "rows": 9, "into": ["hashed"]})
    with pytest.raises(DataError, match="column price does not exist"):
        CarriedColumns(("id", "hashed"), made).schema(file)
