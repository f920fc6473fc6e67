"""A model, a loss, a metric, a live check, a transform and a recipe, each one file of the user (own/).

The files are neither installed nor part of raytrec; they are in the working directory of the commands.
"""

import contextlib
import io
import json
import shutil
import sys
from pathlib import Path

import pytest

from raytrec.cli import main
from raytrec.common.errors import RunError
from raytrec.driver.run import train

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.survive]

OWN = Path(__file__).parent / "own"
CODE = ["shop_model:Linear", "shop_transform:share", "shop_loss:Hinge", "shop_metric:Accuracy"]
CODE.append("shop_check:Patience")
JOB = """\
run: {dir: runs/shop}
data:
  train: data/train
  test: data/test
  global_batch_size: 64
  lanes: 2
  transforms: [{do: "shop_transform:share", reads: [paid], writes: [share], options: {most: 50}}]
scaling: {num_workers: 1, device: cpu}
model: {name: "shop_model:Linear"}
tasks: [{loss: "shop_loss:Hinge", options: {margin: 0.5}, metrics: [auc, "shop_metric:Accuracy"]}]
optim: {embeddings: {lr: 0.1}, dense: {lr: 0.01}}
train: {log_every_steps: 10}
checkpoint: {every_steps: 10}
checks: {every_steps: 10, custom: {"shop_check:Patience": stop}}
tracking: {every_steps: 10}
"""


def run_command(*arguments):
    with pytest.raises(SystemExit) as ended:
        main([*arguments])
    assert not ended.value.code


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Create the working directory of the commands."""
    folder = tmp_path_factory.mktemp("shop")
    for file in OWN.glob("*.py"):
        shutil.copy(file, folder)
    (folder / "job.yaml").write_text(JOB)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", [*sys.path])
        for file in OWN.glob("*.py"):
            patch.delitem(sys.modules, file.stem, raising=False)
        yield folder


@pytest.fixture(scope="module")
def console_output(folder, ray_cluster):
    """Run the recipe, a run that its own check stops, and its resumption; return stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        run_command("prepare", "shop_recipe:prepare", "--out", "data", "--rows", "2000")
        with pytest.raises(RunError, match="twenty steps are enough") as stopped:
            train("job.yaml")
        assert stopped.value.where == "step 20, patience"
        run_command("train", "--resume", "runs/shop", "checks.custom={'shop_check:Patience': warn}")
    return " ".join(out.getvalue().split()), " ".join(err.getvalue().split())


def test_user_recipe_writes_the_data_set(folder, console_output):
    facts = json.loads((folder / "data/prepared.json").read_text())
    assert facts["options"] == {"recipe": "shop", "rows": 2000, "seed": 0}
    assert "train 2,000, valid 2,000, test 2,000 rows" in console_output[1]


def test_result_json_contains_user_parts(folder, console_output):
    result = json.loads((folder / "runs/shop/result.json").read_text())
    assert result["code"] == CODE
    assert 0.7 < result["eval.right_side"] <= 1 and result["eval.auc"] > 0.9
    assert [metric["key"] for metric in result["metrics"]] == ["auc", "right_side"]
    assert result["train.rows"] == 2000 and result["train.steps"] == 32
    assert result["train.checks_failed"] == 2, "one in the stopped run, one after the resumption"


def test_console_shows_user_parts(console_output):
    out, err = console_output
    assert "accuracy (share of rows)" in out and f"your code {', '.join(CODE)}" in out
    assert "resuming at step 10" in err and "check patience failed at step 20: twenty steps" in err
    assert "accuracy" in err, "progress lines show the metric"


def test_report_shows_user_parts(folder, console_output):
    page = (folder / "runs/shop/report.html").read_text()
    for text in (*CODE, "accuracy (share of rows)", "patience at step 20: twenty steps are enough"):
        assert text in page, text


def test_mlflow_contains_user_parts(folder, console_output):
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/runs/mlflow.db")
    result = json.loads((folder / "runs/shop/result.json").read_text())
    run = client.get_run(result["mlflow_run_id"])
    assert run.data.metrics["eval/right_side"] == pytest.approx(result["eval.right_side"])
    assert {m.step for m in client.get_metric_history(run.info.run_id, "train/right_side")} >= {10, 20, 30}
    found = {m.step: m.value for m in client.get_metric_history(run.info.run_id, "watch/check/patience")}
    assert {10: 1, 20: 0, 30: 1}.items() <= found.items()
    assert run.data.params["model.name"] == "shop_model:Linear"
    params = {*run.data.params.values(), *map(str, run.data.params)}
    for name in CODE:
        assert any(name in text for text in params), name
