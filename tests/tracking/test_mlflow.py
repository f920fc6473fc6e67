"""The tracker on a real sqlite store."""

import pytest

from raytrec.config import load_config
from raytrec.errors import ConfigError
from raytrec.tracking.mlflow import Tracker, _without_password


def test_what_is_handed_over_is_in_the_store(tmp_path):
    from mlflow import MlflowClient

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    tracker = Tracker(uri, "exp", "run", tmp_path / "artifacts")
    run_id = tracker.ready()
    plan = {"tables": {"item*": {"sharding": "row_wise"}, "user": {"ranks": [0]}}}
    tracker.params(load_config({"data": {"train": "d/train"}, "plan": plan}))
    for step in range(50):
        tracker.metrics({"loss": 1 / (step + 1), "auc": None, "ne": float("nan")}, step)
    (tmp_path / "note.txt").write_text("kept")
    tracker.file(tmp_path / "note.txt")
    assert tracker.close("FINISHED") is None

    client = MlflowClient(uri)
    run = client.get_run(run_id)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "run")
    assert run.data.params["optim.embeddings.name"] == "rowwise_adagrad"
    assert "'item*': {'sharding': 'row_wise'" in run.data.params["plan.tables"]
    assert set(run.data.metrics) == {"loss"}
    assert [m.step for m in client.get_metric_history(run_id, "loss")] == list(range(50))
    assert [a.path for a in client.list_artifacts(run_id)] == ["note.txt"]
    assert (tmp_path / "artifacts" / run_id / "artifacts/note.txt").read_text() == "kept"

    second = Tracker(uri, "exp", "again", tmp_path / "artifacts")
    assert second.ready() != run_id
    second.file(tmp_path / "missing.txt")
    assert "1 of 2 records did not reach MLflow" in second.close("FAILED")


def test_store_that_cannot_be_opened(tmp_path):
    (tmp_path / "file").write_text("")
    tracker = Tracker(f"sqlite:///{tmp_path}/file/mlflow.db", "exp", "run", tmp_path)
    with pytest.raises(ConfigError, match="cannot open the MLflow store"):
        tracker.ready()
    assert tracker.close("FAILED") is None


def test_passwords_are_hidden():
    assert _without_password("http://me:secret@host:5000/x") == "http://me:***@host:5000/x"
    assert _without_password("sqlite:////a/b.db") == "sqlite:////a/b.db"
