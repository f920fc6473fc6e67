"""Test a complete run on request data: training, checks, resume, evaluation, prediction and export."""

import shutil

import checkpoints
import numpy as np
import parquet
import pyarrow.parquet as pq
import pytest
import request_rows
import small
import torch
from json_lines import read_json_lines

from raytrec.common.errors import ConfigError, DataError
from raytrec.config.run_config import load_config
from raytrec.driver import run as driver
from raytrec.driver.evaluation import evaluate
from raytrec.driver.preflight import check_fit
from raytrec.exporting.export import export
from raytrec.prediction.predict import predict
from raytrec.scoring.load import load as load_export

pytestmark = pytest.mark.slow

TASKS = [
    {"name": "click"},
    {"name": "list", "loss": "listwise_softmax", "options": {"learn_temperature": True}, "weight": 0.5},
]
MODEL = {"name": "din", "target": "item", "max_length": 5, "attention_mlp": [4], "top_mlp": [8]}
TOWERS = {"name": "mf", "user": "user", "item": "item"}
SHORT_INTERVALS = {"checks": {"every_steps": 2}, "checkpoint": {"every_steps": 5}}
SHORT_INTERVALS["tracking"] = {"every_steps": 2, "report": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Dataset of requests; flat/ contains one row per candidate."""
    folder = tmp_path_factory.mktemp("requests")
    for seed, (split, rows) in enumerate({"train": 300, "valid": 101, "test": 103}.items()):
        made = request_rows.make_request_table(rows, seed)
        for place, of in (folder, made), (folder / "flat", request_rows.repeat_by_candidate(made)):
            (place / split).mkdir(parents=True)
            pq.write_table(of, place / split / "a.parquet", row_group_size=50)
    (folder / "schema.yaml").write_text(request_rows.SCHEMA.to_yaml())
    return folder


@pytest.fixture(scope="module")
def run(folder, ray_cluster, tmp_path_factory):
    values = parquet.config_values(folder, tmp_path_factory.mktemp("run") / "run", data__global_batch_size=32)
    return driver.train(values | {"model": MODEL, "tasks": TASKS} | SHORT_INTERVALS)


def test_request_run_passes_checks_and_counts_requests(run):
    checks = read_json_lines(run.path / "checks.jsonl")
    assert {line["check"] for line in checks if line["passed"]} >= {"parity", "conservation"}
    assert all(line["passed"] for line in checks)
    assert run.metrics["eval.rows"] == 103


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.survive), 2])
def test_request_run_resumed_mid_epoch_matches_the_original(run, tmp_path, workers):
    other = tmp_path / "run"
    shutil.copytree(run.path, other)
    (other / "result.json").unlink()
    shutil.rmtree(checkpoints.newest_checkpoint(other))
    driver.train(None, [f"scaling.num_workers={workers}"], resume=other)
    one, new = (checkpoints.read_tensors(checkpoints.newest_checkpoint(place)) for place in (run.path, other))
    assert one["dense/head.model.loss_log_temperatures/value"].abs() > 1e-5
    if workers == 1:
        # A listwise loss does not depend on the bias of its scores, so Adam moves the bias by rounding errors.
        for tensors in (one, new):
            tensors["dense/head.model.logit.bias/value"] = tensors["dense/head.model.logit.bias/value"][:1]
    for name, values in one.items():
        torch.testing.assert_close(new[name], values, rtol=0, atol=1e-5 if workers == 1 else 0)


def test_predict_and_export_accept_one_candidate_per_row(run, folder, tmp_path):
    flat = folder / "flat" / "test"
    predict(run.path, flat, tmp_path / "out", columns=["y"])
    out = pq.read_table(tmp_path / "out")
    export(run.path, tmp_path / "export", data=str(flat))
    rows = pq.read_table(flat).drop(["y"])
    scores = load_export(tmp_path / "export").predict(rows)
    assert len(out) == rows.num_rows
    for name in ("score_click", "score_list"):
        assert np.allclose(out[name].to_numpy(), np.asarray(scores[name]), atol=1e-6)
    figures = evaluate(run.path, str(folder / "test"), workers=1).metrics
    label, score = (out[name].to_numpy().astype(np.float64) for name in ("y", "score_click"))
    loss = -np.mean(label * np.log(score) + (1 - label) * np.log(1 - score))
    assert figures["eval.click.logloss"] == pytest.approx(loss, abs=1e-6) and figures["eval.rows"] == 103
    for command in (predict, export):
        with pytest.raises(DataError, match="contains lists of candidates"):
            command(run.path, **{"data": str(folder / "test"), "out": str(tmp_path / "other")})


@pytest.mark.parametrize(
    "key,changes",
    [
        ("model.lookup_l2", {"model": {"name": "dlrm", "lookup_l2": {"user": 0.1}}}),
        ("model.gives_loss", {"model": {"name": "mine:Model", "gives_loss": True}}),
        ("tasks[0].item", {"model": TOWERS, "tasks": [{"loss": "in_batch_softmax", "item": "g"}]}),
        ("eval.retrieval", {"model": TOWERS, "eval": {"retrieval": {"items": "x", "item": "item"}}}),
        ("train.compile=graphs", {"train": {"compile": "graphs"}}),
    ],
)
def test_request_data_rejects_unsupported_features(key, changes):
    config = small.make_small_config(1, {}).model_dump(by_alias=True) | changes
    config["data"] |= {"reserve_columns": ["g"], "valid": "unused"}
    with pytest.raises(ConfigError) as error:
        check_fit(load_config(config), request_rows.SCHEMA, on_this_machine=False)
    assert error.value.where == key
