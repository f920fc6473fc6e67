"""What `raytrec inspect` is given is looked at before anything is read."""

import pytest
from any_parquet import write
from typer.testing import CliRunner

from raytrec.cli import app
from raytrec.common.errors import ConfigError, DataError
from raytrec.inspection import column_scan
from raytrec.inspection.propose import inspect


@pytest.mark.parametrize("place", ["", " "])
def test_a_place_without_a_name_is_refused(place, tmp_path, monkeypatch):
    write(tmp_path / "a.parquet", {"label": [0, 1] * 50, "user_id": [1, 2] * 50})
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="the place has no name"):
        inspect(place)


@pytest.mark.parametrize("rows", [0, -5])
def test_fewer_rows_than_one_are_refused(rows, tmp_path):
    write(tmp_path / "a.parquet", {"label": [0, 1] * 50, "user_id": [1, 2] * 50})
    with pytest.raises(ConfigError, match=f"{rows} rows.*\n.*--rows"):
        inspect(str(tmp_path), max_rows=rows)


@pytest.mark.parametrize(
    "out,what",
    [("there.yaml", "the file exists"), ("no/x.yaml", "no such folder"), (".", "this is a folder")],
)
def test_a_schema_that_cannot_be_written_is_refused_before_anything_is_read(out, what, tmp_path, monkeypatch):
    (tmp_path / "there.yaml").write_text("")
    monkeypatch.setattr(column_scan, "_footers", lambda place: pytest.fail("it reads"))
    done = CliRunner().invoke(app, ["inspect", str(tmp_path), "--out", str(tmp_path / out)])
    assert isinstance(done.exception, ConfigError) and what in done.exception.what
