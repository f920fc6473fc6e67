"""Merged table shards and the timeline of a run: worker groups, pauses and clocks set back."""

import json
import math

import pytest
from recorded import RUN_START_UNIX_S, rank_line, write_json_lines, write_recorded_run

from raytrec.report.report import build
from raytrec.report.run_timeline import build_timeline
from raytrec.tracking.run_folder import RunFolder

NAMES = ["user", "item", "tag"]


def test_figures_of_table_shards_are_merged(tmp_path):
    """Table 0 is sharded over both ranks: check sums, norms, and means weighted by rows and lookups."""
    one, two = (rank_line(NAMES, rank, 2, 100) for rank in (0, 1))
    keys = ("rows", "dead_share", "gradient_norm", "lookups", "max_abs", "touched_rows", "unique_ratio")
    keys += ("read_ids", "changed_share")
    one["tables"]["user"] |= zip(keys, (30, 1.0, 3.0, 10, 0.1, 2, 0.2, 300, 0.0), strict=True)
    two["tables"]["user"] |= zip(keys, (10, 0.0, 4.0, 30, None, 18, 0.6, 100, 1.0), strict=True)
    write_json_lines(tmp_path / "ranks.jsonl", [one, two])
    run = RunFolder.read(tmp_path)
    whole = run.tables["user"][100]
    assert whole["dead_share"] == 0.75
    assert whole["gradient_norm"] == 5.0
    assert whole["unique_ratio"] == pytest.approx(0.5), "20 distinct rows among 40 ids"
    assert whole["changed_share"] == 0.25, "100 of the 400 ids that both ranks have read"
    assert (whole["lookups"], whole["max_abs"]) == (40, 0.1)
    assert math.isnan(whole["state_norm"])
    counts = zip(*(line["tables"]["user"]["row_norm_counts"] for line in (one, two)), strict=True)
    assert whole["row_norm_counts"] == [a + b for a, b in counts]
    (tmp_path / "plan.json").write_text('[{"table": "user", "sharding_type": "data_parallel"}]')
    assert RunFolder.read(tmp_path).tables["user"][100]["gradient_norm"] == 4.0  # replicas, not shards


def test_timeline_of_a_failed_and_resumed_run(tmp_path):
    write_recorded_run(tmp_path)
    saved = {"event": "saved", "folder": "c", "blocked_s": 0.0, "seconds": 0.1}
    later = [
        {"event": "hang", "unix_s": 50, "cause": "rank 0 has made no progress"},
        {"event": "waiting", "unix_s": 55, "cause": "there is room for 0 workers; waiting for 1"},
        {"event": "started", "unix_s": 86_455, "attempt": 1, "workers": 4},
        {"event": "start", "unix_s": 86_456, "step": 500, "total": 900, "workers": 4},
        saved | {"unix_s": 86_465, "step": 700, "error": "disk full"},
    ]
    with open(tmp_path / "events.jsonl", "a") as file:
        file.writelines(json.dumps(e | {"unix_s": e["unix_s"] + RUN_START_UNIX_S}) + "\n" for e in later)
    told = build_timeline(RunFolder.read(tmp_path))
    assert [(g.begin_s, g.end_s, g.workers) for g in told.groups] == [(0, 9, 2), (20, 50, 2), (55, 65, 4)]
    assert [g.resumed_after_s for g in told.groups] == [None, None, 86_400]
    assert [(m.kind, m.bad) for m in told.marks] == [
        ("saved", False), ("failed", True), ("saved", False), ("hang", True), ("waiting", False),
        ("not saved", True),
    ]  # fmt: skip
    assert told.restarts == 2
    assert told.progress == sorted(told.progress) and told.progress[-1] == (65, 700)


def test_timeline_stays_in_order_if_the_clock_is_set_back(tmp_path):
    saved = {"event": "saved", "folder": "c", "error": None, "blocked_s": 0.0, "seconds": 0.1}
    began = [
        {"event": "started", "unix_s": 5000, "attempt": 1, "workers": 2},
        {"event": "start", "unix_s": 5002, "step": 0, "total": 40, "workers": 2},
        {"event": "stopped", "unix_s": 5040, "step": 20},
    ]
    again = [
        {"event": "started", "unix_s": 1000, "attempt": 1, "workers": 3},
        {"event": "start", "unix_s": 1002, "step": 20, "total": 40, "workers": 3},
        {**saved, "unix_s": 1030, "step": 40},
    ]
    write_json_lines(tmp_path / "events.jsonl", began + again)
    steps = {5020: 10, 5038: 20, 1010: 30, 1030: 40}
    trained = [{"kind": "train", "step": step, "unix_s": at} for at, step in steps.items()]
    write_json_lines(tmp_path / "metrics.jsonl", trained)
    told = build_timeline(RunFolder.read(tmp_path))
    assert [(g.begin_s, g.end_s, g.workers) for g in told.groups] == [(0, 40, 2), (40, 70, 3)]
    assert [step for _, step in told.progress] == [0, 10, 20, 20, 30, 40, 40]
    assert [(mark.kind, mark.at_s) for mark in told.marks] == [("stopped", 40), ("saved", 70)]
    build(tmp_path)


@pytest.mark.parametrize("after", [5000, 4000])
def test_timeline_includes_groups_without_steps(tmp_path, after):
    starts = [{"event": "started", "unix_s": at, "attempt": 1, "workers": 2} for at in (5000, after)]
    write_json_lines(tmp_path / "events.jsonl", starts)
    assert [(g.begin_s, g.end_s) for g in build_timeline(RunFolder.read(tmp_path)).groups] == [(0, 0), (0, 0)]
