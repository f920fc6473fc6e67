"""What is read back from a run folder: torn lines, steps that were trained twice, long runs, pauses."""

import json
import math

import pytest
from recorded import BEGIN_S, holders, interval, metrics, record, write_lines

from raytrec.common.errors import RunError
from raytrec.report import history as history_module
from raytrec.report.history import History, run_folder
from raytrec.report.report import build
from raytrec.report.run_timeline import story
from raytrec.tracking.aggregate import last_group, over_time, skip_warmup

NAMES = ["user", "item", "tag"]


def test_everything_is_read(tmp_path):
    history = History.read(record(tmp_path))
    assert history.name == "recorded"
    assert [m["step"] for m in history.figures("eval")] == [100, 200, 300, 400, 500]
    assert len(history.figures("final")) == 1 and len(history.figures("train")) == 25
    steps = [step for step in (100, 200, 300, 400, 500) for _ in range(2)]
    assert [(line["step"], line["rank"]) for line in history.ranks] == list(
        zip(steps, [0, 1] * 5, strict=True)
    )
    assert len(history.checks) == 30
    assert [line["check"] for line in history.failures] == ["parity"]
    assert history.restarts() == [150]
    assert history.table_size("table_1") == (200, 16) and history.table_size("no_such") is None
    assert history.planned("table_0")["ranks"] == holders(0, 2)


def test_an_empty_folder_is_a_history_without_events(tmp_path):
    history = History.read(tmp_path)
    assert (history.metrics, history.ranks, history.checks, history.events) == ([], [], [], [])
    assert history.name == tmp_path.name
    assert story(history).groups == []


def test_lines_that_are_torn_or_strange_are_passed_over(tmp_path):
    good = interval(NAMES, 0, 2, 100)
    strange = [
        7,
        [],
        "text",
        {"step": "100", "rank": 0},
        {"step": 100},
        {"rank": 0},
        {"step": True, "rank": 0},
    ]
    odd = interval(NAMES, 1, 2, 100, tables={"user": "not a mapping"}, phases_s=None, system=3)
    write_lines(tmp_path / "ranks.jsonl", [*strange, good, odd], more=json.dumps(good)[:50])
    (tmp_path / "metrics.jsonl").write_bytes(
        b'\xff\xfe{"step": 1\n{"kind": "train", "step": 20, "ne": NaN}\n\n{'
    )
    (tmp_path / "config.yaml").write_text("a: [")
    (tmp_path / "plan.json").write_text("{")
    history = History.read(tmp_path)
    assert [(line["step"], line["rank"]) for line in history.ranks] == [(100, 0), (100, 1)]
    assert history.ranks[1]["tables"] == {}
    assert [m["step"] for m in history.metrics] == [20]
    assert (history.config, history.plan) == ({}, [])


def test_of_figures_of_a_step_the_later_count(tmp_path):
    lines = [{"kind": "train", "step": step, "ne": 1.0} for step in (20, 40, 60, 80)]
    again = [{"kind": "train", "step": step, "ne": 2.0} for step in (60, 80, 100)]
    other = [{"kind": "eval", "step": 60, "auc": 0.7}]
    write_lines(tmp_path / "metrics.jsonl", lines + other + again)
    history = History.read(tmp_path)
    assert [(m["step"], m["ne"]) for m in history.figures("train")] == [
        (20, 1.0), (40, 1.0), (60, 2.0), (80, 2.0), (100, 2.0)
    ]  # fmt: skip
    assert [m["step"] for m in history.figures("eval")] == [60]


def test_a_failed_check_stays_known_when_its_step_is_trained_again(tmp_path):
    line = {"step": 100, "check": "parity", "text": "differs"}
    write_lines(tmp_path / "checks.jsonl", [line | {"passed": False}, line | {"passed": True}])
    history = History.read(tmp_path)
    assert [c["passed"] for c in history.checks] == [True]
    assert [c["passed"] for c in history.failures] == [False]


def test_of_intervals_that_were_trained_again_the_later_count(tmp_path):
    """Ranks fail after step 200; one goes on from 150, so that nothing of rank 1 after 150 is true."""
    before = [interval(NAMES, rank, 2, step) for step in (100, 200) for rank in (0, 1)]
    after = [interval(NAMES, 0, 1, step, attempt=1) for step in (250, 350)]  # first steps 150 and 250
    write_lines(tmp_path / "ranks.jsonl", before + after)
    history = History.read(tmp_path)
    assert [(line["step"], line["rank"], line["world"]) for line in history.ranks] == [
        (100, 0, 2), (100, 1, 2), (250, 0, 1), (350, 0, 1)
    ]  # fmt: skip
    assert [line["step"] for line in last_group(history.ranks)] == [250, 350]
    assert [line["step"] for line in skip_warmup(history.ranks)] == [350]


def test_a_new_rank_says_that_the_run_has_gone_back(tmp_path):
    before = [interval(NAMES, 0, 1, step) for step in (100, 200)]
    after = [interval(NAMES, rank, 2, 250, attempt=1) for rank in (1, 0)]
    write_lines(tmp_path / "ranks.jsonl", before + after)
    assert [(line["step"], line["rank"]) for line in History.read(tmp_path).ranks] == [
        (100, 0),
        (250, 0),
        (250, 1),
    ]


def test_a_resumed_run_counts_attempts_from_0_again(tmp_path):
    first = [interval(NAMES, rank, 2, step, seconds=1.0) for step in (100, 200) for rank in (0, 1)]
    second = [interval(NAMES, rank, 2, step, seconds=2.0) for step in (250, 350) for rank in (1, 0)]
    write_lines(tmp_path / "ranks.jsonl", first + second)
    seconds = [(line["step"], line["rank"], line["seconds"]) for line in History.read(tmp_path).ranks]
    assert seconds == [
        (100, 0, 1.0),
        (100, 1, 1.0),
        (250, 0, 2.0),
        (250, 1, 2.0),
        (350, 0, 2.0),
        (350, 1, 2.0),
    ]


def test_long_runs_are_put_together_and_nothing_is_lost_from_sums(tmp_path, monkeypatch):
    monkeypatch.setattr(history_module, "MOST_INTERVALS", 10)
    lines = [interval(NAMES, rank, 2, 100 * k) for k in range(1, 51) for rank in (0, 1)]
    write_lines(tmp_path / "ranks.jsonl", lines)
    kept = History.read(tmp_path).ranks
    assert len({line["step"] for line in kept}) <= 11
    assert kept[-1]["step"] == 5000
    mine = [line for line in kept if line["rank"] == 0]
    assert [line["first_step"] for line in mine] == [0, *(line["step"] for line in mine[:-1])]  # no gaps
    for rank, total in enumerate(over_time(kept)):
        assert total["steps"] == 5000
        assert total["seconds"] == pytest.approx(50 * 3.5)
        assert total["phases_s"]["backward"] == pytest.approx(50 * 1.2)
        for name, entry in total["tables"].items():
            assert entry["lookups"] == 50 * 100 * (NAMES.index(name) + 1)
            assert rank in holders(NAMES.index(name), 2)


def test_shards_come_together(tmp_path):
    """Table 0 has its rows on both ranks: sums, norms over all of its rows, means by rows and lookups."""
    one, two = (interval(NAMES, rank, 2, 100) for rank in (0, 1))
    one["tables"]["user"] |= {
        "rows": 30,
        "dead_share": 1.0,
        "gradient_norm": 3.0,
        "lookups": 10,
        "max_abs": 0.1,
    }
    two["tables"]["user"] |= {
        "rows": 10,
        "dead_share": 0.0,
        "gradient_norm": 4.0,
        "lookups": 30,
        "max_abs": None,
    }
    one["tables"]["user"] |= {"touched_rows": 2, "unique_ratio": 0.2, "read_ids": 300, "changed_share": 0.0}
    two["tables"]["user"] |= {"touched_rows": 18, "unique_ratio": 0.6, "read_ids": 100, "changed_share": 1.0}
    write_lines(tmp_path / "ranks.jsonl", [one, two])
    history = History.read(tmp_path)
    whole = history.tables["user"][100]
    assert whole["dead_share"] == 0.75
    assert whole["gradient_norm"] == 5.0
    assert whole["unique_ratio"] == pytest.approx(0.5), "20 distinct rows of 10 and 30 ids"
    assert whole["changed_share"] == 0.25, "100 of 300 and 100 ids that ranks have read"
    assert (whole["lookups"], whole["max_abs"]) == (40, 0.1)
    assert math.isnan(whole["state_norm"])
    counts = zip(*(line["tables"]["user"]["row_norm_counts"] for line in (one, two)), strict=True)
    assert whole["row_norm_counts"] == [a + b for a, b in counts]
    (tmp_path / "plan.json").write_text('[{"table": "user", "sharding_type": "data_parallel"}]')
    assert History.read(tmp_path).tables["user"][100]["gradient_norm"] == 4.0  # of replicas, not of shards


def test_the_story_of_a_run_that_failed_and_was_resumed_a_day_later(tmp_path):
    record(tmp_path)
    later = [
        {"event": "hang", "unix_s": 50, "cause": "rank 0 has made no progress"},
        {"event": "waiting", "unix_s": 55, "cause": "there is room for 0 workers; waiting for 1"},
        {"event": "started", "unix_s": 86_455, "attempt": 1, "workers": 4},
        {"event": "start", "unix_s": 86_456, "step": 500, "workers": 4},
        {"event": "saved", "unix_s": 86_465, "step": 700, "error": "disk full"},
    ]
    with open(tmp_path / "events.jsonl", "a") as file:
        file.writelines(json.dumps(e | {"unix_s": e["unix_s"] + BEGIN_S}) + "\n" for e in later)
    told = story(History.read(tmp_path))
    assert [(g.begin_s, g.end_s, g.workers) for g in told.groups] == [(0, 9, 2), (20, 50, 2), (55, 65, 4)]
    assert [g.resumed_after_s for g in told.groups] == [None, None, 86_400]
    assert [(m.kind, m.bad) for m in told.marks] == [
        ("saved", False), ("failed", True), ("saved", False), ("hang", True), ("waiting", False),
        ("not saved", True),
    ]  # fmt: skip
    assert told.restarts == 2
    assert told.progress == sorted(told.progress) and told.progress[-1] == (65, 700)


def test_a_clock_that_went_back_before_a_resume_leaves_the_story_as_it_was(tmp_path):
    began = [
        {"event": "started", "unix_s": 5000, "attempt": 1, "workers": 2},
        {"event": "start", "unix_s": 5002, "step": 0},
        {"event": "stopped", "unix_s": 5040, "step": 20},
    ]
    again = [
        {"event": "started", "unix_s": 1000, "attempt": 1, "workers": 3},
        {"event": "start", "unix_s": 1002, "step": 20},
        {"event": "saved", "unix_s": 1030, "step": 40, "error": None},
    ]
    write_lines(tmp_path / "events.jsonl", began + again)
    steps = {5020: 10, 5038: 20, 1010: 30, 1030: 40}
    write_lines(
        tmp_path / "metrics.jsonl",
        [{"kind": "train", "step": step, "unix_s": at} for at, step in steps.items()],
    )
    told = story(History.read(tmp_path))
    assert [(g.begin_s, g.end_s, g.workers) for g in told.groups] == [(0, 40, 2), (40, 70, 3)]
    assert [step for _, step in told.progress] == [0, 10, 20, 20, 30, 40, 40]
    assert [(mark.kind, mark.at_s) for mark in told.marks] == [("stopped", 40), ("saved", 70)]
    build(tmp_path)


@pytest.mark.parametrize("after", [5000, 4000])
def test_a_group_that_has_done_nothing_is_told_whatever_the_clock(tmp_path, after):
    starts = [{"event": "started", "unix_s": at, "attempt": 1, "workers": 2} for at in (5000, after)]
    write_lines(tmp_path / "events.jsonl", starts)
    assert [(g.begin_s, g.end_s) for g in story(History.read(tmp_path)).groups] == [(0, 0), (0, 0)]


def test_folders_that_are_no_runs_are_errors_for_people(tmp_path):
    with pytest.raises(RunError, match="no such run folder"):
        run_folder(tmp_path / "nowhere")
    with pytest.raises(RunError, match="nothing of a run") as error:
        run_folder(tmp_path)
    assert error.value.do
    write_lines(tmp_path / "metrics.jsonl", metrics(100))
    assert run_folder(tmp_path) == tmp_path
