"""train.activation_checkpointing: bit-identical results from less memory."""

import pytest
import small
import torch
from ranks import run_on_ranks

MODELS = {
    "dlrm": {"name": "dlrm", "bottom_mlp": [6], "top_mlp": [6], "dropout": 0.5},
    "dcn": {"name": "dcn", "bottom_mlp": [6], "cross_layers": 3, "top_mlp": [6], "dropout": 0.5},
    "two_tower": {
        "name": "two_tower",
        "towers": {"query": ["a", "user", "tags"], "item": ["b", "friends"]},
        "tower_mlp": [6, 5],
    },
    "sequence": {"name": "sequence", "max_length": 3, "target": "user", "top_mlp": [6]},
}


def train_four_steps(rank, world, model, recomputed, changes):
    """Return the losses of four steps, and all weights and optimizer state after the last step."""
    from raytrec.config.features import resolve_features

    changes = {"activation_checkpointing": recomputed, **changes}
    settings = small.make_small_config(world, {"sharding_type": "row_wise"}, model=model, **changes)
    schema = small.SCHEMA.model_copy(deep=True)
    if model["name"] == "sequence":
        schema.sparse["tags"].pooling = schema.sparse["friends"].pooling = "sequence"
    step, features = small.build_step_on_rank(settings, schema), resolve_features(schema, settings.model)
    outputs = small.train_step(step, small.make_batches(4, rank, world, schema=schema, features=features)[1])
    return [each.loss for each in outputs], small.copy_local_state(step)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("changes", [{}, {"matmul": "bf16", "max_grad_norm": 0.1, "on_nan": "skip"}])
def test_activation_checkpointing_keeps_results_bit_identical(name, world, changes):
    plain, recomputed = (run_on_ranks(world, train_four_steps, MODELS[name], on, changes) for on in (False, True))
    for (losses, state), (others, other) in zip(plain, recomputed, strict=True):
        assert losses == others and all(loss.isfinite() for loss in losses)
        small.assert_same_state(state, other)


def count_saved_bytes(model, dense, pooled):
    """Return the bytes that autograd saves in the forward pass, without parameters and inputs."""
    theirs = {t.untyped_storage().data_ptr() for t in [dense, *pooled.values(), *model.parameters()]}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in theirs:
            kept[storage.data_ptr()] = storage.nbytes(), tensor  # kept alive so its address is not reused
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(dense, pooled).sum().backward()
    return sum(size for size, _ in kept.values())


def test_activation_checkpointing_reduces_saved_activations():
    from raytrec.models import build_model
    from raytrec.models.recommender import checkpoint_activations

    section = {"name": "dcn", "bottom_mlp": [64], "cross_layers": 6, "top_mlp": [64, 64, 64]}
    model = build_model(small.SCHEMA, small.make_small_config(1, {}, model=section).model)
    dense = torch.rand(256, 2)
    pooled = {name: torch.rand(256, 8, requires_grad=True) for name in small.SCHEMA.sparse}
    before = count_saved_bytes(model, dense, pooled)
    checkpoint_activations(model)
    assert 0 < count_saved_bytes(model, dense, pooled) < before / 2
