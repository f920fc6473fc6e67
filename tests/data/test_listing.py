"""Every entry of a folder is read, or skipped for a stated reason."""

import os
from pathlib import Path

import parquet
import pyarrow.parquet as pq
import pytest

from raytrec.common.errors import DataError
from raytrec.data.files.listing import REASON_UNREADABLE, list_files, locate_file


def write_files(folder, *names, rows=3):
    for number, name in enumerate(names):
        path = Path(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(parquet.make_tiny_table(rows, number), path)


def write_marker(path):
    path.parent.mkdir(parents=True)
    path.write_text("{}")


def list_folder(folder):
    found, below = list_files(str(folder), "data.train"), f"{folder}/"
    left_out = {why: [p.removeprefix(below) for p in paths] for why, paths in found.left_out.items()}
    return [path.removeprefix(below) for path in found.files], left_out


def test_parquet_files_are_detected_by_content(tmp_path):
    """Use file names as written by Athena, BigQuery and Hive."""
    names = ["000000000000", "20261126_0001_x", "a.parquet", "b.PARQUET", "c.parq", "d/part-0.snappy"]
    write_files(tmp_path, *names)
    assert list_folder(tmp_path) == (names, {})


def test_skipped_entries_have_a_reason(tmp_path):
    write_files(tmp_path, "a.parquet", "_temporary/0/b.parquet", ".hidden.parquet", "_day=1/c.parquet", "d.parquet.tmp")
    write_files(tmp_path, "e.parquet~", "f.csv.gz", "growing")
    (tmp_path / "growing").write_bytes((tmp_path / "growing").read_bytes()[:-9])
    for name, text in {"_SUCCESS": "", "empty": "", "notes.txt": "PAR", "f.csv.gz": "a,b"}.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "nothing").symlink_to("gone")
    files, left_out = list_folder(tmp_path)
    assert files == ["_day=1/c.parquet", "a.parquet"]
    assert left_out == {
        "hidden": [".hidden.parquet", "_SUCCESS", "_temporary"],
        "empty": ["empty"],
        "temporary or backup": ["d.parquet.tmp", "e.parquet~"],
        REASON_UNREADABLE: ["nothing"],
        "not Parquet": ["f.csv.gz", "notes.txt"],
        "cut off or still being written": ["growing"],
    }
    text = str(list_files(str(tmp_path), "data.train"))
    assert text.startswith("2 Parquet files; left out: 3 hidden (.hidden.parquet), "), text
    assert list_files(str(tmp_path), "data.train").record()["counts"]["hidden"] == 3


def test_files_reached_twice_are_read_once(tmp_path):
    write_files(tmp_path, "day=1/a.parquet", "day=2/a.parquet", "../elsewhere/b.parquet")
    (tmp_path / "day=0").symlink_to("day=2")
    (tmp_path / "latest").symlink_to("day=2")
    (tmp_path / "day=1/up").symlink_to("..")  # a loop
    (tmp_path / "day=3").symlink_to("../elsewhere")
    os.link(tmp_path / "day=1/a.parquet", tmp_path / "day=1/copy.parquet")
    files, left_out = list_folder(tmp_path)
    assert files == ["day=1/a.parquet", "day=2/a.parquet", "day=3/b.parquet"]
    assert left_out == {"reached twice": ["day=0", "day=1/copy.parquet", "day=1/up", "latest"]}


def test_hard_links_in_two_partitions_are_separate_files(tmp_path):
    write_files(tmp_path, "day=1/a.parquet")
    (tmp_path / "day=2").mkdir()
    os.link(tmp_path / "day=1/a.parquet", tmp_path / "day=2/a.parquet")
    assert list_folder(tmp_path) == (["day=1/a.parquet", "day=2/a.parquet"], {})


def test_folder_listed_under_two_names_is_rejected(tmp_path):
    write_files(tmp_path, "a/x.parquet")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(DataError, match=r"1 file would be read more than once"):
        list_files([str(tmp_path / "a"), str(tmp_path / "b")], "data.train")


def test_error_for_folder_without_parquet_lists_its_files(tmp_path):
    (tmp_path / "x.csv").write_text("a,b")
    with pytest.raises(DataError, match=r"contains no Parquet files[\s\S]*1 not Parquet \(x.csv\)"):
        list_files(str(tmp_path), "data.train")


@pytest.mark.parametrize(
    ("marker", "name"),
    [
        ("_delta_log/00000000000000000000.json", "Delta Lake"),
        ("metadata/00001-4be.metadata.json", "Iceberg"),
        ("metadata/v2.gz.metadata.json", "Iceberg"),
        (".hoodie/hoodie.properties", "Hudi"),
        ("snapshot/snapshot-1", "Paimon"),
        ("_spark_metadata/0", "Spark stream"),
    ],
)
@pytest.mark.parametrize("place", ["table", "table/data/day=1", "table/data/day=1/a.parquet", "."])
def test_table_format_folders_are_rejected(tmp_path, marker, name, place):
    write_files(tmp_path, "table/data/day=1/a.parquet", "plain/b.parquet")
    write_marker(tmp_path / "table" / marker)
    with pytest.raises(DataError, match=name) as error:
        list_files(str(tmp_path / place), "data.train")
    assert f"{tmp_path}/table" in error.value.where and "write the current rows" in error.value.do
    assert list_folder(tmp_path / "plain") == (["b.parquet"], {})


@pytest.mark.parametrize("target", ["table/day=1", "table/day=1/a.parquet"])
@pytest.mark.parametrize("marker", ["_delta_log/00000000000000000000.json", ".hoodie/hoodie.properties"])
def test_links_into_table_formats_are_rejected(tmp_path, marker, target):
    write_files(tmp_path, "table/day=1/a.parquet", "plain/b.parquet")
    write_marker(tmp_path / "table" / marker)
    (tmp_path / "plain/part.parquet").symlink_to(tmp_path / target)
    with pytest.raises(DataError, match=r"the path is part of, or contains, a \w+"):
        list_files(str(tmp_path / "plain"), "data.train")


def test_copied_hudi_partition_is_rejected(tmp_path):
    write_files(tmp_path, "table/day=1/a.parquet")
    (tmp_path / "table/day=1/.hoodie_partition_metadata").write_text("commitTime=1")
    for place in ("table", "table/day=1"):
        with pytest.raises(DataError, match="Hudi"):
            list_files(str(tmp_path / place), "data.train")


def test_tables_with_partitions_on_other_disks_are_rejected(tmp_path):
    write_files(tmp_path, "disk/day=1/a.parquet", "plain/b.parquet")
    write_marker(tmp_path / "table/_delta_log/00000000000000000000.json")
    (tmp_path / "table/day=1").symlink_to(tmp_path / "disk/day=1")
    (tmp_path / "plain/day=1").symlink_to(tmp_path / "table/day=1")
    for place in ("table/day=1", "table/day=1/a.parquet", "plain"):
        with pytest.raises(DataError, match="Delta Lake"):
            list_files(str(tmp_path / place), "data.train")


def test_links_to_folders_of_tables_are_rejected(tmp_path):
    write_files(tmp_path, "hive/base_0000005/a.parquet", "disk/day=1/b.parquet")
    write_marker(tmp_path / "mnt/table/_delta_log/0.json")
    (tmp_path / "mnt/x").mkdir()
    for link, target in (
        ("current", "hive/base_0000005"),
        ("mnt/table/day=1", str(tmp_path / "disk/day=1")),
        ("mnt/x/day=1", "../table/day=1"),
        ("home", "mnt/x"),
    ):
        (tmp_path / link).symlink_to(target)
    for place, name in (("current", "Hive"), ("home", "Delta Lake"), ("home/day=1", "Delta Lake")):
        with pytest.raises(DataError, match=name):
            list_files(str(tmp_path / place), "data.train")


def test_equal_paths_in_other_containers_and_servers_are_other_files():
    for others in (
        ["abfss://train@acct.dfs.core.windows.net/day1/a", "abfss://extra@acct.dfs.core.windows.net/day1/a"],
        ["s3://bucket/a?endpoint_override=one:9000", "s3://bucket/a?endpoint_override=two:9000"],
        ["s3://bucket/a", "s3://bucket/a?scheme=http"],
    ):
        assert locate_file(others[0]) != locate_file(others[1])
    for one, other in (
        ("s3://key:secret@bucket/a%20b?region=eu", "s3://bucket/a b"),
        ("abfs://c:KEY@a.dfs.core.windows.net/x", "abfs://c@a.dfs.core.windows.net/x"),
        ("gs://anonymous@bucket/x", "gs://bucket/x"),
    ):
        assert locate_file(one) == locate_file(other)


def test_deep_partitions_of_tables_are_rejected(tmp_path):
    folder = "table/data/" + "/".join(f"key{n}={n}" for n in range(9))
    write_files(tmp_path, f"{folder}/a.parquet")
    write_marker(tmp_path / "table/metadata/v1.metadata.json")
    with pytest.raises(DataError, match="Iceberg"):
        list_files(str(tmp_path / folder), "data.train")


@pytest.mark.parametrize("name", [b"\xff.parquet", b"day=\xff/a.parquet"])
def test_non_utf8_file_names_are_rejected(tmp_path, name):
    write_files(tmp_path, "a.parquet")
    path = Path(tmp_path, os.fsdecode(name))
    path.parent.mkdir(exist_ok=True)
    path.write_bytes((tmp_path / "a.parquet").read_bytes())
    with pytest.raises(DataError, match="names that are not UTF-8") as error:
        list_files(str(tmp_path), "data.train")
    assert "\\udcff" in error.value.where
    with pytest.raises(DataError, match="cannot open the path"):
        list_files(os.fsdecode(bytes(tmp_path) + b"/\xff"), "data.train")


def test_skipped_entries_with_non_utf8_names_are_counted(tmp_path):
    write_files(tmp_path, "a.parquet")
    Path(os.fsdecode(bytes(tmp_path) + b"/\xff.csv")).write_text("x")
    assert list_folder(tmp_path) == (["a.parquet"], {REASON_UNREADABLE: ["\\udcff.csv"]})


@pytest.mark.parametrize("folder", ["base_0000002", "delta_0000003_0000003_0000"])
def test_hive_acid_tables_are_rejected(tmp_path, folder):
    write_files(tmp_path, f"table/{folder}/bucket_00000")
    for place in ("table", f"table/{folder}"):
        with pytest.raises(DataError, match="Hive"):
            list_files(str(tmp_path / place), "data.train")


def test_partitions_out_of_range_are_counted(tmp_path):
    write_files(tmp_path, "day=1/a.parquet", "day=2/a.parquet", "day=3/a.parquet")
    found = list_files(str(tmp_path), "data.train", ("day=2", None))
    assert found.record()["counts"] == {"read": 2, "outside data.partitions": 1}
