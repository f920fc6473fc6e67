"""Run folder on a temporarily full disk: no line is lost or torn, and there is one warning."""

import dataclasses
import errno
import json
import os

import disks
import pytest
from disks import fill_disk

from raytrec.common.messages import RankLine, Result, Start, Train
from raytrec.driver.recorder import Record, Watch, write_json, write_text
from raytrec.tracking import journal
from raytrec.tracking.journal import Journal, append_to


@pytest.fixture
def small_disk_folder(tmp_path):
    """Return a file system of 1 MiB."""
    with disks.small_disk(tmp_path / "disk", "1m") as place:
        yield place


def read_json_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_journal_buffers_lines_while_the_disk_is_full(small_disk_folder):
    said = []
    kept = Journal(small_disk_folder, said.append)
    kept.add("metrics.jsonl", {"step": 0})
    fill_disk(small_disk_folder)
    wide = "x" * 5000  # does not fit into the last page of the file
    for step in range(1, 50):
        kept.add("metrics.jsonl", {"step": step, "wide": wide})
        kept.add("events.jsonl", {"event": "saved", "step": step})
    kept.put("plan.json", "[]")
    assert len(said) == 1 and "No space left on device" in said[0] and "training continues" in said[0]
    assert "the run folder lacks" in kept.missing() and not (small_disk_folder / "plan.json").exists()
    whole = read_json_lines(small_disk_folder / "metrics.jsonl")
    assert [line["step"] for line in whole] == list(range(len(whole))), "a line is incomplete"
    (small_disk_folder / "ballast").unlink()
    kept.add("metrics.jsonl", {"step": 50})
    assert [line["step"] for line in read_json_lines(small_disk_folder / "metrics.jsonl")] == list(range(51))
    events = read_json_lines(small_disk_folder / "events.jsonl")
    assert [e["step"] for e in events if e["event"] == "saved"] == list(range(1, 50))
    assert [e["event"] for e in events if e["event"] != "saved"] == ["full", "room"]
    assert events[-1]["event"] == "room" and (small_disk_folder / "plan.json").read_text() == "[]"
    assert len(said) == 2 and "is writable again" in said[1] and kept.missing() is None


def test_journal_bounds_its_buffer_and_reports_lost_records(tmp_path, monkeypatch):
    said, full = [], True
    monkeypatch.setattr(journal, "MAX_PENDING_BYTES", 1000)

    def no_room(path, data):
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        append_to(path, data)

    monkeypatch.setattr(journal, "append_to", no_room)
    kept = Journal(tmp_path, said.append)
    for step in range(1000):
        kept.add("ranks.jsonl", {"step": step})
    assert kept._bytes <= 1000
    full = False
    kept.write()
    left = [line["step"] for line in read_json_lines(tmp_path / "ranks.jsonl")]
    assert left == list(range(left[0], 1000)) and 30 < len(left) < 100
    assert f"(lost so far: {left[0] + 1:,} records)" in said[1]  # plus the event of the full disk
    assert "lacks" in kept.missing()


def test_journal_appends_after_an_incomplete_line(tmp_path):
    (tmp_path / "events.jsonl").write_text('{"event": "start"}\n{"event": "sav')
    Journal(tmp_path, print).add("events.jsonl", {"event": "started"})
    text = (tmp_path / "events.jsonl").read_text().splitlines()
    assert text == ['{"event": "start"}', '{"event": "sav', '{"event": "started"}']


def test_files_are_written_atomically(small_disk_folder):
    write_json(small_disk_folder / "result.json", {"a": 1})
    fill_disk(small_disk_folder)
    with pytest.raises(OSError, match="No space left"):
        write_text(small_disk_folder / "result.json", "x" * 10_000)
    assert json.loads((small_disk_folder / "result.json").read_text()) == {"a": 1}
    assert sorted(p.name for p in small_disk_folder.iterdir()) == ["ballast", "result.json"], (
        "an incomplete file is left"
    )


class WarningRecorder(list):
    warn = list.append


def test_unwritable_result_error_names_the_resume_command(small_disk_folder):
    console = WarningRecorder()
    record = Record(small_disk_folder, console.warn)
    watch = Watch(console, record)
    fill_disk(small_disk_folder)
    watch.receive(Start(step=0, total=3, workers=1))
    watch.receive(Train(step=3, figures={"logloss": 0.5}))
    watch.receive(Result(step=3, figures={"train.steps": 3, "eval.auc": float("nan")}))
    assert watch.result == {"train.steps": 3, "eval.auc": None} and watch.unsaved is None
    error = record.result(watch.result, None)
    assert "cannot write the result: No space left on device" in error.what
    assert f"raytrec train --resume {small_disk_folder}" in error.do
    assert len(console) == 1
    record.close()
    assert len(console) == 2 and "the run folder lacks" in console[1]
    assert not (small_disk_folder / "result.json").exists()


def test_invalid_message_does_not_stop_recording(tmp_path):
    console, names = WarningRecorder(), [each.name for each in dataclasses.fields(RankLine)]
    watch = Watch(console, Record(tmp_path, console.warn))
    for _ in range(2):
        watch.receive(RankLine(**dict.fromkeys(names)))  # all fields are None
    watch.receive(Train(step=2, figures={"logloss": 0.5}))
    assert read_json_lines(tmp_path / "metrics.jsonl")[0]["step"] == 2
    assert len(console) == 1 and "messages of kind rank are not recorded" in console[0]
