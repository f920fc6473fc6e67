"""Pictures are drawn once while a run ends, and drawn again only if its files have changed."""

from types import SimpleNamespace
from unittest.mock import patch
from xml.etree import ElementTree

import pytest
from recorded import write_recorded_run

from raytrec.report import report
from raytrec.report.report import BackgroundRenderer


class WarningList(list):
    """Console that records its warnings."""

    warn = list.append


@pytest.mark.slow
def test_run_output_lists_pictures_only_if_drawn(tmp_path, draw_calls):
    from raytrec.config.run_config import RunConfig
    from raytrec.driver.run import _list_next_steps, _write_report

    for name in ("good", "bad"):
        warned, folder = WarningList(), write_recorded_run(tmp_path / name)
        values = {"data": {"train": "unused"}, "tracking": {"enabled": False}, "run": {"dir": str(folder)}}
        config = RunConfig.model_validate(values)
        if name == "bad":
            (folder / "report.html").mkdir()
        page = _write_report(BackgroundRenderer(folder), warned)
        said = [line for line in _list_next_steps(config, None, page) if line.startswith("pictures ")]
        assert [len(said), len(warned)] == ([1, 0] if name == "good" else [0, 1])


def test_interrupted_report_names_the_command_that_writes_it(tmp_path):
    from raytrec.driver.run import _write_report

    class Interrupted(BackgroundRenderer):
        def write(self):
            raise KeyboardInterrupt

    noted = []
    with pytest.raises(KeyboardInterrupt):
        _write_report(Interrupted(tmp_path), SimpleNamespace(note=noted.append))
    assert noted == [f"the report is incomplete; write it with: raytrec report {tmp_path}"]


@pytest.fixture
def draw_calls():
    """Return the recorded calls that draw a reduced gallery."""
    from raytrec.report import figures

    calls = []

    def draw(history):
        calls.append(history)
        return original(history)

    original, one_each = report.draw, {picture.section: picture for picture in reversed(figures.GALLERY)}
    with patch.object(report, "draw", draw), patch.object(figures, "GALLERY", one_each.values()):
        yield calls


def test_pictures_are_drawn_once_and_written_with_the_result(tmp_path, draw_calls):
    write_recorded_run(tmp_path)
    early = BackgroundRenderer(tmp_path)
    early.begin()
    early.begin()  # a second result, after a restart
    early.confirm()
    (tmp_path / "result.json").write_text('{"name": "written since"}')
    page, pictures = early.write()
    assert len(draw_calls) == 1 and page.read_text().count("<svg") == 5 and "written since" in page.read_text()
    assert {path.name for path in pictures} >= {"curves.svg", "timeline.svg"}
    for path in pictures:
        assert ElementTree.parse(path).getroot().tag.endswith("svg") and "var(" not in path.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("begun, confirmed", [(False, False), (True, False), (True, True)])
def test_missing_or_outdated_pictures_are_drawn_at_the_end(tmp_path, draw_calls, begun, confirmed):
    write_recorded_run(tmp_path)
    early = BackgroundRenderer(tmp_path)
    if begun:
        early.begin()
        with (tmp_path / "events.jsonl").open("a") as events:
            events.write('{"event": "failed", "unix_s": 1800000050, "cause": "later"}\n')
    if confirmed:
        early.confirm()
    page, _ = early.write()
    assert len(draw_calls) == 1 + begun and ("later" in page.read_text()) == begun


def test_failed_early_drawing_raises_at_the_end(tmp_path):
    write_recorded_run(tmp_path)
    early = BackgroundRenderer(tmp_path)
    with patch.object(report, "draw", side_effect=RuntimeError("no room")):
        early.begin()
        early.confirm()
        with pytest.raises(RuntimeError, match="no room"):
            early.write()
