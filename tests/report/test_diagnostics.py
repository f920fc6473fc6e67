"""Findings about slow ranks, idle GPUs and hot ranks, from made-up intervals."""

import json
from dataclasses import replace

from recorded import RUN_METRICS, rank_line, write_json_lines, write_recorded_run

from raytrec.common.messages import RankLine
from raytrec.report.findings import find_hot_rank, find_low_utilization, find_poor_fit, find_straggler, findings
from raytrec.tracking.run_folder import RunFolder

NAMES = ["user", "item", "tag"]


def make_step_lines(*changes: dict, seconds: float = 3.5, **fields) -> list[RankLine]:
    """Return one line per rank: the usual phases with these changes.

    Ranks wait for the slowest one: the rest of `seconds` is spent in collectives. Each line is the sum of 100
    intervals of 100 steps.
    """
    out = []
    for rank, change in enumerate(changes):
        line = rank_line(NAMES, rank, len(changes), 100)
        phases = line["phases_s"] | change
        phases["collectives"] = 0.0
        phases["collectives"] = seconds - sum(phases.values())
        many = {phase: 100 * s for phase, s in phases.items()}
        out.append(RankLine(**line | {"steps": 10_000, "seconds": 100 * seconds, "phases_s": many} | fields))
    return out


def test_straggler_finding_names_rank_and_phase():
    sentence = find_straggler(make_step_lines({}, {"data": 0.9}, {}, {}, seconds=4.0))
    assert "rank 1" in sentence and "data (+8.0 ms)" in sentence
    assert "35.0 ms per step without waiting for other ranks, 8.0 ms more" in sentence
    sentence = find_straggler(make_step_lines({"backward": 2.0}, {}, seconds=4.0))
    assert "rank 0" in sentence and "backward (+8.0 ms)" in sentence


def test_slightly_slower_rank_is_not_a_straggler():
    limit = 0.15 * 4.0
    assert find_straggler(make_step_lines({}, {"data": 0.1 + limit - 0.01}, {}, seconds=4.0)) is None
    assert find_straggler(make_step_lines({}, {"data": 0.1 + limit + 0.01}, {}, seconds=4.0))


def test_straggler_needs_at_least_a_minute():
    """Starting processes use the CPUs of a small machine for a short time."""
    quick, slow = make_step_lines({}, {"data": 2.0}, seconds=5.0)
    assert "rank 1" in find_straggler([quick, slow])
    tenths = [
        replace(line, seconds=line.seconds / 10, phases_s={p: s / 10 for p, s in line.phases_s.items()})
        for line in (quick, slow)
    ]
    assert find_straggler(tenths) is None


def test_waiting_for_others_is_not_a_straggler():
    slow, quick = make_step_lines({}, {}, seconds=4.0)
    quick.phases_s["input_exchange"] += 100.0
    quick.phases_s["collectives"] -= 100.0
    assert find_straggler([slow, quick]) is None


def test_straggler_finding_does_not_blame_waiting():
    ranks = make_step_lines({"input_exchange": 2.0, "data": 1.0}, {}, seconds=5.5)
    assert "mostly in the phase data (+9.0 ms)" in find_straggler(ranks)


def test_single_ranks_and_missing_times_give_no_straggler():
    for ranks in (make_step_lines({}), [], [replace(line, seconds=0.0) for line in make_step_lines({}, {})]):
        assert find_straggler(ranks) is None


def test_low_gpu_utilization_blames_waiting_for_data():
    waiting = make_step_lines({"data": 1.5}, {"data": 1.5}, seconds=5.0)
    for line, busy in zip(waiting, (35, 45), strict=True):
        line.system["gpu_percent"] = busy
    sentence = find_low_utilization(waiting)
    assert "GPUs are busy 40 % of the time; ranks spend 30 % of the time on waiting for data" in sentence
    assert "data.readers" in sentence


def test_low_gpu_utilization_advice_depends_on_the_phase():
    cures = {"input_exchange": "plan", "backward": "data.global_batch_size", "other": "save"}
    for phase, cure in cures.items():
        idle = make_step_lines({phase: 4.0}, {phase: 4.0}, seconds=8.0, system={"gpu_percent": 49})
        assert cure in find_low_utilization(idle), phase


def test_busy_devices_give_no_advice():
    assert find_low_utilization(make_step_lines({}, {})) is None
    assert find_low_utilization(make_step_lines({}, {}, system={"gpu_percent": 50})) is None
    assert find_low_utilization([]) is None


def test_cpu_ranks_that_wait_for_data_are_found():
    assert find_low_utilization(make_step_lines({"data": 1.4}, {"data": 1.4}, seconds=5.0)) is None  # 28 %
    sentence = find_low_utilization(make_step_lines({"data": 1.6}, {"data": 1.6}, seconds=5.0))
    assert "ranks wait for data 32 % of the time" in sentence and "data.readers" in sentence


def make_lines_of_loads(*loads: float) -> list[RankLine]:
    halves = [{table: {"lookup_bytes": load / 2} for table in "ab"} for load in loads]
    return [RankLine(**rank_line([], rank, len(loads), 100, tables=tables)) for rank, tables in enumerate(halves)]


def test_hot_rank_finding_names_rank_and_share():
    sentence = find_hot_rank(make_lines_of_loads(10, 71, 10, 9))
    assert "rank 1 looked up 71 % of all bytes, 2.8 times the mean" in sentence and "plan.tables" in sentence


def test_hot_rank_exceeds_one_and_a_half_times_the_mean():
    assert find_hot_rank(make_lines_of_loads(50, 150, 100)) is None
    assert find_hot_rank(make_lines_of_loads(49, 152, 99))
    assert find_hot_rank(make_lines_of_loads(100)) is None
    assert find_hot_rank(make_lines_of_loads(0, 0)) is None
    assert find_hot_rank([]) is None


def find_table_findings(folder, **changes):
    """Return the findings of two runs with one table each, whose ids are hashed or clamped."""
    found = {}
    for rule in ("hash", "clamp"):
        place = write_recorded_run(folder / rule, tables=1, ranks=1)
        line = rank_line(["table_0"], 0, 1, 600)
        line["tables"]["table_0"] |= changes
        write_json_lines(place / "ranks.jsonl", [line])
        spec = {"tables": {"table_0": {"rows": 100, "dim": 16, "out_of_range": rule}}}
        (place / "schema.yaml").write_text(json.dumps(spec))
        found[rule] = [said for said in findings(RunFolder.read(place)) if said.startswith("table ")]
    return found


def test_intentionally_hashed_ids_are_no_finding(tmp_path):
    found = find_table_findings(tmp_path, changed_share=1.0, read_ids=10)
    assert found["hash"] == []
    assert found["clamp"] == ["table table_0: 100 % of the ids were out of range and were clamped"]


def test_untrained_share_is_not_rounded_to_100_percent(tmp_path):
    large = {"weight_bytes": 2**30, "dead_share": 0.9996}
    assert find_table_findings(tmp_path, **large)["hash"] == ["table table_0: 99.96 % of the rows were never trained"]


def test_untrained_rows_of_small_tables_are_no_finding(tmp_path):
    """`raytrec inspect` allocates ten times more rows for hashed text than there are values."""
    assert find_table_findings(tmp_path, weight_bytes=2**25, state_bytes=2**20, dead_share=0.98) == {
        "hash": [],
        "clamp": [],
    }


def test_model_worse_than_base_rate_is_the_first_finding(tmp_path):
    place = write_recorded_run(tmp_path / "run")
    assert "NE" not in " ".join(findings(RunFolder.read(place)))
    *lines, last = (place / "metrics.jsonl").read_text().splitlines()
    last = json.loads(last) | {"ne": 1.16, "calibration": 0.4}
    write_json_lines(place / "metrics.jsonl", [*map(json.loads, lines), last])
    first, second, *others = findings(RunFolder.read(place))
    assert first == "NE is 1.1600: worse than predicting the label's mean for every row, which has NE 1"
    assert second.startswith("predictions are miscalibrated: calibration") and len(others) == 2


def test_overfitting_finding_needs_a_large_gap(tmp_path):
    trained = [{"kind": "train", "step": step, "ne": ne} for step, ne in enumerate([2.0, *[0.5] * 5])]
    for evaluated, expected in ((0.59, []), (0.62, ["NE is 0.6200 in evaluation and 0.5000 in training"])):
        write_json_lines(tmp_path / "metrics.jsonl", [*trained, {"kind": "final", "step": 10, "ne": evaluated}])
        found = [text.partition(":")[0] for text in find_poor_fit(RunFolder.read(tmp_path))]
        assert found == expected
    (tmp_path / "config.yaml").write_text("train: {early_stopping: {restore_best: true}}")
    assert find_poor_fit(RunFolder.read(tmp_path)) == [], "the weights of an earlier step were restored"


def test_base_rate_finding_covers_tasks_and_unfinished_runs(tmp_path):
    described = [{**RUN_METRICS[1], "key": f"{task}.ne", "label": f"{task}: NE"} for task in ("click", "buy")]
    start = {"event": "start", "step": 0, "total": 20, "workers": 1, "metrics": described}
    write_json_lines(tmp_path / "events.jsonl", [start])
    lines = [{"kind": "eval", "step": step, "click.ne": 0.9, "buy.ne": ne} for step, ne in ((10, 3), (20, 2))]
    train = {"kind": "train", "step": 10, "click.ne": 7.0, "buy.ne": 7.0}
    write_json_lines(tmp_path / "metrics.jsonl", [train, *lines])
    found = [text for text in findings(RunFolder.read(tmp_path)) if "NE" in text]
    assert found == ["buy: NE is 2.0000: worse than predicting the label's mean for every row, which has NE 1"]
