"""Column reads take time linear in row groups and columns, and show their progress."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from any_parquet import write
from inspected import get_findings
from rich.progress import Progress

from raytrec.common.errors import DataError, SchemaError
from raytrec.inspection import column_stats
from raytrec.inspection.propose import inspect


def record_calls(monkeypatch, owner, name):
    """Patch a function and return a list that collects the arguments of its calls."""
    calls, function = [], getattr(owner, name)

    def call(*args, **kwargs):
        calls.append(args)
        return function(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)
    return calls


def table(rows, **columns):
    numbers = np.arange(rows)
    return pa.table({"label": numbers * 7 % 5 % 2, "user_id": numbers * 7, **columns})


def test_inspect_opens_each_file_once(tmp_path, monkeypatch):
    for name in ("a", "b"):
        write(tmp_path / f"{name}.parquet", table(400), row_group_size=20)
    opened = record_calls(monkeypatch, pq, "ParquetFile")
    found = inspect(str(tmp_path))
    assert found.rows == 800 and len(opened) == 2


def test_hashes_are_sorted_once_for_many_row_groups(tmp_path, monkeypatch):
    write(tmp_path / "a.parquet", table(20_000), row_group_size=100)
    sorted_arrays = [record_calls(monkeypatch, column_stats.np, name) for name in ("union1d", "unique")]
    stats = inspect(str(tmp_path)).findings[1].stats
    assert stats.distinct == 20_000 and stats.low == 0 and stats.high == 19_999 * 7
    assert sum(map(len, sorted_arrays)) < 20, "fewer sorts than the 200 row groups"


def test_wide_row_groups_are_read_in_parts(tmp_path, monkeypatch):
    columns = {f"c{i}": np.arange(300) * 0.5 for i in range(250)}
    write(tmp_path / "a.parquet", table(300, **columns))
    steps = []

    def track(self, sequence, **settings):
        steps.extend(sequence)
        return iter(sequence)

    monkeypatch.setattr(Progress, "track", track)
    found = inspect(str(tmp_path))
    assert len(steps) == 3 and len(found.schema.dense) == 250
    assert {f.stats.rows for f in found.findings} == {300}


def test_disjoint_columns_are_not_compared_in_full(tmp_path, monkeypatch):
    columns = {f"c{i}": [f"{i} {row % 90}" for row in range(300)] for i in range(40)}
    write(tmp_path / "a.parquet", table(300, **columns))
    compared = record_calls(monkeypatch, column_stats.np, "intersect1d")
    assert len(inspect(str(tmp_path)).schema.tables) == 41 and not compared


def damage(path, columns):
    """Overwrite the first page of columns, given by index."""
    raw, footer = bytearray(path.read_bytes()), pq.read_metadata(path)
    for i in columns:
        begin = footer.row_group(0).column(i).data_page_offset
        raw[begin : begin + 20] = bytes(20)
    path.write_bytes(raw)


def test_unreadable_label_after_many_columns_is_named(tmp_path):
    columns = {f"c{i}": np.arange(300) % 7 for i in range(150)}
    path = tmp_path / "a.parquet"
    write(path, pa.table({**columns, "label": np.arange(300) % 2}), compression="none", use_dictionary=False)
    damage(path, [150])
    with pytest.raises(SchemaError, match=r"column 'label' cannot be the label: cannot be read in .*a\.parquet"):
        inspect(str(tmp_path))


def test_inspect_rejects_files_without_readable_columns(tmp_path):
    path = tmp_path / "a.parquet"
    write(path, table(300), compression="none", use_dictionary=False)
    damage(path, range(pq.read_metadata(path).num_columns))
    with pytest.raises(DataError, match=r"(?s)cannot read column 'label'.*a\.parquet, row group 0"):
        inspect(str(tmp_path))


def test_column_missing_in_test_is_shown_with_statistics(tmp_path, capsys):
    write(tmp_path / "train" / "a.parquet", table(300, bid=[None, 0.5, 2.0] * 100))
    write(tmp_path / "test" / "a.parquet", table(300))
    found = inspect(str(tmp_path))
    bid = get_findings(found)["bid"]
    assert (bid.kind, bid.why) == ("skipped", f"the column is missing in {tmp_path / 'test' / 'a.parquet'}")
    assert (bid.stats.rows, bid.stats.nulls, bid.stats.distinct) == (300, 100, 2)
    found.show()
    line = next(line for line in capsys.readouterr().err.splitlines() if "bid" in line)
    assert "33 %" in line
