"""Optimizer state that is created for a checkpoint before the first step."""

import checkpoints
import pytest
import torch
from ranks import on_ranks
from small import batches, build, config, train


def misplaced(step, when):
    """Return the state tensors of fused and capturable groups that are not on their parameter's device."""
    from raytrec.compat.torchrec_ import iterate_torch_optimizers, unwrap_optimizer

    return [
        f"{when}: {name} of {type(inner).__name__} is on {value.device}, its parameter on {parameter.device}"
        for inner in iterate_torch_optimizers(unwrap_optimizer(step.optimizer))
        for group in inner.param_groups
        if group.get("fused") or group.get("capturable")
        for parameter in group["params"]
        for name, value in inner.state[parameter].items()
        if isinstance(value, torch.Tensor) and value.device != parameter.device
    ]


def built(rank, world, name, plan):
    """Return a Step whose dense layers have this optimizer, with the state that checkpoints hold."""
    from raytrec.checkpoint.state import LogicalState

    settings = config(world, plan, ema=0.9)
    settings.optim.dense.name = name
    step = build(settings, device=f"cuda:{rank}")
    LogicalState(step.model, step.optimizer)
    return step


def places(rank, world, name, plan, folder):
    """Build, train, save and restore a model; return the misplaced state after each of these operations."""
    step, local = built(rank, world, name, plan), batches(2, rank, world)[1]
    found = misplaced(step, "built")
    train(step, local)
    checkpoints.save(folder, step, 2)
    other = built(rank, world, name, plan)
    checkpoints.restored(folder, other)
    found += misplaced(step, "trained") + misplaced(other, "restored")
    train(other, local)
    return found + misplaced(other, "trained on")


@pytest.mark.parametrize("plan", ["data_parallel", "row_wise"])
@pytest.mark.parametrize("name", ["adam", "adagrad", "sgd"])
def test_fused_optimizer_state_is_on_the_parameter_device(name, plan, tmp_path):
    assert on_ranks(2, places, name, {"sharding_type": plan}, str(tmp_path), device="cuda") == [[], []]
