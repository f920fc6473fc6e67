"""Partition folders (key=value): order and ranges, and several root folders."""

import re
from urllib.parse import quote

import parquet
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raytrec.common.errors import DataError
from raytrec.config.schema import Schema
from raytrec.config.transforms import Cast, FillNull, Hash, LookupVocabulary
from raytrec.data.files.file_identity import fingerprint, identify_files
from raytrec.data.files.listing import list_files
from raytrec.data.files.partitions import NULL_PARTITION_VALUE, build_folder_column
from raytrec.data.fragments import scan
from raytrec.data.item_reader import read_item
from raytrec.data.order import Order
from raytrec.data.read_plans import ReadPlan, ReservedColumnSet

SCHEMA = parquet.tiny_schema()
CAST = Cast(do="cast", columns=["price"], to="float32")
HOURS = [f"date=2026-11-0{day}/hour={hour}" for day in (1, 2, 3) for hour in (2, 9, 10)]


def write_folders(root, names, rows=1):
    """Write a file a=b.parquet in each folder."""
    for name in names:
        (root / name).mkdir(parents=True)
        pq.write_table(parquet.make_tiny_table(rows, 0), root / name / "a=b.parquet")
    return root


@pytest.fixture(scope="module")
def clicks(tmp_path_factory):
    return write_folders(tmp_path_factory.mktemp("lake") / "clicks", HOURS, rows=3)


def list_partitions_between(root, first, last):
    """Return the partitions within a range."""
    files = list_files(str(root), "data.train", (first, last)).files
    return [file.removeprefix(f"{root}/").removesuffix("/a=b.parquet") for file in files]


def test_partitions_are_ordered_by_time(clicks):
    assert list_partitions_between(clicks, None, None) == HOURS, "hour 9 comes before hour 10"
    groups = scan(str(clicks), ReadPlan(SCHEMA)).groups
    assert [group.path.split("hour=")[1][0] for group in groups[:3]] == list("291")


@pytest.mark.parametrize(
    "first,last,expected",
    [
        ("date=2026-11-02", None, HOURS[3:]),
        (None, "date=2026-11-02", HOURS[:6]),
        ("date=2026-11-02", "date=2026-11-02", HOURS[3:6]),
        ("date=2026-11-01/hour=9", "date=2026-11-02/hour=2", HOURS[1:4]),
        ("date=2026-11-01/hour=10", "date=2026-11-02", HOURS[2:6]),
        ("date=2026-11-01/hour=3", "date=2026-11-01/hour=09", HOURS[1:2]),
    ],
)
def test_partition_range_selects_folders(clicks, first, last, expected):
    assert list_partitions_between(clicks, first, last) == expected


@pytest.mark.parametrize(
    "first,last,message",
    [
        ("2026-11-02", None, "'2026-11-02' is not a partition"),
        ("day=2026-11-02", None, r"do not match data.partitions \(day=2026-11-02\)"),
        ("hour=9", None, r"the partition keys of a file \(date=2026-11-01/hour=2\)"),
        ("date=2027-01-01", None, "no file is in a partition between date=2027-01-01 and the last"),
        ("date=2026-11-03", "date=2026-11-01", "no file is in a partition between"),
    ],
)
def test_invalid_partition_ranges_are_rejected(clicks, first, last, message):
    with pytest.raises(DataError, match=message):
        list_partitions_between(clicks, first, last)


def test_partition_range_rejects_unpartitioned_files(clicks, tmp_path):
    parquet.write_split(tmp_path / "plain", 10, 0, files=1)
    with pytest.raises(DataError, match=r"the partition keys of a file \(none\)"):
        list_partitions_between(tmp_path / "plain", "date=2026-11-01", None)


def test_partition_range_rejects_a_single_file(clicks):
    file = clicks / HOURS[0] / "a=b.parquet"
    with pytest.raises(DataError, match="a single file has no partitions") as error:
        list_files(str(file), "data.train", ("date=2026-11-01", None))
    assert error.value.where == f"data.partitions, data.train={file}"


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (["4", "-10", "0", NULL_PARTITION_VALUE], pa.int64()),
        (["04", "4"], pa.string()),
        (["-0", "0"], pa.string()),
        (["+4", "4"], pa.string()),
        (["1_000", "1000"], pa.string()),
        (["٤", "4"], pa.string()),
        (["²", "2"], pa.string()),
        (["9" * 19, "1"], pa.string()),
        (["1.0", "1"], pa.string()),
        (["true", "1"], pa.string()),
        (["", "1"], pa.string()),
        (["a%2Fb", "a b"], pa.string()),
        (["%FF", "%FE"], pa.string()),
    ],
)
def test_distinct_partition_values_stay_distinct(tmp_path, values, kind):
    write_folders(tmp_path, [f"k={value}" for value in values])
    data = scan(str(tmp_path), ReadPlan(SCHEMA, reserved=ReservedColumnSet(("k",))))
    tables = [read_item(item, data.form) for item in Order(1, 1, shuffle="none").items(data, 0, 0, 1)]
    found = [value for table in tables for value in table["reserved.k"].to_pylist()]
    assert data.form.types == {"k": kind} and len(set(found)) == len(values), found
    assert (None in found) == (NULL_PARTITION_VALUE in values)


def test_numeric_partition_values_are_sorted_as_numbers(tmp_path):
    write_folders(tmp_path, ["k=-2", "k=4", "k=04", "k=10", "k=²"])
    assert list_partitions_between(tmp_path, None, None) == ["k=-2", "k=04", "k=4", "k=10", "k=²"]
    assert len(list_partitions_between(tmp_path, "k=4", "k=04")) == 2


def test_partition_bounds_can_be_encoded_or_decoded(tmp_path):
    write_folders(tmp_path, [f"at=day%20{hour}" for hour in (1, 2, 3)])
    for first in ("at=day 2", "at=day%202"):
        assert list_partitions_between(tmp_path, first, None) == ["at=day%202", "at=day%203"]


def test_several_folders_keep_their_order(clicks):
    late, early = (str(clicks / HOURS[i]) for i in (4, 0))
    data = scan([late, early], ReadPlan(SCHEMA))
    assert [group.path.split("clicks/")[1][:23] for group in data.groups] == [
        "date=2026-11-02/hour=9/",
        "date=2026-11-01/hour=2/",
    ]
    assert data.rows == 6
    with pytest.raises(DataError, match=r"1 file would be read more than once"):
        scan([str(clicks), late], ReadPlan(SCHEMA), "data.train")
    with pytest.raises(DataError, match="the path does not exist"):
        scan([late, str(clicks / "gone")], ReadPlan(SCHEMA), "data.train")


def write_partitioned(root, key, values, **columns):
    """Write files like Spark's partitionBy: the column exists only in the path."""
    for number, value in enumerate(values):
        table = parquet.make_tiny_table(4, 4 * number)
        for name, made in columns.items():
            table = table.append_column(name, made)
        (root / f"{key}={value}").mkdir(parents=True)
        pq.write_table(table.drop_columns([key]), root / f"{key}={value}/part-0.parquet")
    return root


def read_all_rows(data):
    return pa.concat_tables(read_item(item, data.form) for item in Order(99, 1, shuffle="none").items(data, 0, 0, 1))


def test_label_can_come_from_the_path(tmp_path):
    data = scan(str(write_partitioned(tmp_path, "label", [0, 1])), ReadPlan(SCHEMA))
    assert read_all_rows(data)["labels"].to_pylist() == [[0.0]] * 4 + [[1.0]] * 4
    (tmp_path / "label=2").mkdir()
    pq.write_table(parquet.make_tiny_table(1, 0).drop_columns(["label"]), tmp_path / "label=2/a.parquet")
    with pytest.raises(DataError, match=r"label 'label' is 2"):
        read_all_rows(scan(str(tmp_path), ReadPlan(SCHEMA)))


def test_features_and_transform_inputs_can_come_from_the_path(tmp_path):
    data = scan(str(write_partitioned(tmp_path / "a", "user", [7, 3])), ReadPlan(SCHEMA))
    assert {row[0] for row in read_all_rows(data)["ids"].to_pylist()[:4]} == {3}
    data = scan(str(write_partitioned(tmp_path / "b", "price", ["1.5", "-2"])), ReadPlan(SCHEMA, (CAST,)))
    assert read_all_rows(data)["dense"].to_pylist()[::4] == [[-2.0], [1.5]]
    with pytest.raises(DataError, match=r"dense column 'price' has type string[\s\S]*cast"):
        scan(str(tmp_path / "b"), ReadPlan(SCHEMA))


def test_ids_from_the_path_are_hashed_as_text(tmp_path):
    schema = parquet.tiny_schema(tables={"user": {"rows": 40, "dim": 8, "out_of_range": "hash"}})
    first = scan(str(write_partitioned(tmp_path / "a", "user", ["4", "5"])), ReadPlan(schema))
    second = scan(str(write_partitioned(tmp_path / "b", "user", ["4", "05"])), ReadPlan(schema))
    found = [read_all_rows(data)["ids"].to_pylist() for data in (first, second)]
    assert found[0][:4] == found[1][:4] and found[0][4:] != found[1][4:]


@pytest.mark.parametrize("do", ["hash", "lookup_vocabulary"])
def test_hashed_and_looked_up_folder_keys_are_of_one_kind(tmp_path, do):
    (tmp_path / "words.txt").write_text("4\n05\n")
    transform = (
        Hash(do="hash", columns=["user"], rows=40, into=["member"])
        if do == "hash"
        else LookupVocabulary(do=do, columns=["user"], vocabulary=str(tmp_path / "words.txt"), into=["member"])
    )
    sparse, tables = {"member": {"table": "member"}}, {"member": {"rows": 40, "dim": 8}}
    schema = Schema.parse({"labels": ["label"], "sparse": sparse, "tables": tables}, "schema")
    numbers, words = ("4", "5"), ("4", "05")
    for number, (first, second) in enumerate(((numbers, words), (words, numbers))):
        trained = scan(str(write_partitioned(tmp_path / f"{number}a", "user", first)), ReadPlan(schema, (transform,)))
        other = str(write_partitioned(tmp_path / f"{number}b", "user", second))
        with pytest.raises(
            DataError, match=r"column 'user', are (text|numbers), but (text|numbers) in the training data"
        ):
            scan(other, ReadPlan(schema, (transform,)), trained=trained.text_ids)
        assert scan(str(tmp_path / f"{number}a"), ReadPlan(schema, (transform,)), trained=trained.text_ids)
    plan = ReadPlan(schema, (Cast(do="cast", columns=["user"], to="string"), transform))
    found = [read_all_rows(scan(str(tmp_path / name), plan))["ids"].to_pylist() for name in ("0a", "0b")]
    assert found[0][:4] == found[1][:4] and found[0][4:] != found[1][4:]


@pytest.mark.parametrize("into", [["member"], None])
def test_cast_before_a_hash_accepts_folder_keys_of_any_kind(tmp_path, into):
    name = into[0] if into else "user"
    tables = {"member": {"rows": 40, "dim": 8}}
    schema = Schema.parse({"labels": ["label"], "sparse": {name: {"table": "member"}}, "tables": tables}, "schema")
    hashing = Hash(do="hash", columns=["user"], rows=40, into=into)
    plan = ReadPlan(schema, (Cast(do="cast", columns=["user"], to="string"), hashing))
    first = scan(str(write_partitioned(tmp_path / "a", "user", ["4", "5"])), plan)
    second = scan(str(write_partitioned(tmp_path / "b", "user", ["4", "05"])), plan, trained=first.text_ids)
    rows = [read_all_rows(data)["ids"].to_pylist()[0] for data in (first, second)]
    assert rows[0] == rows[1]
    filled = ReadPlan(schema, (FillNull(do="fill_null", columns=["user"], value="4"), hashing))
    words = scan(str(write_partitioned(tmp_path / "c", "user", ["4", "ab"])), filled)
    filled = ReadPlan(schema, (FillNull(do="fill_null", columns=["user"], value=4), hashing))
    with pytest.raises(DataError, match="are numbers, but text in the training data"):
        scan(str(tmp_path / "a"), filled, trained=words.text_ids)


@pytest.mark.parametrize("into", [["member"], None])
def test_empty_columns_and_null_partitions_have_no_kind(tmp_path, into):
    name = into[0] if into else "user"
    tables = {"member": {"rows": 40, "dim": 8}}
    schema = Schema.parse({"labels": ["label"], "sparse": {name: {"table": "member"}}, "tables": tables}, "schema")
    plan = ReadPlan(schema, (Hash(do="hash", columns=["user"], rows=40, into=into),))
    words = scan(str(write_partitioned(tmp_path / "words", "user", ["ab", "cd"])), plan)
    assert scan(str(write_partitioned(tmp_path / "null", "user", [NULL_PARTITION_VALUE])), plan, trained=words.text_ids)
    table = parquet.make_tiny_table(3, 0)
    (tmp_path / "nulls").mkdir()
    place = table.schema.get_field_index("user")
    pq.write_table(table.set_column(place, "user", pa.nulls(3, pa.int64())), tmp_path / "nulls/a.parquet")
    assert scan(str(tmp_path / "nulls"), plan, trained=words.text_ids)


def test_hashed_columns_of_files_are_of_one_kind(tmp_path):
    sparse, tables = {"member": {"table": "member"}}, {"member": {"rows": 40, "dim": 8}}
    schema = Schema.parse({"labels": ["label"], "sparse": sparse, "tables": tables}, "schema")
    plan = ReadPlan(schema, (Hash(do="hash", columns=["user"], rows=40, into=["member"]),))
    table, users = parquet.make_tiny_table(1, 0), pa.array(["5"])
    for name, each in (("numbers", table), ("text", table.drop_columns(["user"]).append_column("user", users))):
        (tmp_path / name).mkdir()
        pq.write_table(each, tmp_path / name / "a.parquet")
    trained = scan(str(tmp_path / "numbers"), plan)
    with pytest.raises(DataError, match="column 'user', are text, but numbers in the training data"):
        scan(str(tmp_path / "text"), plan, trained=trained.text_ids)


@pytest.mark.parametrize(
    "value, kind",
    [
        ("04", pa.int64()),
        ("-0", pa.int64()),
        ("9" * 20, pa.int64()),
        ("abc", pa.int64()),
        ("300", pa.int8()),
        ("x", pa.float64()),
        ("2026", pa.date32()),
    ],
)
def test_unsuitable_folder_values_are_rejected(value, kind):
    with pytest.raises(DataError, match=re.escape(f"value '{value}' of the folder key 'k' is not of type {kind}")):
        build_folder_column(f"lake/k={value}/a.parquet", "k", kind, 2)


def test_constant_label_from_the_path_is_noticed(tmp_path):
    schema = ReadPlan(SCHEMA)
    assert scan(str(write_partitioned(tmp_path / "a", "label", [1])), schema).constant_labels == {"label": 1.0}
    assert scan(str(write_partitioned(tmp_path / "b", "label", [0, 1])), schema).constant_labels == {}


@pytest.mark.parametrize("query", ["", "?region=eu/day=9"])
def test_files_of_a_uri_are_read_with_its_query_and_special_characters(tmp_path, query):
    write_folders(tmp_path / "a b", ["at=10%3A00 #1?", "at=é"], rows=2)
    plan = ReadPlan(SCHEMA, reserved=ReservedColumnSet(("at",)))
    data = scan(f"file://{quote(str(tmp_path / 'a b'))}{query}", plan)
    assert all(group.path.endswith(f"/a=b.parquet{query}") for group in data.groups)
    assert set(read_all_rows(data)["reserved.at"].to_pylist()) == {"10:00 #1?", "é"}
    local = scan(str(tmp_path / "a b"), plan)
    assert fingerprint(identify_files(data)) == fingerprint(identify_files(local))
    with pytest.raises(DataError, match="2 files would be read more than once"):
        scan([data.uri, f"file://{quote(str(tmp_path / 'a b'))}"], plan)


def test_swapped_label_folders_change_the_fingerprint(tmp_path):
    data = scan(str(write_partitioned(tmp_path, "label", [0, 1])), ReadPlan(SCHEMA))
    before = identify_files(data)
    for old, new in (("label=0", "x"), ("label=1", "label=0"), ("x", "label=1")):
        (tmp_path / old).rename(tmp_path / new)
    assert fingerprint(identify_files(scan(str(tmp_path), ReadPlan(SCHEMA)))) != fingerprint(before)


def test_missing_column_error_mentions_partition_folders(tmp_path):
    write_partitioned(tmp_path, "label", [0, 1])
    (tmp_path / "label=0").rename(tmp_path / "labels=0")
    with pytest.raises(DataError, match=r"column 'label' is missing[\s\S]*or folders label=VALUE"):
        scan(str(tmp_path), ReadPlan(SCHEMA))
