"""Reading of a run folder: torn lines, values of wrong types, steps trained twice and long runs."""

import json

import pytest
import recorded
from recorded import rank_line, write_json_lines, write_recorded_run

from raytrec.common.errors import RunError
from raytrec.common.messages import METRICS, RANKS, Eval, Final, Train
from raytrec.tracking import history
from raytrec.tracking.aggregate import select_last_group, skip_warmup
from raytrec.tracking.run_folder import RunFolder, check_run_folder, read_lines

NAMES = ["user", "item", "tag"]


def test_run_folder_reads_all_recorded_files(tmp_path):
    run = RunFolder.read(write_recorded_run(tmp_path))
    assert run.name == "recorded" and run.dropped == 0
    assert [line.step for line in run.figures(Eval)] == [100, 200, 300, 400, 500]
    assert len(run.figures(Final)) == 1 and len(run.figures(Train)) == 25
    steps = [step for step in (100, 200, 300, 400, 500) for _ in range(2)]
    assert [(line.step, line.rank) for line in run.ranks] == list(zip(steps, [0, 1] * 5, strict=True))
    assert len(run.checks) == 30
    assert [check.check for check in run.failures] == ["parity"]
    assert (run.restarts, run.step, run.total_steps) == ([150], 500, 500)
    assert [metric.key for metric in run.recorded_metrics] == ["auc", "ne", "logloss", "calibration"]
    assert run.table_size("table_1") == (200, 16) and run.table_size("no_such") is None
    assert run.planned("table_0")["ranks"] == recorded.ranks_holding_table(0, 2)


def test_missing_folder_is_read_as_a_run_without_lines(tmp_path):
    run = RunFolder.read(tmp_path / "nowhere")
    assert (run.figures(Train), run.ranks, run.checks, run.events) == ([], [], [], [])
    assert (run.name, run.result, run.config, run.dropped) == ("nowhere", {}, {}, 0)


def test_torn_and_invalid_lines_are_dropped_and_counted(tmp_path):
    good = rank_line(NAMES, 0, 2, 100)
    strange = [
        7,
        [],
        "text",
        {"step": 100},
        {"rank": 0},
        *({**good, "step": step} for step in ("100", True, -1, 1.5, None)),
        {**good, "tables": {"user": "not a mapping"}},
        {**good, "phases_s": None},
        {**good, "system": 3},
        {**good, "unix_s": 1e300},
    ]
    write_json_lines(tmp_path / RANKS, [*strange, good], more=json.dumps(good)[:50] + "\n")
    (tmp_path / METRICS).write_bytes(b'\xff\xfe{"step": 1\n{"kind": "train", "step": 20, "ne": NaN}\n\n{')
    (tmp_path / "config.yaml").write_text("a: [")
    (tmp_path / "plan.json").write_text("{")
    run = RunFolder.read(tmp_path)
    assert [(line.step, line.rank) for line in run.ranks] == [(100, 0)]
    assert [(line.step, line.figures) for line in run.figures(Train)] == [(20, {"ne": None})]
    assert run.dropped == len(strange) + 1 + 2
    assert (run.config, run.plan) == ({}, {})


def test_non_numeric_figures_are_read_as_undefined(tmp_path):
    write_json_lines(tmp_path / METRICS, [{"kind": "eval", "step": 1, "auc": "high", "ne": 10**400, "rows": 3}])
    line = rank_line(["user"], 0, 1, 100)
    line["tables"]["user"] |= {"rows": [], "max_abs": {}, "row_norm_counts": ["x"] * 30}
    write_json_lines(tmp_path / RANKS, [line])
    run = RunFolder.read(tmp_path)
    assert run.figures(Eval)[0].figures == {"auc": None, "ne": None, "rows": 3}
    entry = run.ranks[0].tables["user"]
    assert (entry["rows"], entry["max_abs"], entry["device"]) == (None, None, "cpu")
    assert entry["row_norm_counts"] == [0.0] * 30


def test_read_new_continues_at_the_last_complete_line(tmp_path):
    run, path = RunFolder(tmp_path, files=[METRICS]), tmp_path / METRICS
    assert not run.read_new() and run.figures(Train) == []
    text = "".join(json.dumps({"kind": "train", "step": step}) + "\n" for step in (10, 20))
    path.write_text(text[:-5])
    assert run.read_new() and run.step == 10
    assert not run.read_new(), "an incomplete line was read"
    path.write_text(text)
    (tmp_path / "result.json").write_text('{"seconds": 3}')
    assert run.read_new() and [line.step for line in run.figures(Train)] == [10, 20]
    assert run.result == {"seconds": 3} and run.dropped == 0
    assert [(line.begin, line.end) for line in read_lines(path, 30)] == [(30, 60)]


def test_later_figures_of_a_step_replace_earlier_ones(tmp_path):
    lines = [{"kind": "train", "step": step, "ne": 1.0} for step in (20, 40, 60, 80)]
    again = [{"kind": "train", "step": step, "ne": 2.0} for step in (60, 80, 100)]
    other = [{"kind": "eval", "step": 60, "auc": 0.7}]
    write_json_lines(tmp_path / METRICS, lines + other + again)
    run = RunFolder.read(tmp_path)
    assert [(line.step, line.figure("ne")) for line in run.figures(Train)] == [
        (20, 1.0), (40, 1.0), (60, 2.0), (80, 2.0), (100, 2.0)
    ]  # fmt: skip
    assert [line.step for line in run.figures(Eval)] == [60]


def test_failed_check_is_kept_if_its_step_is_trained_again(tmp_path):
    line = {"step": 100, "check": "parity", "text": "differs", "figure": None, "limit": 1.0}
    write_json_lines(tmp_path / "checks.jsonl", [line | {"passed": False}, line | {"passed": True}])
    run = RunFolder.read(tmp_path)
    assert [check.passed for check in run.checks] == [True]
    assert [check.passed for check in run.failures] == [False]


@pytest.mark.parametrize(
    "before, after, attempt",
    [(2, 1, 1), (1, 2, 1), (2, 2, 0)],
    ids=["fewer ranks", "more ranks", "resumed run, whose attempts restart at 0"],
)
def test_retrained_intervals_replace_earlier_ones(tmp_path, before, after, attempt):
    """Ranks fail after step 200. The next group continues from step 150, so that the lines of step 200 are void."""
    first = [rank_line(NAMES, rank, before, step) for step in (100, 200) for rank in range(before)]
    again = [rank_line(NAMES, r, after, step, attempt=attempt) for step in (250, 350) for r in reversed(range(after))]
    write_json_lines(tmp_path / RANKS, first + again)
    ranks = RunFolder.read(tmp_path).ranks
    expected = [(100, rank, before) for rank in range(before)]
    expected += [(step, rank, after) for step in (250, 350) for rank in range(after)]
    assert [(line.step, line.rank, line.world) for line in ranks] == expected
    if attempt:  # a group is recognized by its attempt and number of ranks
        assert [line.step for line in select_last_group(ranks)] == [250] * after + [350] * after
        assert [line.step for line in skip_warmup(ranks)] == [350] * after


def test_intervals_of_long_runs_are_merged_without_loss(tmp_path, monkeypatch):
    monkeypatch.setattr(history, "MAX_INTERVALS", 10)
    lines = [rank_line(NAMES, rank, 2, 100 * k) for k in range(1, 51) for rank in (0, 1)]
    write_json_lines(tmp_path / RANKS, lines)
    kept = RunFolder.read(tmp_path).ranks
    assert len({line.step for line in kept}) <= 11 and kept[-1].step == 5000
    for rank in (0, 1):
        mine = [line for line in kept if line.rank == rank]
        assert [line.first_step for line in mine] == [0, *(line.step for line in mine[:-1])], "gaps in steps"
        total = history.sum_intervals(mine)
        assert (total.steps, total.first_step) == (5000, 0)
        assert total.seconds == pytest.approx(50 * 3.5)
        assert total.phases_s["backward"] == pytest.approx(50 * 1.2)
        for name, entry in total.tables.items():
            assert entry["lookups"] == 50 * 100 * (NAMES.index(name) + 1)
            assert rank in recorded.ranks_holding_table(NAMES.index(name), 2)


def test_check_run_folder_refuses_other_folders(tmp_path):
    for place in (tmp_path / "nowhere", "~no-such-user/run", "x" * 300):
        with pytest.raises(RunError, match="the run folder does not exist"):
            check_run_folder(place)
    with pytest.raises(RunError, match="no files of a run") as error:
        check_run_folder(tmp_path)
    assert error.value.do
    write_json_lines(tmp_path / METRICS, recorded.metric_lines(100))
    assert check_run_folder(tmp_path) == tmp_path
