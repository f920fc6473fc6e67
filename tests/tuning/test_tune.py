"""Searches on a real Ray cluster: trials that finish, fall behind, fail and are interrupted."""

import json
import os
import signal
import subprocess
import sys

import parquet
import pytest
import yaml
from json_lines import read_json_lines
from waiting import wait_for

from raytrec.checkpoint.files import find_newest_checkpoint
from raytrec.common.errors import RunError
from raytrec.config.run_config import load_config
from raytrec.driver.driver_state import is_alive, read_driver_record
from raytrec.driver.run import train
from raytrec.tuning.tune import tune

# A fast model that learns, a slow model that hardly learns, and a model whose workers fail.
GOOD_MODEL = {"bottom_mlp": [16], "top_mlp": [16]}
BAD_MODEL = {"bottom_mlp": [16], "top_mlp": [3000, 3000], "dropout": 0.95}
BROKEN_MODEL = {"name": "broken_model:Broken"}
BROKEN_MODULE_CODE = """\
from torch import nn


class Broken(nn.Module):
    def __init__(self, schema, config):
        raise RuntimeError("it is broken")
"""
SEED = 0  # draws the two choices in their order


def make_tune_settings(data, folder, **changes):
    changes = {"train__eval_every_steps": 4, "train__epochs": 2, "tracking__enabled": False} | changes
    changes["scaling__num_workers"] = 1
    return parquet.config_values(data, folder, **changes)


def write_space(tmp_path, values):
    path = tmp_path / "space.yaml"
    path.write_text(yaml.safe_dump(values))
    return str(path)


def read_trial_states(folder):
    return {record["trial"]: record["state"] for record in json.loads((folder / "trials.json").read_text())}


@pytest.mark.survive
def test_search_finds_the_best_trial_and_stops_the_other(tiny_data, tmp_path, capfd):
    space = write_space(tmp_path, {"model": {"choice": [GOOD_MODEL, BAD_MODEL]}})
    outcome = tune(make_tune_settings(tiny_data, tmp_path / "s"), space, trials=2, seed=SEED, at_once=1, grace_steps=4)
    shown = capfd.readouterr().err
    print(shown)
    good, bad = outcome.trials
    assert (good.state, bad.state) == ("finished", "stopped")
    assert outcome.best is good and max(good.points) == good.total == good.step == 32
    assert max(bad.points) < bad.total and read_saved_step(bad.folder) >= 4  # a checkpoint was saved
    assert read_driver_record(bad.folder)["status"] == "STOPPED" and not (bad.folder / "result.json").exists()

    result = json.loads((good.folder / "result.json").read_text())
    assert result[f"eval.{outcome.figure.key}"] == good.value and result["eval.rows"] == 501  # in data.valid
    folder = tmp_path / "s"
    assert json.loads((folder / "outcome.json").read_text()) == outcome.metrics
    assert read_trial_states(folder)[bad.number] == "stopped"
    assert load_config(folder / "best.yaml").model.top_mlp == [16]
    assert "trial 1 starts" in shown and f"trial {bad.number} stopped at step" in shown
    with pytest.raises(RunError, match="already contains a search"):
        tune(make_tune_settings(tiny_data, tmp_path / "s"), space, trials=2)
    with pytest.raises(RunError, match="the folder already contains a run"):
        tune(make_tune_settings(tiny_data, good.folder), space, trials=2)
    with pytest.raises(RunError, match="the run folder already contains a search"):
        train(make_tune_settings(tiny_data, tmp_path / "s"))


@pytest.mark.survive
def test_failed_trial_does_not_stop_the_search(tiny_data, tmp_path, monkeypatch):
    (tmp_path / "broken_model.py").write_text(BROKEN_MODULE_CODE)
    monkeypatch.chdir(tmp_path)
    space = write_space(tmp_path, {"model": {"choice": [GOOD_MODEL, BROKEN_MODEL]}})
    given = make_tune_settings(tiny_data, tmp_path / "s", scaling__max_failures=0)
    good, broken = tune(given, space, trials=2, seed=SEED, at_once=1).trials
    assert (good.state, broken.state) == ("finished", "failed") and "it is broken" in broken.error


def start_raytrec(*arguments):
    """Start the raytrec command in its own process group."""
    return subprocess.Popen(
        [sys.executable, "-m", "raytrec", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def read_saved_step(folder):
    """Return the step of the newest complete checkpoint of a trial, or 0."""
    _, index = find_newest_checkpoint(f"{folder}/checkpoints")
    return index["about"]["progress"]["step"] if index else 0


def read_start_steps(folder):
    """Return the steps at which the trial started or resumed training."""
    return [event["step"] for event in read_json_lines(folder / "events.jsonl", "start")]


@pytest.mark.survive
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_interrupted_search_is_resumed(tiny_data, tmp_path, number):
    """Finished trials do not change. The running trial saves and continues from its checkpoint."""
    space = write_space(tmp_path, {"model": {"choice": [GOOD_MODEL, GOOD_MODEL | {"top_mlp": [600, 600]}]}})
    config, folder = tmp_path / "own.yaml", tmp_path / "s"
    changes = {"train__epochs": 10, "train__eval_every_steps": 20, "checkpoint__every_steps": 5}
    config.write_text(yaml.safe_dump(make_tune_settings(tiny_data, folder, **changes)))
    arguments = ("tune", config, "--space", space, "--trials", 2, "--at-once", 1, "--seed", SEED)
    process = start_raytrec(*arguments, "--grace-steps", 10_000)
    first, second = folder / "trial-001", folder / "trial-002"
    wait_for(lambda: read_saved_step(second) or process.poll() is not None, "checkpoint of the second trial", 240)
    before = (first / "result.json").read_bytes()
    os.kill(process.pid, number)
    said = process.communicate(timeout=120)[1]
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number), said
    wait_for(lambda: not is_alive(read_driver_record(second)), "end of the trial of a search that was killed")
    reached = read_saved_step(second)
    assert 0 < reached < 160 and not (second / "result.json").exists()
    assert read_driver_record(second)["status"] == "STOPPED"
    if number != signal.SIGKILL:
        assert read_trial_states(folder) == {1: "finished", 2: "interrupted"}
        assert f"raytrec tune --resume {folder}" in said

    resumed = start_raytrec("tune", "--resume", folder, "--json")
    out, said = resumed.communicate(timeout=240)
    assert resumed.returncode == 0, said
    outcome = json.loads(out)
    assert [trial["state"] for trial in outcome["trials"]] == ["finished", "finished"]
    assert (first / "result.json").read_bytes() == before and read_start_steps(first) == [0]
    assert read_start_steps(second) == [0, reached] and "trial 1 begins" not in said
    undisturbed = load_config(second / "config.yaml")
    undisturbed.run.dir = str(tmp_path / "undisturbed")
    result = train(undisturbed).metrics
    metric = outcome["metric"]["key"]
    assert outcome["trials"][1]["value"] == result[f"eval.{metric}"]


@pytest.mark.survive
def test_search_is_tracked_under_one_mlflow_parent_run(tiny_data, tmp_path):
    from mlflow import MlflowClient

    space = write_space(tmp_path, {"optim.dense.lr": {"choice": [0.01, 0.02]}})
    tracking = {"report": False, "uri": f"sqlite:///{tmp_path}/mlflow.db", "experiment": "search"}
    outcome = tune(make_tune_settings(tiny_data, tmp_path / "s") | {"tracking": tracking}, space, trials=2)
    client = MlflowClient(tracking["uri"])
    experiment = client.get_experiment_by_name("search").experiment_id
    runs = {run.info.run_name: run for run in client.search_runs([experiment])}
    parent = runs.pop(outcome.config.run.name)
    assert sorted(runs) == [f"{outcome.config.run.name}-001", f"{outcome.config.run.name}-002"]
    assert {run.data.tags["mlflow.parentRunId"] for run in runs.values()} == {parent.info.run_id}
    assert parent.data.metrics[f"eval.{outcome.figure.key}"] == outcome.best.value
