"""Reports of runs that lie where this user cannot write."""

import pytest

from raytrec.common.errors import RunError
from raytrec.report.compare import compare, write
from raytrec.report.report import build_with_pictures

NOWHERE = "/dev/null/none"  # where not even root can write


@pytest.fixture
def run(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_text("run: {name: theirs}\n")
    return tmp_path / "run"


def test_a_report_is_written_elsewhere(run, tmp_path):
    before = {path: path.stat().st_mtime_ns for path in [run, *run.rglob("*")]}
    page, _ = build_with_pictures(run, tmp_path / "mine")
    assert page == tmp_path / "mine/report.html" and "theirs" in page.read_text()
    assert {path: path.stat().st_mtime_ns for path in [run, *run.rglob("*")]} == before


def test_no_place_to_write_is_one_error(run):
    with pytest.raises(RunError, match="cannot write the page") as error:
        build_with_pictures(run, NOWHERE)
    assert "--out" in error.value.do
    with pytest.raises(RunError, match="cannot write the page"):
        write(compare([run, run]), f"{NOWHERE}/compare.html")
