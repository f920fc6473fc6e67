"""Cache of open files: a file is opened once, and reopened after it changes."""

import os

import parquet
import pyarrow.parquet as pq
import pytest

from raytrec.common.errors import DataError
from raytrec.data.pages import decode as decoding


@pytest.fixture
def opened_paths(monkeypatch):
    """Return the list of opened paths, in order."""
    places, real = [], decoding._open_cached

    def counted(version, open_file):
        return real(version, lambda: places.append(version[0]) or open_file())

    monkeypatch.setattr(decoding, "_open_cached", counted)
    decoding._open_files.files.clear()
    return places


def write(path, first, rows=200):
    pq.write_table(parquet.make_tiny_table(1000, 0).slice(first, rows), path, row_group_size=50)
    return str(path)


def read(path, group, rows=50):
    return decoding.decode_columns(path, group, 0, rows, ["row"])["row"].to_pylist()


def test_file_stays_open_between_row_groups(tmp_path, opened_paths):
    path = write(tmp_path / "a.parquet", 0)
    assert [read(path, group)[0] for group in (0, 3, 1)] == [0, 150, 50]
    assert opened_paths == [path]


def test_changed_file_is_reopened(tmp_path, opened_paths):
    path = write(tmp_path / "a.parquet", 0)
    assert read(path, 1)[0] == 50
    os.utime(write(tmp_path / "a.parquet", 500), ns=(1, 1))
    assert read(path, 1)[0] == 550
    (tmp_path / "a.parquet").unlink()
    with pytest.raises(DataError, match="the file no longer exists"):
        read(path, 2)
    assert opened_paths == [path, path] and not decoding._open_files.files


def test_number_of_open_files_is_limited(tmp_path, opened_paths, monkeypatch):
    monkeypatch.setattr(decoding, "MAX_OPEN_FILES", 2)
    paths = [write(tmp_path / f"{name}.parquet", 0) for name in "abc"]
    for path in paths + paths[1:] + paths[:1]:
        read(path, 0)
    assert opened_paths == paths + paths[:1] and set(decoding._open_files.files) == {paths[0], paths[2]}
