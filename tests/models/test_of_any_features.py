"""What all models of any features have in common: rows, dropout, gradients, precision."""

import pytest
import torch
from made import ROWS, inputs, randomized, schema
from pydantic import TypeAdapter

from raytrec.config.models import AnyModel
from raytrec.config.models.base import MODELS
from raytrec.models import build_model

SECTIONS = {
    "dcn": {"top_mlp": [6]},
    "dlrm": {"bottom_mlp": [], "top_mlp": [6]},
    "wide_deep": {"top_mlp": [6]},
    "deepfm": {"top_mlp": [6]},
    "xdeepfm": {"cin": [4], "top_mlp": [6]},
    "masknet": {"blocks": [6, 5], "top_mlp": [6]},
    "final_mlp": {"mlp1": [6], "mlp2": [6], "gate1": ["user"]},
    "shared_bottom": {"bottom_mlp": [6]},
    "mmoe": {"expert_mlp": [6]},
    "ple": {"expert_mlp": [6]},
    "esmm": {"click": "y", "conversion": "z"},
    "dbmtl": {"relation_mlp": [6]},
}
TASKS = {"y": 1, "z": 1}


def made(name, dense=("age", "price"), **more):
    of = schema(dense)
    section = TypeAdapter(AnyModel).validate_python({"name": name} | SECTIONS[name] | more)
    return randomized(build_model(of, section, 2, tasks=TASKS)), *inputs(of)


@pytest.mark.parametrize("name", SECTIONS)
def test_rows_do_not_know_of_each_other(name):
    """So that dealing them to ranks changes nothing; with dense columns and without."""
    for dense in (("age", "price"), ()):
        model, columns, pooled = made(name, dense)
        whole = model(columns, pooled)
        assert whole.shape == (ROWS, 2)
        for row in range(ROWS):
            rows = slice(row, row + 1)
            one = model(columns[rows], {f: x[rows] for f, x in pooled.items()})
            torch.testing.assert_close(one[0], whole[row])


@pytest.mark.parametrize("name", SECTIONS)
def test_every_parameter_and_every_feature_is_learned(name):
    """Ranks wait for the gradient of each parameter; there is one, and none is of no use."""
    model, columns, pooled = made(name)
    for x in (columns, *pooled.values()):
        x.requires_grad_()
    (model(columns, pooled).sigmoid() ** 2).sum().backward()
    for part, x in [*model.named_parameters(), ("columns", columns), *pooled.items()]:
        assert x.grad is not None and torch.isfinite(x.grad).all() and x.grad.any(), part


@pytest.mark.parametrize("name", SECTIONS)
def test_dropout_is_for_training_alone(name):
    model, columns, pooled = made(name, dropout=0.5)
    model.train()
    assert not torch.equal(model(columns, pooled), model(columns, pooled))
    model.eval()
    plain, _, _ = made(name)
    assert torch.equal(model(columns, pooled), plain(columns, pooled))


@pytest.mark.parametrize("name", SECTIONS)
def test_empty_bags_have_logits_and_gradients(name):
    model, columns, pooled = made(name)
    pooled = {f: torch.zeros_like(x, requires_grad=True) for f, x in pooled.items()}
    given = model(torch.zeros_like(columns), pooled)
    given.sum().backward()
    assert torch.isfinite(given).all() and all(torch.isfinite(x.grad).all() for x in pooled.values())


@pytest.mark.parametrize("name", SECTIONS)
def test_bfloat16_gives_nearly_the_same(name):
    model, columns, pooled = made(name)
    with torch.autocast("cpu", torch.bfloat16):
        rough = model(columns, pooled).float()
    torch.testing.assert_close(rough, model(columns, pooled), rtol=0.1, atol=0.1)


def test_names_of_sections_are_those_of_the_registry():
    assert set(SECTIONS) <= set(MODELS.parts)
