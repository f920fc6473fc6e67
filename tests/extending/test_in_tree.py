"""User parts added to a copy of the tree: each changes at most two files, and all train together."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

OWN, REPOSITORY = Path(__file__).parent / "own", Path(__file__).parents[2]
SECTION = '''\
@model("linear", "raytrec.models.linear:Linear")
class LinearSection(ModelSection):
    """One linear layer (models/linear.py)."""

    name: Literal["linear"] = Field(description="The model.")


'''
TRANSFORM = '''\
class Share(OnColumns):
    """Divide a number by `most`, and clip the result at 1."""

    do: Literal["share"] = Field(description="share")
    most: float = Field(description="Value that becomes 1.")


'''
FUNCTION = """\
@register_transform(t.Share)
def _share(spec: t.Share, array: pa.Array) -> pa.Array:
    return pc.min_element_wise(pc.divide(array, spec.most), 1.0)


"""
SETTING = '    patience: Reaction = Field("stop", description="The run ends within twenty steps.")\n'
JOB = """\
run: {dir: run}
data:
  train: data/train
  test: data/test
  global_batch_size: 64
  lanes: 2
  transforms: [{do: share, columns: [paid], into: [share], most: 50}]
scaling: {num_workers: 1, device: cpu}
model: {name: linear}
tasks: [{loss: hinge, options: {margin: 0.5}, metrics: [auc, right_side]}]
optim: {embeddings: {name: rmsprop, lr: 0.05}, dense: {lr: 0.01}}
train: {log_every_steps: 10}
checks: {every_steps: 10, patience: warn}
tracking: {enabled: false}
"""


def copy_file(tree, own, place):
    """Copy a file of the user to its place in the tree."""
    (tree / place).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(OWN / own, tree / place)


def insert_text(tree, place, before, text):
    """Insert text into a file before the only line that starts with `before`."""
    whole = (tree / place).read_text()
    assert len(re.findall(f"(?m)^{re.escape(before)}", whole)) == 1, f"{place}: {before}"
    (tree / place).write_text(re.sub(f"(?m)^{re.escape(before)}", lambda _: text + before, whole))


# Part → its changes of at most two files: (own file, place in the tree), or (file, start of a line, text inserted
# before it).
PARTS = {
    "model": [
        ("shop_model.py", "raytrec/models/linear.py"),
        ("raytrec/config/models/ranking.py", '@model("dcn"', SECTION),
    ],
    "loss": [("shop_loss.py", "raytrec/tasks/losses/hinge.py")],
    "metric": [("shop_metric.py", "raytrec/metrics/builtin/right_side.py")],
    "check": [
        ("shop_check.py", "raytrec/checks/live/patience.py"),
        ("raytrec/config/training.py", "    custom: dict[", SETTING),
    ],
    "optimizer": [("shop_optimizer.py", "raytrec/embeddings/optimizers/rmsprop.py")],
    "transform": [
        ("raytrec/config/transforms.py", "class Python(", TRANSFORM),
        ("raytrec/data/transform_functions.py", "@register_transform(t.DropNull)", FUNCTION),
    ],
    "recipe": [("shop_recipe.py", "datasets/shop/__init__.py")],
}


@pytest.fixture
def tree(tmp_path_factory):
    """Create a copy of the tree with all parts, laid out as an installation."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("raytrec", "datasets"):
        shutil.copytree(REPOSITORY / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for change in (change for changes in PARTS.values() for change in changes):
        (copy_file if len(change) == 2 else insert_text)(tree, *change)
    (tree / "raytrec_datasets").symlink_to("datasets")
    return tree


@pytest.mark.survive
def test_run_with_all_new_parts_succeeds(tree, tmp_path):
    def raytrec(*arguments):
        done = subprocess.run(
            [sys.executable, "-m", "raytrec", *arguments],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(tree)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    (tmp_path / "job.yaml").write_text(JOB)
    assert "Visits of a shop." in raytrec("prepare", "--help").stdout
    raytrec("prepare", "shop", "--out", "data", "--rows", "2000")
    done = raytrec("train", "job.yaml", "--json")
    result = json.loads(done.stdout)
    assert 0.7 < result["eval.right_side"] <= 1 and result["eval.auc"] > 0.9
    assert result["train.checks_failed"] == 1 and "code" not in result
    assert "check patience failed at step 20: twenty steps" in done.stderr
    page = (tmp_path / "run/report.html").read_text()
    assert "accuracy (share of rows)" in page and "patience at step 20" in page
    kept = json.loads(next((tmp_path / "run/checkpoints").glob("*/checkpoint.json")).read_text())["tensors"]
    for table in {name.split("/")[1] for name in kept if name.startswith("tables/")}:
        kinds = {name.split("/")[2] for name in kept if name.startswith(f"tables/{table}/")}
        assert kinds == {"weight", "square_avg", "step"}
    raytrec("check", "job.yaml", "tasks=[{loss: bce}]")
