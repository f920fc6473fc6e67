"""model.name: "module:Class": user model classes, and errors for invalid classes."""

import sys

import pytest
import torch

from raytrec.common.errors import ConfigError
from raytrec.config.models.base import MODELS
from raytrec.config.run_config import load_config
from raytrec.config.schema import Schema
from raytrec.models import build_model

SCHEMA = Schema.parse(
    {
        "labels": ["y"],
        "sparse": {"user": {"table": "user"}, "history": {"table": "user", "pooling": "sequence"}},
        "tables": {"user": {"rows": 9, "dim": 4}},
    },
    "test",
)

MODULE = """
import torch
from torch import nn

class Good(nn.Module):
    def __init__(self, schema, config):
        super().__init__()
        self.features = list(schema.sparse)
        self.layer = nn.Linear(4, config.options["width"])

    def forward(self, dense, pooled):
        return self.layer(pooled[self.features[0]]).sum(1)

class Towers(Good):
    def __init__(self, schema, config, tasks):
        super().__init__(schema, config)
        self.tasks = tasks

class Retrieves(Good):
    def query(self, dense, pooled):
        return pooled["user"]

    def item(self, dense, pooled):
        return pooled["history"]

class NoArguments(nn.Module):
    def __init__(self):
        super().__init__()

class OtherForward(Good):
    def forward(self, batch):
        return batch

class NoModule:
    def __init__(self, schema, config):
        pass

def function(schema, config):
    pass
"""


@pytest.fixture(autouse=True)
def user_modules(tmp_path, monkeypatch):
    (tmp_path / "models_of_mine.py").write_text(MODULE)
    (tmp_path / "broken_models.py").write_text("import there_is_no_such_module\n")
    (tmp_path / "wrong_models.py").write_text("import os\nos.there_is_no_such_name\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in ("models_of_mine", "broken_models", "wrong_models"):
        sys.modules.pop(name, None)


def section(name, **model):
    return load_config({"data": {"train": "d/train"}, "model": {"name": name, **model}}).model


def test_user_model_class_is_built():
    model = build_model(SCHEMA, section("models_of_mine:Good", options={"width": 3}))
    assert model.layer.out_features == 3
    assert model(torch.empty(2, 0), {"user": torch.ones(2, 4), "history": torch.ones(2, 4)}).shape == (2,)


def test_user_model_class_receives_tasks():
    made = section("models_of_mine:Towers", options={"width": 3})
    tasks = {"kind": 3, "clicked": 1}
    assert list(build_model(SCHEMA, made, tasks).tasks.items()) == list(tasks.items())
    assert list(build_model(SCHEMA, made).tasks.values()) == [1]


def test_user_retrieval_model_needs_query_and_item_methods():
    towers = {"query": ["us*"], "item": ["history"]}
    made = section("models_of_mine:Retrieves", options={"width": 3}, towers=towers)
    assert made.retrieves and made.tower_members(SCHEMA) == {"query": {"user"}, "item": {"history"}}
    assert hasattr(build_model(SCHEMA, made), "query")
    assert not section("models_of_mine:Good").retrieves
    with pytest.raises(ConfigError, match="no method query and no method item"):
        build_model(SCHEMA, section("models_of_mine:Good", options={"width": 3}, towers=towers))
    with pytest.raises(ConfigError, match=r"'usr' matches no feature .*; did you mean 'user'"):
        build_model(SCHEMA, section("models_of_mine:Retrieves", towers={"query": ["usr"], "item": ["user"]}))


@pytest.mark.parametrize(
    "name,message",
    [
        ("no_such_models:Good", "no module named 'no_such_models'"),
        ("models_of_mine:Goood", "no attribute 'Goood'; did you mean 'Good"),
        ("broken_models:Good", "no module named 'there_is_no_such_module'"),
        ("models_of_mine:NoModule", "not a subclass of torch.nn.Module"),
        ("models_of_mine:function", "not a subclass of torch.nn.Module"),
        ("models_of_mine:NoArguments", r"constructor does not accept \(schema, config\)"),
        ("models_of_mine:OtherForward", r"forward does not accept \(dense, pooled\)"),
    ],
)
def test_invalid_model_class_is_rejected(name, message):
    with pytest.raises(ConfigError, match=message):
        build_model(SCHEMA, section(name, options={"width": 3}))


def test_errors_inside_user_modules_propagate():
    with pytest.raises(AttributeError, match="there_is_no_such_name"):
        build_model(SCHEMA, section("wrong_models:Good"))


@pytest.mark.parametrize(
    "model,message",
    [
        ({"name": "models_of_mine"}, f"name set to one of {', '.join(MODELS.parts)}, or module:Class"),
        ({"name": "models_of_mine:a.b"}, "module:Class"),
        ({"cross_layers": 2}, "model.cross_layers: unknown key of model dlrm"),
        ({"name": "dcn", "cros_rank": 2}, "did you mean model.cross_rank"),
        ({"name": "sequence", "max_length": 0}, "model.max_length: "),
        ({"name": "two_tower"}, "model.towers: missing"),
        ({"name": "two_tower", "towers": {"query": ["a"], "items": ["b"]}}, "model.towers.item: missing"),
    ],
)
def test_model_section_rejects_invalid_keys(model, message):
    with pytest.raises(ConfigError) as error:
        load_config({"data": {"train": "d/train"}, "model": model})
    assert message in str(error.value), str(error.value)
