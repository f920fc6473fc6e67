"""Test early stopping of a complete run, and resume before and after the decision to stop."""

import gzip
import json
import shutil

import checkpoints
import parquet
import pytest
from json_lines import read_json_lines

import raytrec
from raytrec.common.errors import DataError
from raytrec.driver import run as driver

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.slow]
LAST_STEP = 30  # evaluation every 10 steps, nothing learned after the first, patience 2
EARLY_STOPPING = {"metric": "auc", "patience": 2}


def settings(folder, place, **changes):
    changes = {
        "train__epochs": 15,
        "train__eval_every_steps": 10,
        "train__log_every_steps": 7,
        "train__early_stopping": EARLY_STOPPING,
        "train__ema": 0.01,
        "train__profile": {"steps": "3..5"},
        "optim__schedule": {"decay": "linear", "decay_steps": 5},
        "checkpoint__every_steps": 5,
        "checkpoint__keep_last": 99,
        "checkpoint__keep_best": 1,
        "checkpoint__best_metric": "auc",
        "tracking__every_steps": 20,
        "optim__tables": {"*": {"name": "adagrad"}},
    } | changes
    return parquet.config_values(folder, place, **changes)


@pytest.fixture(scope="module")
def stopped_run(tiny_data, tmp_path_factory):
    return driver.train(settings(tiny_data, tmp_path_factory.mktemp("ended") / "run"))


def test_early_stopping_reports_its_reason(stopped_run):
    result = json.loads((stopped_run.path / "result.json").read_text())
    assert result["train.steps"] == LAST_STEP
    assert result["train.rows"] == 2000 + 14 * 128, "rows since the last report are counted"
    assert result["train.ended"].startswith("auc has not improved in 2 evaluations; it was best at step 10 (0.")
    assert result["eval.rows"] == 1003 and "bound.by" in result
    (ended,) = read_json_lines(stopped_run.path / "events.jsonl", "ended early")
    assert ended["reason"] == result["train.ended"]
    newest = checkpoints.newest_checkpoint(stopped_run.path)
    assert newest.name == f"step-{LAST_STEP:010d}"
    seen = checkpoints.read_about(newest)["progress"]["early_stopping"]
    assert (seen["step"], seen["since"]) == (10, 2)


@pytest.mark.survive
def test_early_stopping_restores_the_best_weights(tiny_data, tmp_path):
    """The weights are from an earlier evaluation, and the final evaluation uses them."""
    run = tmp_path / "run"
    best = {"train__early_stopping": EARLY_STOPPING | {"restore_best": True}, "train__profile": None}
    result = driver.train(settings(tiny_data, run, **best)).metrics
    assert result["train.steps"] == LAST_STEP and "best at step 10" in result["train.ended"]
    checkpoint = checkpoints.newest_checkpoint(run)
    assert checkpoint.name == f"step-{LAST_STEP:010d}"
    assert checkpoints.differing_tensors(checkpoint, run / "checkpoints" / "step-0000000010") == []
    assert checkpoints.read_about(checkpoint)["progress"]["step"] == LAST_STEP
    again = raytrec.evaluate(run, data=f"{tiny_data}/test").metrics
    assert again["eval.auc"] == result["eval.auc"]


def test_profile_covers_requested_steps_on_each_rank(stopped_run):
    for rank in range(2):
        with gzip.open(stopped_run.path / f"profile/rank-{rank}.json.gz") as file:
            names = {each.get("name", "") for each in json.load(file)["traceEvents"]}
        assert {name for name in names if name.startswith("ProfilerStep")} == {
            f"ProfilerStep#{step}" for step in (3, 4, 5)
        }
        assert "aten::addmm" in names and any(name.startswith("## forward") for name in names)
    assert f"steps 3 to 5; see {stopped_run.path}/profile" in (stopped_run.path / "events.jsonl").read_text()


@pytest.mark.survive
@pytest.mark.parametrize("last", [25, LAST_STEP])
def test_resumed_run_stops_early_at_the_same_step(stopped_run, tmp_path, last):
    """The run is interrupted between two evaluations and after the last one."""
    run = tmp_path / "run"
    shutil.copytree(stopped_run.path, run)
    (run / "result.json").unlink()
    for place in (run / "checkpoints").glob("step-*"):
        if int(place.name.removeprefix("step-")) > last:
            shutil.rmtree(place)
    again = driver.train(None, resume=run).metrics
    assert "restoring" in (run / "run.log").read_text()
    assert again["seconds"] > stopped_run.metrics["seconds"] > 0, "seconds must cover the whole run"
    checks, timed = (read_json_lines(run / name) for name in ("checks.jsonl", "ranks.jsonl"))
    assert again["train.checks_passed"] == len(checks) > stopped_run.metrics["train.checks_passed"]
    data = [line["phases_s"]["data"] + line["phases_s"]["copy"] for line in timed]
    first = [line["first_s"].get("data", 0) + line["first_s"].get("copy", 0) for line in timed]
    spent = (sum(data) - sum(first)) / again["world_size"]
    assert again["bound.parts"]["ingest"]["seconds"] == pytest.approx(spent)
    for key in ("train.steps", "train.rows", "train.ended", "eval.auc", "eval.ne"):
        assert again[key] == stopped_run.metrics[key], key
    newest, resumed = (checkpoints.newest_checkpoint(each) for each in (stopped_run.path, run))
    assert checkpoints.differing_tensors(newest, resumed) == []


@pytest.mark.survive
def test_failed_evaluation_after_early_stop_gives_advice(tiny_data, tmp_path, monkeypatch):
    bad, run = tmp_path / "bad", tmp_path / "run"
    shutil.copytree(tiny_data, bad)
    parquet.change_column_values(bad / "test/part-0.parquet", "user", {3: 40}, write_statistics=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="id 40 of feature 'user'") as error:
        driver.train(settings(bad, run))
    assert "the trained model is saved" in error.value.do
    assert "`raytrec evaluate run --set data.on_error=skip`" in error.value.do


def test_target_that_the_last_step_reaches_does_not_end_the_run_early(tiny_data, tmp_path, capfd):
    """No line reports an early end, and a profile that begins after the last step is not announced."""
    last = {
        "train__epochs": 1,
        "train__eval_every_steps": 100,
        "train__early_stopping": {"metric": "auc", "target": 0.0, "restore_best": True},
        "train__profile": {"steps": "900..901"},
    }
    run = driver.train(settings(tiny_data, tmp_path / "run", **last))
    assert run.metrics["train.ended"] == "after all steps" and run.metrics["train.steps"] == 16
    assert read_json_lines(run.path / "events.jsonl", "ended early") == []
    shown = capfd.readouterr().err
    assert "no profile is written, because train.profile.steps begins after the last step of the run" in shown
    assert "ends early" not in shown and not (run.path / "profile").exists()
