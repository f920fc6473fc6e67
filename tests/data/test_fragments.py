"""Scanning of folders and footers, the message for each mistake, and the hold-out split."""

import base64
import tracemalloc

import numpy as np
import parquet
import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as encryption
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reading import make_schema

from raytrec.common.errors import DataError
from raytrec.config.run_config import load_config
from raytrec.config.schema import Schema
from raytrec.config.transforms import Clip, FillNull
from raytrec.data.files import footers
from raytrec.data.files.listing import list_files
from raytrec.data.fragments import Dataset, RowGroup, scan
from raytrec.data.item_reader import check_suspect_groups, read_item
from raytrec.data.order import Order
from raytrec.data.read_plans import ReadPlan
from raytrec.driver.datasets import open_data
from raytrec.exporting.compare import select_golden_rows

SCHEMA = Schema.parse(
    {
        "labels": ["label"],
        "dense": ["price"],
        "sparse": {
            "user": {"table": "user"},
            "tags": {"table": "tag", "weights": "tag_weights"},
            "word": {"table": "word"},
        },
        "tables": {
            "user": {"rows": 10, "dim": 4},
            "tag": {"rows": 10, "dim": 4},
            "word": {"rows": 10, "dim": 4, "out_of_range": "hash"},
        },
    },
    "test",
)
GOOD = {
    "label": [0, 1],
    "price": [0.5, 1.5],
    "user": [1, 2],
    "tags": [[1], [2, 3]],
    "tag_weights": [[0.5], [1.0, 2.0]],
    "word": ["a", "b"],
}


def write(path, **columns):
    values = {**GOOD, **columns}
    pq.write_table(pa.table({k: v for k, v in values.items() if v is not None}), path)


def check_scan_fails(folder, *parts):
    with pytest.raises(DataError) as error:
        scan(str(folder), ReadPlan(SCHEMA), "data.train")
    for part in parts:
        assert str(part) in str(error.value), str(error.value)


def test_scan_sorts_files_and_omits_empty_ones(tmp_path):
    parquet.write_split(tmp_path / "b", 1000, 0, row_group=300, files=2)
    parquet.write_split(tmp_path / "a", 100, 0, files=1)
    pq.write_table(parquet.make_tiny_table(5, 0).slice(0, 0), tmp_path / "a/part-9.parquet")
    data = scan(str(tmp_path), ReadPlan(parquet.tiny_schema()))
    assert [(g.path.removeprefix(f"{tmp_path}/"), g.index, g.rows) for g in data.groups] == [
        ("a/part-0.parquet", 0, 100),
        ("b/part-0.parquet", 0, 300),
        ("b/part-0.parquet", 1, 200),
        ("b/part-1.parquet", 0, 300),
        ("b/part-1.parquet", 1, 200),
    ]
    assert scan(str(tmp_path / "b/part-1.parquet"), ReadPlan(parquet.tiny_schema())).rows == 500


def test_scan_rejects_missing_and_empty_folders(tmp_path):
    check_scan_fails(tmp_path / "none", "the path does not exist", "data.train=")
    check_scan_fails(tmp_path, "no Parquet files", tmp_path)
    pq.write_table(pa.table(GOOD).slice(0, 0), tmp_path / "a.parquet")
    check_scan_fails(tmp_path, "the dataset has no rows")


@pytest.mark.parametrize("name", ["part-*", "part-?.parquet", "{a,b}", "part-[0-9]"])
def test_globs_are_not_expanded(tmp_path, name):
    with pytest.raises(DataError, match="globs are not expanded") as error:
        list_files(f"{tmp_path}/{name}", "data.train")
    assert "list several as [a, b]" in error.value.do
    (tmp_path / name).mkdir()
    with pytest.raises(DataError, match="contains no Parquet files"):
        list_files(f"{tmp_path}/{name}", "data.train")


def test_scan_reports_a_truncated_file(tmp_path):
    for i in range(3):
        write(tmp_path / f"part-{i}.parquet")
    path = tmp_path / "part-1.parquet"
    path.write_bytes(path.read_bytes()[:-20])
    check_scan_fails(tmp_path, "cannot read the file as Parquet", "part-1.parquet")
    path.write_bytes(b"")
    check_scan_fails(tmp_path, "cannot read the file as Parquet", "part-1.parquet")


def test_scan_does_not_call_an_unreadable_file_incomplete(tmp_path, monkeypatch):
    write(tmp_path / "a.parquet")

    def fail(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(footers.pq, "read_metadata", fail)
    with pytest.raises(DataError, match=r"cannot read the file: .*Permission denied") as error:
        scan(str(tmp_path), ReadPlan(SCHEMA), "data.train")
    assert error.value.expected == "a readable file"


class PlaintextKmsClient(encryption.KmsClient):
    """A KMS client that leaves keys unencrypted."""

    def __init__(self):
        super().__init__()

    def wrap_key(self, key, name):
        return base64.b64encode(key)


@pytest.mark.parametrize("plaintext_footer", [True, False])
def test_scan_rejects_encrypted_files(tmp_path, plaintext_footer):
    """The file is large enough that all column metadata would be read, where pyarrow aborts the process."""
    how = encryption.EncryptionConfiguration(
        footer_key="f", column_keys={"c": ["user"]}, plaintext_footer=plaintext_footer
    )
    keys = encryption.CryptoFactory(lambda _: PlaintextKmsClient())
    table = pa.table({"label": [0] * 70_000, "user": [1] * 70_000})
    with pq.ParquetWriter(
        tmp_path / "a.parquet",
        table.schema,
        encryption_properties=keys.file_encryption_properties(encryption.KmsConnectionConfig(), how),
    ) as out:
        out.write_table(table)
    what = "some columns of the file are" if plaintext_footer else "the footer is"
    check_scan_fails(tmp_path, f"{what} encrypted", "a.parquet", "without encryption")


@pytest.mark.parametrize(
    "columns,expected_text",
    [
        ({"price": None, "prize": [1.0, 2.0]}, "column 'price' is missing"),
        ({"price": None, "prize": [1.0, 2.0]}, "did you mean 'prize'"),
        ({"price": ["a", "b"]}, "dense column 'price' has type string"),
        ({"price": [[1.0], [2.0]]}, "dense column 'price' has type list"),
        ({"label": [[1], [0]]}, "label 'label' has type list"),
        ({"user": [True, False]}, "sparse feature 'user' has values of type bool"),
        ({"user": ["a", "b"]}, "tables.user.out_of_range to hash"),
        ({"tags": [[1.5], [2.0, 3.0]]}, "sparse feature 'tags' has values of type double"),
        ({"tag_weights": [1.0, 2.0]}, "weights column 'tag_weights' of 'tags' has type double"),
    ],
)
def test_scan_rejects_missing_and_mistyped_columns(tmp_path, columns, expected_text):
    write(tmp_path / "a.parquet")
    assert scan(str(tmp_path), ReadPlan(SCHEMA)).rows == 2
    write(tmp_path / "b.parquet", **columns)
    check_scan_fails(tmp_path, expected_text, "b.parquet")


@pytest.mark.parametrize("rows", [2**50, 2**31, 2**20, -1])
@pytest.mark.parametrize("values_too", [True, False], ids=["rows and values", "rows only"])
def test_impossible_row_counts_are_rejected(tmp_path, rows, values_too):
    """An impossible row count raises an error before memory for the rows is allocated."""
    path = tmp_path / "a.parquet"
    write(path)
    falsify_row_counts(path, rows, values_too)
    tracemalloc.start()
    try:
        if values_too and rows == 2**20:  # plausible for its pages: detected by the read
            data = scan(str(tmp_path), ReadPlan(SCHEMA))
            with pytest.raises(DataError, match=r"a\.parquet, row group 0"):
                read_item(Order(2048, 24).items(data, 0, 0, 1)[-1], data.form)
        else:
            check_scan_fails(tmp_path, "a.parquet", "the footer claims")
        assert tracemalloc.get_traced_memory()[1] < 50 << 20
    finally:
        tracemalloc.stop()


def falsify_row_counts(path, rows, values_too):
    """Change the row counts (and the value counts of flat columns) in the footer of a file."""
    raw = path.read_bytes()
    size = int.from_bytes(raw[-8:-4], "little")
    body, footer = raw[: -8 - size], raw[-8 - size : -8]
    old, new = b"\x16" + encode_zigzag(len(GOOD["label"])), b"\x16" + encode_zigzag(rows)
    if values_too:
        footer = footer.replace(old, new)
    else:
        first, last = footer.index(old), footer.rindex(old)  # counts of the file and of the row group
        footer = footer[:first] + new + footer[first + len(old) : last] + new + footer[last + len(old) :]
    path.write_bytes(body + footer + len(footer).to_bytes(4, "little") + b"PAR1")


def encode_zigzag(number):
    """Encode a number as in Thrift's compact protocol."""
    number, out = (number << 1) ^ (number >> 63), b""
    while number > 127:
        out, number = out + bytes([number & 127 | 128]), number >> 7
    return out + bytes([number])


def scan_changed_rows(folder, changes, schema=None, skip=False, **options):
    """Write row groups of 300 and 150 rows with (column, row, value) changes and scan the folder."""
    whole = parquet.make_tiny_table(450, 0)
    rows = whole.to_pylist()
    for column, row, value in changes:
        rows[row][column] = value
    pq.write_table(pa.Table.from_pylist(rows, whole.schema), folder / "a.parquet", row_group_size=300)
    return scan(str(folder), ReadPlan(schema or parquet.tiny_schema(), **options), skip=skip)


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("user", 40, "id 40 of feature 'user'"),
        ("user", -1, "id -1 of feature 'user'"),
        ("tags", [3, 99], "id 99 of feature 'tags'"),
        ("label", 7, "label 'label' is 7"),
        ("price", None, "column 'price' contains a null"),
    ],
)
def test_footer_statistics_reveal_invalid_values(tmp_path, column, value, message):
    dataset = scan_changed_rows(tmp_path, [(column, 310, value)])
    assert [group.index for group in dataset.suspect_groups] == [1]
    with pytest.raises(DataError, match=message) as error:
        check_suspect_groups(dataset)
    assert "a.parquet, row group 1" in error.value.where and "row 10" in error.value.where


@pytest.mark.slow
def test_values_with_a_policy_or_transform_are_not_suspect(tmp_path):
    """Values that a table accepts, a transform repairs or the policy skips do not stop the run."""
    changes = [("user", 310, 40), ("price", 5, None)]
    assert scan_changed_rows(tmp_path, []).suspect_groups == ()
    assert len(scan_changed_rows(tmp_path, changes).suspect_groups) == 2
    assert scan_changed_rows(tmp_path, changes, skip=True).suspect_groups == ()
    mend = FillNull(do="fill_null", columns=["price"], value=0)
    hashing = parquet.tiny_schema(tables={"user": {"rows": 40, "dim": 8, "out_of_range": "hash"}})
    assert scan_changed_rows(tmp_path, changes, hashing, transforms=(mend,)).suspect_groups == ()
    clip = Clip(do="clip", columns=["user"], low=0, high=39)
    assert scan_changed_rows(tmp_path, changes, transforms=(mend, clip)).suspect_groups == ()


HASHED = make_schema(["item"], 9, out_of_range="hash")


def write_items(path, ids, kind=None):
    """Write a file with two rows, or none if there are no ids."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"y": pa.array([0, 1][: len(ids)], pa.int64()), "item": pa.array(ids, kind)}), path)


@pytest.mark.parametrize("first,second", [([5, 6], ["5", "6"]), (["5", "6"], [5.0, None]), ([[5], []], [["5"], None])])
def test_text_and_numbers_are_not_ids_of_the_same_feature(tmp_path, first, second):
    """The ids 5 and '5' have different rows of a table that hashes ids."""
    for name in ("b", "c"):
        write_items(tmp_path / f"{name}.parquet", first)
    write_items(tmp_path / "nulls.parquet", [None, None])
    assert scan(str(tmp_path), ReadPlan(HASHED)).rows == 6
    write_items(tmp_path / "a.parquet", second)
    with pytest.raises(DataError, match=r"the ids of feature 'item' are \w+, but \w+ in other files") as error:
        scan(str(tmp_path), ReadPlan(HASHED))
    assert error.value.where == f"{tmp_path}/a.parquet", "the kind with the most rows is right"
    kept = scan(str(tmp_path), ReadPlan(HASHED), skip=True)
    assert kept.rows == 6 and len(kept.left_out) == 1


@pytest.mark.parametrize("ids", [[None, None], []])
def test_files_without_ids_have_ids_of_any_kind(tmp_path, ids):
    """pandas writes missing text as float."""
    write_items(tmp_path / "a.parquet", ids, pa.float64())
    write_items(tmp_path / "b.parquet", ["5", "6"])
    for skip in (False, True):
        data = scan(str(tmp_path), ReadPlan(HASHED), skip=skip)
        assert data.rows == 2 + len(ids) and data.text_ids == {"item": True} and not data.left_out


def test_export_names_columns_whose_types_differ(tmp_path):
    write_items(tmp_path / "a.parquet", [None, None], pa.float64())
    write_items(tmp_path / "b.parquet", ["5", "6"])
    with pytest.raises(DataError, match=r"columns have different types: .*item has incompatible types"):
        select_golden_rows(scan(str(tmp_path), ReadPlan(HASHED)), 4)


def test_ids_in_folder_names_are_text_for_tables_that_hash(tmp_path):
    write_items(tmp_path / "item=5" / "a.parquet", [5, 5])
    (tmp_path / "item=6").mkdir()
    pq.write_table(pa.table({"y": [0, 1]}), tmp_path / "item=6" / "a.parquet")
    data = scan(str(tmp_path), ReadPlan(HASHED))
    assert data.rows == 4 and data.form.from_folders == {"item"} and data.text_ids == {"item": True}


def test_validation_data_has_the_same_kind_of_ids_as_training_data(tmp_path):
    write_items(tmp_path / "train" / "a.parquet", [5, 6])
    write_items(tmp_path / "valid" / "a.parquet", ["5", "6"])
    write_items(tmp_path / "valid" / "b.parquet", [5, 6])
    (tmp_path / "schema.yaml").write_text(HASHED.to_yaml())
    values = {"train": f"{tmp_path}/train", "valid": f"{tmp_path}/valid", "schema": f"{tmp_path}/schema.yaml"}
    with pytest.raises(DataError, match="the ids of feature 'item' are text, but numbers in the training data"):
        open_data(load_config({"data": values}))
    _, datasets = open_data(load_config({"data": values | {"on_error": "skip"}}))
    assert datasets["valid"].rows == 2 and len(datasets["valid"].left_out) == 1


@given(sizes=st.lists(st.integers(1, 200), min_size=1, max_size=6), every=st.integers(2, 20))
@settings(max_examples=100, deadline=None)
def test_each_row_is_either_trained_or_held_out(sizes, every):
    whole = Dataset("d", tuple(RowGroup("f", i, rows) for i, rows in enumerate(sizes)), form=None)
    kept, held = whole.hold_out(every)
    assert (held.rows if held else 0) == sum(rows // every for rows in sizes)
    assert kept.rows + (held.rows if held else 0) == whole.rows
    for index, rows in enumerate(sizes):
        parts = [g.split.rows() for side in (kept, held) if side for g in side.groups if g.index == index and g.split]
        if parts:
            assert sorted(np.concatenate(parts)) == list(range(rows))


def test_held_out_rows_are_not_periodic():
    _, held = Dataset("d", (RowGroup("f", 0, 10_000),), form=None).hold_out(10)
    counts = np.bincount(held.groups[0].split.rows() % 10, minlength=10)
    assert counts.min() > 60 and counts.max() < 140
