"""Results of a search: best.yaml, outcome.json, the table and the parent run in MLflow."""

import json
import re

import pytest
from searches import make_settings
from test_searching import prepare_test_search

from raytrec.config.run_config import load_config
from raytrec.config.trust import is_own_file
from raytrec.tuning.folder import write_search
from raytrec.tuning.search import State, make_trial_config
from raytrec.tuning.tune import print_outcome, write_outcome

SPACE = """\
optim.dense.lr: {log_uniform: [0.001, 0.1]}
model.dropout: {uniform: [0, 0.5]}
train.epochs: {integer: [1, 2]}
model.top_mlp: {choice: [[16], [32, 16]]}
"""


@pytest.fixture
def search(tiny_data, tmp_path):
    """Return a search with one finished, one stopped, one failed and one waiting trial."""
    made = prepare_test_search(tiny_data, tmp_path, SPACE, make_settings(trials=4), tracking__enabled=False)
    write_search(made)
    key = made.figure.key
    states = State.FINISHED, State.STOPPED, State.FAILED, State.WAITING
    histories = {2: 0.9, 5: 0.8123}, {2: 0.95}, {2: 0.1}, {}
    for trial, state, points in zip(made.trials, states, histories, strict=True):
        trial.state, trial.points, trial.step = state, points, max(points, default=0)
    made.trials[2].error = "the loss is not a finite number <b>"
    result = {f"eval.{key}": 0.8123, "eval.rows": 100, "train.steps": 5, "metrics": []}
    (made.trials[0].folder / "result.json").write_text(json.dumps(result))
    return made


def test_outcome_writes_best_config_and_table(search, tiny_data, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    warned = []
    write_outcome(search, warned.append)
    assert not warned and search.best is search.trials[0]
    key = search.figure.key

    text = (search.folder / "best.yaml").read_text()
    assert "Trial 1 of" in text and "0.8123" in text and f"# eval.{key}: 0.8123" in text
    assert is_own_file(search.folder / "best.yaml")
    config = load_config(search.folder / "best.yaml")
    assert config.optim.dense.lr == search.trials[0].values["optim.dense.lr"]
    assert config.run.name is None is config.run.dir and config.data.test == f"{tiny_data}/test"
    assert config.tracking.parent_run is None

    assert not (search.folder / "outcome.json").exists()  # one trial is still waiting

    print_outcome(search)
    table = capsys.readouterr().out
    rows = [line.split() for line in table.splitlines() if line.startswith("│")]
    assert [row[1] for row in rows] == ["1", "2", "3", "4"]
    for row, trial in zip(rows, search.trials, strict=True):
        assert {search.figure.text(trial.value), str(trial.step), str(trial.state)} <= set(row)
        assert str(trial.values["optim.dense.lr"]) in row
    assert "trial 3 failed: the loss is not a finite number <b>" in table and "best.yaml" in table


WIDE_SPACE = """\
optim.dense.lr: {log_uniform: [0.05, 0.2]}
optim.embeddings.lr: {log_uniform: [0.0001, 0.1]}
optim.dense.weight_decay: {log_uniform: [0.001, 0.012]}
model.dropout: {uniform: [0, 0.5]}
train.epochs: {integer: [1, 2]}
data.global_batch_size: {choice: [32, 40, 48, 56, 64, 72, 80, 96]}
model.top_mlp: {choice: [[16], [32, 16], [128, 64, 32, 16]]}
optim.schedule: {choice: [{}, {decay: linear, decay_steps: 1000}]}
"""


@pytest.mark.parametrize("kind", ["valid", "holdout", "test"])
def test_outcome_names_the_data_that_selected_the_best_trial(search, capsys, kind):
    if kind != "valid":
        search.config.data.valid, search.config.data.holdout = None, 0.1 if kind == "holdout" else None
    trial = make_trial_config(search.config, {}, 1)
    assert (trial.data.test is None) == (kind != "test")
    write_outcome(search, print)
    print_outcome(search)
    best = (search.folder / "best.yaml").read_text()
    warned = ["compared on the test data" in best, "warning: neither data.valid" in capsys.readouterr().out]
    assert warned == [kind == "test"] * 2
    assert "on the test data." in best if kind == "test" else "on the validation data." in best
    assert load_config(search.folder / "best.yaml").data.valid == search.config.data.valid


def test_wide_outcome_table_does_not_break_words(tiny_data, tmp_path, capsys, monkeypatch):
    """The search has 12 finished trials and many keys."""
    monkeypatch.setenv("COLUMNS", "80")
    made = prepare_test_search(tiny_data, tmp_path, WIDE_SPACE, make_settings(trials=12), tracking__enabled=False)
    for trial in made.trials:
        trial.state, trial.step, trial.points = State.FINISHED, 200, {100: 0.7, 200: 0.7 + 0.01 * trial.number}
    print_outcome(made)
    table = capsys.readouterr().out
    assert all(len(line) <= 80 for line in table.splitlines() if "│" in line)
    for trial in made.trials:
        for key, value in trial.values.items():
            assert key in table and all(part in table for part in str(value).split()), key
    assert len(re.findall(r"\b200 │ finished\b", table)) == 12
    monkeypatch.setenv("COLUMNS", "300")
    print_outcome(made)
    assert "│ optim.dense.lr" in capsys.readouterr().out.replace("┃", "│")  # a column


def test_outcome_file_is_written_once_all_trials_ended(search):
    search.trials[3].state, search.trials[3].error = State.FAILED, "no room"
    write_outcome(search, print)
    written = json.loads((search.folder / "outcome.json").read_text())
    assert written == json.loads(json.dumps(search.metrics))
    assert [trial["state"] for trial in written["trials"]] == ["finished", "stopped", "failed", "failed"]
    assert written["best"]["trial"] == 1 and written["best"]["figures"]["eval.rows"] == 100
    assert written["best"]["config"] == str(search.folder / "best.yaml")
    assert written["metric"] == {"key": search.figure.key, "better": search.figure.better}
    assert written["trials"][1]["value"] == 0.95 and written["trials"][3]["value"] is None


def test_search_without_evaluations_has_no_best_trial(search):
    for trial in search.trials:
        trial.state, trial.points, trial.error = State.FAILED, {}, "it is broken"
    write_outcome(search, print)
    assert search.best is None and search.metrics["best"] is None
    assert not (search.folder / "best.yaml").exists()


def test_unwritable_mlflow_store_keeps_the_outcome_files(search, tmp_path):
    (tmp_path / "no.db").write_text("not a database, but a text that is long enough to be taken for one")
    search.config.tracking.enabled = True
    search.config.tracking.uri = f"sqlite:///{tmp_path}/no.db"
    warned = []
    write_outcome(search, warned.append)
    assert len(warned) == 1 and "MLflow lacks the outcome" in warned[0]
    assert (search.folder / "best.yaml").exists()


@pytest.mark.slow
def test_outcome_is_written_to_the_mlflow_parent_run(search, tmp_path):
    from mlflow import MlflowClient
    from stores import reuse_first_store

    search.config.tracking.enabled = True
    search.config.tracking.uri = f"sqlite:///{tmp_path}/mlflow.db"
    warned = []
    with reuse_first_store():
        for _ in range(2):  # as a resumed or extended search does
            write_outcome(search, warned.append)
    assert not warned
    client = MlflowClient(search.config.tracking.uri)
    experiment = client.get_experiment_by_name(search.config.tracking.experiment).experiment_id
    (parent,) = client.search_runs([experiment])
    assert parent.info.run_name == search.config.run.name
    assert parent.data.params["space.optim.dense.lr"] == "log_uniform [0.001, 0.1]"
    assert parent.data.metrics[f"eval.{search.figure.key}"] == 0.8123
    assert parent.data.tags["best.trial"] == "1" and parent.data.tags["raytrec.parent_run"]
    files = {file.path for file in client.list_artifacts(parent.info.run_id)}
    assert files == {"best.yaml", "space.yaml"}
    assert parent.info.status == ("FINISHED" if (search.folder / "outcome.json").exists() else "KILLED")
    assert (tmp_path / "mlartifacts").is_dir()
