"""Test `raytrec check` on a real worker group, with correct and with wrong arithmetic."""

import json
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import parquet
import pytest

import raytrec
from raytrec.cli import main
from raytrec.common.errors import ConfigError
from raytrec.driver import check
from raytrec.driver import run as driver
from raytrec.driver.run import describe_store

pytestmark = pytest.mark.slow


def settings(folder, tmp_path):
    tables = {"user": {"sharding_type": "column_wise", "ranks": [1, 0]}, "tag": {"sharding_type": "row_wise"}}
    return parquet.config_values(folder, tmp_path / "check") | {
        "plan": {"tables": tables},
        "optim": {"embeddings": {"name": "adagrad", "lr": 0.1}},
        "train": {"max_grad_norm": 1.0, "activation_checkpointing": True},
    }


@pytest.mark.usefixtures("ray_cluster")
def test_check_passes_and_records_findings(tiny_data, tmp_path, capsys):
    values = settings(tiny_data, tmp_path)
    values["train"]["matmul"] = "bf16"  # its rounding would fail every comparison
    values["plan"]["qcomms"] = {"backward_precision": "bf16"}
    result = check.check(values)
    assert result.passed
    said = " ".join("".join(capsys.readouterr()).split())
    for setting in ("train.matmul=bf16", "plan.qcomms.backward_precision=bf16"):
        assert f"checking in fp32, because {setting} would hide errors" in said
    compared = {f"{f['check']} {f['name']}" for f in result.findings}
    assert compared >= {"forward user", "forward tags", "gradient tag", "gradient logit.bias"}
    assert compared >= {"weights user", "state user.sum", "state tag.sum"}
    of = {entry["table"]: entry for entry in result.plan}
    assert of["user"]["sharding_type"] == "column_wise" and of["user"]["ranks"] == [1, 0]
    assert of["tag"]["sharding_type"] == "row_wise" and of["tag"]["compute_kernel"] == "fused"

    kept = json.loads((result.path / "check.json").read_text())
    assert kept["passed"] is True and kept["failed"] == 0
    assert kept["findings"] == result.findings
    assert kept["check.forward.error"] == max(f["error"] for f in result.findings if f["check"] == "forward")

    from mlflow import MlflowClient

    run = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db").get_run(result.mlflow_run_id)
    assert run.info.status == "FINISHED"
    assert run.data.metrics["check.gradient.error"] == pytest.approx(kept["check.gradient.error"])
    assert run.data.metrics["failed"] == 0


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("command", [check.check, driver.train])
def test_invalid_plan_is_rejected_before_workers_start(tiny_data, tmp_path, capfd, command):
    values = parquet.config_values(tiny_data, tmp_path / "run") | {"plan": {"tables": {"user": {"ranks": [2]}}}}
    with pytest.raises(ConfigError, match="table user: there is no rank 2"):
        command(values)
    assert "starting the workers" not in capfd.readouterr().err


# Name → (file, correct code, wrong code, expected output); applied to a copy of the package.
SABOTAGE = {
    "means are not divided": (
        "embeddings/pooling.py",
        "/ totals_FB[index].unsqueeze(1)",
        "",
        ["FAIL  tags (pooled embeddings)", "FAIL  tag (gradient)"],
    ),
    "gradients are divided by the number of workers": (
        "tasks/objective.py",
        "(weight * world / ",
        "(weight / ",
        ["FAIL  user (gradient)", "FAIL  logit.bias (gradient)", "FAIL  user.sum (state, 20 steps)"],
    ),
}


@pytest.mark.parametrize("is_writable", [True, False])
def test_failed_check_prints_and_stores_its_findings(tmp_path, monkeypatch, capsys, is_writable):
    """The findings are made up; test_check_detects_wrong_arithmetic produces real ones."""
    limits = {"forward": 1e-6, "gradient": 1e-5}
    findings = [
        dict(check=check, name=name, error=error, absolute=error, limit=limits[check], passed=passed)
        for check, name, error, passed in (
            ("forward", "tags", 0.5, False),
            ("forward", "user", 0.0, True),
            ("gradient", "tag", None, False),
        )
    ]
    found = {"findings": findings, "plan": [], "world_size": 2}
    monkeypatch.setattr(check, "run_group", lambda *_, **__: found)
    monkeypatch.setattr(check, "open_session", lambda config: nullcontext())
    (tmp_path / "schema.yaml").write_text(parquet.SCHEMA_YAML)
    (tmp_path / "run.json").write_text(json.dumps(settings(tmp_path, tmp_path)))  # JSON is YAML
    if not is_writable:
        (tmp_path / "check/check.json").mkdir(parents=True)
    with patch("raytrec.cluster.session.warm_up_early"), pytest.raises(SystemExit) as ended:
        main(["check", str(tmp_path / "run.json")])
    assert ended.value.code == 1
    said = capsys.readouterr()
    if not is_writable:
        assert "error: cannot write the folder of the check: Is a directory" in said.err
        return
    assert "FAIL  tags (pooled embeddings): relative error 5.0e-01, limit 1e-06" in said.out
    assert "FAIL  tag (gradient): relative error not finite, limit 1e-05" in said.out
    kept = json.loads((tmp_path / "check/check.json").read_text())
    assert (kept["passed"], kept["failed"], kept["comparisons"]) == (False, 2, 3)


def test_check_names_the_address_of_an_mlflow_server():
    assert describe_store("http://tracking:5000") == "MLflow       http://tracking:5000"
    assert describe_store("sqlite:////m/mlflow.db").endswith("mlflow ui --backend-store-uri sqlite:////m/mlflow.db")


# Each case runs the command in a subprocess.
@pytest.mark.survive
@pytest.mark.parametrize("name", SABOTAGE)
def test_a_check_that_fails(tiny_data, tmp_path, name):
    file, right, wrong, message = SABOTAGE[name]
    package = tmp_path / "raytrec"
    shutil.copytree(Path(raytrec.__file__).parent, package)
    code = (package / file).read_text()
    assert code.count(right) == 1
    (package / file).write_text(code.replace(right, wrong))
    (tmp_path / "run.json").write_text(json.dumps(settings(tiny_data, tmp_path)))  # JSON is YAML
    result = subprocess.run(
        [sys.executable, "-m", "raytrec", "check", "run.json"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert result.returncode == 1, result.stderr
    assert "Traceback" not in result.stderr
    assert "FAIL" in result.stdout
    for line in message:
        assert line in result.stdout
    assert json.loads((tmp_path / "check/check.json").read_text())["passed"] is False
