"""Test a complete run with a user-defined model, and the --allow-code option."""

import json
import os
import subprocess
import sys
from pathlib import Path

import parquet
import pytest

pytestmark = pytest.mark.cluster
USER_MODEL = """
from torch import nn

class Mine(nn.Module):
    '''Logits are a linear layer over the dense columns, the user and the newest tag.'''

    def __init__(self, schema, config):
        super().__init__()
        self.layer = nn.Linear(len(schema.dense) + 16, config.options["outputs"])

    def forward(self, dense, pooled):
        import torch
        newest = pooled["tags"].vectors[:, 0]
        return self.layer(torch.cat([dense, pooled["user"], newest], 1)).squeeze(1)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Dataset with tags as a sequence; its folder also contains a user-defined model."""
    folder = parquet.write_dataset(tmp_path_factory.mktemp("models") / "d")
    schema = folder / "schema.yaml"
    schema.write_text(schema.read_text().replace("pooling: mean", "pooling: sequence"))
    (folder / "models_of_mine.py").write_text(USER_MODEL)
    return folder


def raytrec(folder, *arguments):
    """Run the raytrec command in the dataset's folder."""
    return subprocess.run(
        [sys.executable, "-m", "raytrec", *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(Path(parquet.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=280,
    )


def settings(folder, tmp_path, model):
    values = parquet.config_values(folder, tmp_path / "run", train__epochs=2) | {"model": model}
    values["checks"] = {"every_steps": 10}
    values["tracking"] |= {"enabled": False}
    (tmp_path / "run.json").write_text(json.dumps(values))  # JSON is YAML
    return str(tmp_path / "run.json")


@pytest.mark.timeout(900)
def test_user_model_of_another_user_requires_allow_code(folder, tmp_path):
    model = {"name": "models_of_mine:Mine", "options": {"outputs": 1}, "max_length": 2}
    run = raytrec(folder, "train", settings(folder, tmp_path, model), "--json")
    assert run.returncode == 0, run.stderr
    metrics = json.loads(run.stdout)
    assert metrics["eval.auc"] > 0.75 and metrics["train.checks_failed"] == 0 < metrics["train.checks_passed"]
    data, place = str(folder / "test"), str(tmp_path / "run")
    again = raytrec(folder, "evaluate", place, "--data", data, "--json")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["eval.auc"] == pytest.approx(metrics["eval.auc"], abs=1e-6)
    (tmp_path / "run/config.yaml.mark").unlink()  # without the mark, the run counts as another user's
    for refused in (
        raytrec(folder, "evaluate", place, "--data", data),
        raytrec(folder, "train", "--warm-start", place, f"run.dir={tmp_path}/second"),
        raytrec(folder, "train", (tmp_path / "run.json").as_uri(), f"run.dir={tmp_path}/third"),
    ):
        assert refused.returncode == 1
        assert "servers to contact: model.name: models_of_mine:Mine" in refused.stderr
        assert "--allow-code" in refused.stderr and "Traceback" not in refused.stderr
    assert not (tmp_path / "second").exists() and not (tmp_path / "third").exists()
    allowed = raytrec(folder, "evaluate", place, "--data", data, "--allow-code")
    assert allowed.returncode == 0, allowed.stderr
    mistyped = settings(folder, tmp_path, model | {"name": "models_of_mine:Mein"})
    wrong = raytrec(folder, "train", mistyped, f"run.dir={tmp_path}/fourth")
    assert wrong.returncode == 1 and "did you mean 'Mine'" in wrong.stderr and "Traceback" not in wrong.stderr
