"""Test a complete run with text ids and no vocabulary: training, resume, evaluation, prediction."""

import shutil

import checkpoints
import parquet
import pyarrow.parquet as pq
import pytest
import torch
from json_lines import read_json_lines

from raytrec.common.errors import DataError
from raytrec.driver import run as driver
from raytrec.driver.evaluation import evaluate
from raytrec.prediction.predict import predict

SCHEMA_YAML = parquet.SCHEMA_YAML.replace(
    "user: {rows: 40, dim: 8}", "user: {rows: 31, dim: 8, ids: {eviction: lfu}}"
).replace("tag: {rows: 12, dim: 8}", "tag: {rows: 13, dim: 8, ids: managed}")

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.survive]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Dataset of 40 users, of whom at most 30 have a row at a time."""
    folder = parquet.write_dataset(tmp_path_factory.mktemp("text"))
    (folder / "schema.yaml").write_text(SCHEMA_YAML)
    parquet.name_users(folder)
    return folder


@pytest.fixture(scope="module")
def run(folder, tmp_path_factory):
    often = {"checks__every_steps": 5, "tracking__every_steps": 5, "checkpoint__every_steps": 20}
    place = tmp_path_factory.mktemp("run") / "run"
    return driver.train(parquet.config_values(folder, place, train__epochs=3, **often))


def test_managed_run_learns_and_reports_id_metrics(run):
    assert run.metrics["eval.auc"] > 0.8
    of_ranks = [line["tables"] for line in read_json_lines(run.path / "ranks.jsonl")]  # the last rank may lack user
    figures = [tables["user"] for tables in of_ranks if "user" in tables][-1]
    assert figures["occupancy"] == 1 and figures["admitted_ids"] == figures["evicted_ids"] > 0
    assert 0 < figures["fallback_share"] < 0.3 and figures["id_age"] < 5
    checks = [line for line in read_json_lines(run.path / "checks.jsonl") if line["check"] == "managed_ids"]
    assert len(checks) > 3 and all(line["passed"] for line in checks)


def test_checkpoint_contains_the_managed_ids(run, folder, tmp_path):
    again = evaluate(run.path, str(folder / "test"), workers=1)
    assert again.metrics["eval.auc"] == pytest.approx(run.metrics["eval.auc"], abs=1e-6)
    predict(run.path, folder / "test", tmp_path / "out", columns=["label"])
    assert len(pq.read_table(tmp_path / "out")) == 1003


def test_numbers_are_not_ids_of_a_table_trained_on_text(run, tmp_path):
    """The same user as a number would have another row, and silently get another score."""
    parquet.write_split(tmp_path / "numbers", 50, 3)
    for command in (evaluate, lambda place, data: predict(place, data, tmp_path / "out")):
        with pytest.raises(DataError, match="the ids of feature 'user' are numbers, but text in the training data"):
            command(run.path, str(tmp_path / "numbers"))


@pytest.mark.parametrize("workers", [2, 3, 1])
def test_managed_run_resumes_with_another_worker_count(run, tmp_path, workers):
    other = tmp_path / "run"
    shutil.copytree(run.path, other)
    (other / "result.json").unlink()
    shutil.rmtree(checkpoints.newest_checkpoint(other))
    again = driver.train(None, [f"scaling.num_workers={workers}"], resume=other)
    assert again.metrics["eval.auc"] == pytest.approx(run.metrics["eval.auc"], abs=1e-4)
    one, new = (checkpoints.read_tensors(checkpoints.newest_checkpoint(place)) for place in (run.path, other))
    for name, values in one.items():
        if name.startswith("ids/") or workers == 2:
            assert torch.equal(new[name], values), name
        else:
            torch.testing.assert_close(new[name], values, rtol=0, atol=1e-4)
