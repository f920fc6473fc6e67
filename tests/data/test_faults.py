"""Unreadable rows are skipped, counted and listed; transient storage errors are retried."""

import json

import numpy as np
import parquet
import pyarrow.parquet as pq
import pytest
from pyarrow import fs

from raytrec.common import reading
from raytrec.common.errors import DataError, RunError
from raytrec.data import fragments, item_reader
from raytrec.data.files import footers
from raytrec.data.order import LaneItem, Part
from raytrec.data.pages import decode
from raytrec.data.pages.decode import ReadErrorPolicy
from raytrec.data.read_plans import ReadPlan, ResolvedReadPlan
from raytrec.driver import run as driver

SCHEMA = parquet.tiny_schema()
FORM = ResolvedReadPlan(ReadPlan(SCHEMA), frozenset({"tags"}))


def replace_users(table, rows, user):
    users = table["user"].to_numpy().copy()
    users[rows] = user
    return table.set_column(table.column_names.index("user"), "user", [users])


def write_bad_users(path, bad, count=1000):
    """Write `count` rows as one row group and return an item; users of `bad` rows are out of range."""
    pq.write_table(replace_users(parquet.make_tiny_table(count, 0), bad, 40), path)
    return LaneItem(0, 0, (Part(str(path), 0, 100, count - 100),), None)


def test_bad_rows_are_skipped_one_by_one(tmp_path):
    item = write_bad_users(tmp_path / "a.parquet", [50, 130, 131, 999])
    log = tmp_path / "skipped.jsonl"
    table = item_reader.read_item(item, FORM, ReadErrorPolicy(True, str(log)))
    assert np.flatnonzero(~table["present"].to_numpy()).tolist() == [30, 31, 899]  # 50 is outside the item
    notes = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(n["rows"], n["where"].rpartition("row ")[2]) for n in notes] == [(1, "130"), (1, "131"), (1, "999")]
    assert "id 40 of feature 'user'" in notes[0]["what"]
    with pytest.raises(DataError, match="id 40"):
        item_reader.read_item(item, FORM)


def test_many_bad_rows_are_skipped_as_ranges(tmp_path):
    item = write_bad_users(tmp_path / "a.parquet", slice(500, 1000))
    log = tmp_path / "skipped.jsonl"
    present = item_reader.read_item(item, FORM, ReadErrorPolicy(True, str(log)))["present"].to_numpy()
    assert present[:400].all() and not present[400:].any()
    notes = [json.loads(line)["rows"] for line in log.read_text().splitlines()]
    assert sum(notes) == 500 and len(notes) <= item_reader.MAX_LOCATED_BAD_ROWS + 10


def test_unwritable_log_of_skipped_rows_is_a_run_error(tmp_path):
    item = write_bad_users(tmp_path / "a.parquet", [130])
    with pytest.raises(RunError, match="cannot record skipped rows: No such file") as error:
        item_reader.read_item(item, FORM, ReadErrorPolicy(True, str(tmp_path / "gone/skipped.jsonl")))
    assert error.value.where.endswith("gone/skipped.jsonl")


def test_read_rejects_a_shrunken_file(tmp_path):
    item = write_bad_users(tmp_path / "a.parquet", [])
    write_bad_users(tmp_path / "a.parquet", [], count=400)
    with pytest.raises(DataError, match="it has 400 rows, but previously had 1,000 or more"):
        item_reader.read_item(item, FORM)


class FlakyFileSystem(fs.FileSystemHandler):
    """A local file system whose first opens fail, as those of an object store may."""

    def __init__(self, failures, error):
        self.left, self.error, self.opened = failures, error, 0

    def open_input_file(self, path):
        self.opened += 1
        if self.left:
            self.left -= 1
            raise self.error
        return fs.LocalFileSystem().open_input_file(path)

    def get_file_info(self, paths):
        return fs.LocalFileSystem().get_file_info(paths)

    def get_type_name(self):
        return "flaky"


for name in fs.FileSystemHandler.__abstractmethods__ - set(vars(FlakyFileSystem)):
    setattr(FlakyFileSystem, name, lambda self, *_: None)
FlakyFileSystem.__abstractmethods__ = frozenset()


@pytest.fixture
def make_flaky_storage(monkeypatch):
    monkeypatch.setattr(reading, "RETRY_DELAYS_S", (0.01, 0.01, 0.01))

    def make(failures, error):
        handler = FlakyFileSystem(failures, error)
        decode._open_files.files.clear()
        for module in (decode, footers):
            opened = lambda uri: (fs.PyFileSystem(handler), uri.removeprefix("store://"))  # noqa: E731
            monkeypatch.setattr(module, "open_filesystem", opened)
        return handler

    return make


def test_transient_storage_errors_are_retried(make_flaky_storage, tmp_path):
    item = write_bad_users(tmp_path / "a.parquet", [])
    path = f"store://{tmp_path}/a.parquet"
    remote = LaneItem(0, 0, (Part(path, 0, 100, 900),), None)
    expected = item_reader.read_item(item, FORM)
    handler = make_flaky_storage(3, OSError("503 slow down"))
    assert item_reader.read_item(remote, FORM).equals(expected)
    assert handler.opened == 4
    make_flaky_storage(2, OSError("503 slow down"))
    assert fragments.read_footer(path).num_rows == 1000
    handler = make_flaky_storage(99, OSError("503 slow down"))
    with pytest.raises(DataError, match="503 slow down") as error:
        item_reader.read_item(remote, FORM)
    assert "a.parquet, row group 0" in str(error.value)
    assert "reachable storage (up to 4 attempts are made)" in str(error.value)
    assert handler.opened == 4
    handler = make_flaky_storage(99, FileNotFoundError("no such key"))
    with pytest.raises(DataError, match="no such key"):
        item_reader.read_item(remote, FORM)
    assert handler.opened == 1


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_run_skips_and_counts_bad_rows(tmp_path):
    folder = parquet.write_dataset(tmp_path / "d")  # 2 files of 1000 rows, groups of 300
    path = folder / "train/part-1.parquet"
    table = replace_users(pq.read_table(path), [10, 700], -5)
    pq.write_table(table, path, row_group_size=300, write_page_checksum=True, compression="none")
    data = bytearray(path.read_bytes())
    start = pq.read_metadata(path).row_group(3).column(0).data_page_offset  # the last group, of 100 rows
    data[start : start + 10] = bytes(10)
    path.write_bytes(data)
    (folder / "train/part-2.parquet").write_bytes(b"PAR1")
    settings = parquet.config_values(folder, tmp_path / "run", train__epochs=2)
    with pytest.raises(DataError, match=r"part-2\.parquet"):
        driver.train(settings)
    settings["data"]["on_error"] = "skip"
    figures = driver.train(settings).metrics
    assert figures["train.skipped_rows"] == 2 * 102
    assert figures["train.rows"] == 2 * (2000 - 102)
    assert (figures["skipped_files"], figures["eval.skipped_rows"], figures["eval.rows"]) == (1, 0, 1003)
    notes = [json.loads(line) for line in (tmp_path / "run/skipped.jsonl").read_text().splitlines()]
    assert notes[0]["rows"] is None and "part-2.parquet" in notes[0]["where"]
    assert sum(note["rows"] for note in notes[1:]) == 2 * 102
    assert {note["where"].split("row group ")[1][0] for note in notes[1:]} == {"0", "2", "3"}

    from mlflow import MlflowClient

    run = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db").get_run(figures["mlflow_run_id"])
    assert run.data.metrics["train/skipped_rows"] == 204 and run.data.metrics["skipped_files"] == 1
