"""The examples of docs/extending.md, all in one file of the user's, as they stand there."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
import torch
from ranks import on_ranks
from raytrec_datasets import app
from small import SCHEMA
from typer.testing import CliRunner

from raytrec.config.models import PythonSection
from raytrec.config.schema import Schema
from raytrec.config.tasks import TaskSection
from raytrec.data.transform import transformed
from raytrec.metrics.registry import find_metric
from raytrec.tasks.task import resolve_tasks

PAGE = Path(__file__).parents[2] / "docs/extending.md"


@pytest.fixture(autouse=True)
def mine(tmp_path, monkeypatch):
    blocks = re.findall(r"(?ms)^```python\n(.*?)^```", PAGE.read_text())
    assert len(blocks) == 6
    (tmp_path / "mine.py").write_text("\n\n".join(blocks))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    monkeypatch.chdir(tmp_path)


def loop(rank, world, model, checks):
    import loops

    return loops.loop(rank, world, loops.ROW_WISE, checks={"custom": checks}, model=model)


def test_the_model_and_the_check():
    answers = on_ranks(
        2, loop, PythonSection(name="mine:Net", options={"hidden": 4}), {"mine:Bounded": "stop"}
    )
    for outcomes in answers:
        mine = [outcome for outcome in outcomes if outcome["check"] == "bounded"]
        assert len(mine) >= 3 and all(one["passed"] and 0 < one["figure"] < 100 for one in mine)


def test_the_loss():
    (task,) = resolve_tasks([TaskSection(loss="mine:Huber", options={"delta": 2.0})], SCHEMA)
    assert task.metrics == ("mse", "mae")
    values = task.loss.of_rows(torch.tensor([0.0, 5.0]), torch.tensor([1.0, 0.0]))
    assert values.tolist() == [0.5, 2.0 * (5.0 - 1.0)]


def test_the_metric():
    found = find_metric("mine:Accuracy")
    rows = [[0.9, 0.2, 0.7], [1.0, 0.0, 0.0], [1.0, 1.0, 1.0]]
    outputs = SimpleNamespace(
        **dict(zip(("predictions", "labels", "weights"), map(torch.tensor, rows), strict=True))
    )
    assert float(found.figure(found.sums(outputs))) == pytest.approx(2 / 3)
    assert found.name == "accuracy" and found.better == "higher"


def test_the_transform():
    from raytrec.config.transforms import Python

    spec = Python(do="mine:ratio", reads=["clicks", "views"], writes=["ratio"], options={"smooth": 1})
    table = transformed(pa.table({"clicks": [1, 0], "views": [3, 9]}), (spec,), "here")
    assert table["ratio"].to_pylist() == [0.25, 0.0]


def test_the_recipe(tmp_path):
    done = CliRunner().invoke(app, ["mine:shop", "--out", str(tmp_path / "data"), "--rows", "10"])
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "data/prepared.json").read_text())["rows"]["train"] == 10
    assert Schema.load(tmp_path / "data/schema.yaml").labels == ["clicked"]
