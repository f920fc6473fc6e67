"""Common properties of feature models: row independence, dropout, gradients, precision, outputs."""

import pytest
import torch
from made import ROWS, assert_learns, assert_rows_independent, inputs, make, schema

KEYS = {
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
    "wukong": {"bottom_mlp": [6], "fmb_mlp": [6], "top_mlp": [6]},
    "pepnet": {"domain": ["tags"], "personal": ["user", "item"], "tower_mlp": [6]},
}
TASKS = {"y": 1, "z": 1}
# Models whose outputs share all layers except the last.
SHARED_LAYER_MODELS = {
    "dlrm": {"bottom_mlp": [3], "top_mlp": [6]},
    "dcn": {"cross_layers": 1, "top_mlp": [6], "deep": "parallel"},
    "sequence": {"max_length": 5, "top_mlp": [6]},
    "two_tower": {"towers": {"query": ["user", "age", "history"], "item": ["item", "price"]}},
}


def made(name, dense=("age", "price"), **more):
    of = schema(dense=dense)
    return make(name, of, 2, tasks=TASKS, **KEYS[name] | more), *inputs(of)


@pytest.mark.parametrize("name", KEYS)
@pytest.mark.parametrize("dense", [("age", "price"), ()])
def test_models_keep_rows_independent(name, dense):
    model, columns, pooled = made(name, dense)
    assert model(columns, pooled).shape == (ROWS, 2)
    assert_rows_independent(model, columns, pooled)


@pytest.mark.parametrize("name", KEYS)
def test_gradients_reach_all_parameters_and_features(name):
    """Ranks wait for the gradient of each parameter, so every parameter needs a gradient."""
    model, columns, pooled = made(name)
    assert_learns(model, columns.requires_grad_(), pooled)
    assert columns.grad.isfinite().all() and columns.grad.any()


@pytest.mark.parametrize("name", KEYS)
def test_dropout_applies_only_in_training(name):
    model, columns, pooled = made(name, dropout=0.5)
    assert not torch.equal(model(columns, pooled), model(columns, pooled))
    plain, _, _ = made(name)
    assert torch.equal(model.eval()(columns, pooled), plain(columns, pooled))


@pytest.mark.parametrize("name", KEYS)
def test_empty_bags_have_finite_logits_and_gradients(name):
    model, columns, pooled = made(name)
    pooled = {f: torch.zeros_like(x, requires_grad=True) for f, x in pooled.items()}
    given = model(torch.zeros_like(columns), pooled)
    given.sum().backward()
    assert torch.isfinite(given).all() and all(torch.isfinite(x.grad).all() for x in pooled.values())


@pytest.mark.parametrize("name", KEYS)
def test_bfloat16_logits_are_close_to_float32(name):
    model, columns, pooled = made(name)
    with torch.autocast("cpu", torch.bfloat16):
        rough = model(columns, pooled).float()
    torch.testing.assert_close(rough, model(columns, pooled), rtol=0.1, atol=0.1)


@pytest.mark.parametrize("name", SHARED_LAYER_MODELS)
def test_outputs_share_all_layers_except_the_last(name):
    of = schema("user", "item", "history")
    model, (dense, found) = make(name, of, 3, **SHARED_LAYER_MODELS[name]), inputs(of)
    if name != "sequence":
        found["history"] = torch.randn(ROWS, 8)
    logits = model(dense, found)
    assert logits.shape == (ROWS, 3)
    logits[:, 1].sum().backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(grad is not None for grad in grads.values())
    of_last = next((grad for name, grad in grads.items() if name.endswith("logit.weight")), None)
    if of_last is not None:
        assert (of_last.abs().sum(1) > 0).tolist() == [False, True, False]
    assert make(name, of, **SHARED_LAYER_MODELS[name])(dense, found).shape == (ROWS,)
