"""Optimizer state that is created for a checkpoint before the first step."""

import checkpoints
import pytest
import torch
from ranks import run_on_ranks
from small import build_step_on_rank, make_batches, make_small_config, train_step


def find_misplaced_state(step, when):
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


def build_with_state(rank, world, name, plan):
    """Return a Step whose dense layers have this optimizer, with the state that checkpoints hold."""
    from raytrec.checkpoint.state import LogicalState

    settings = make_small_config(world, plan, ema=0.9)
    settings.optim.dense.name = name
    step = build_step_on_rank(settings, device=f"cuda:{rank}")
    LogicalState(step.model, step.optimizer)
    return step


def collect_misplaced_state(rank, world, name, plan, folder):
    """Build, train, save and restore a model; return the misplaced state after each of these operations."""
    step, local = build_with_state(rank, world, name, plan), make_batches(2, rank, world)[1]
    found = find_misplaced_state(step, "built")
    train_step(step, local)
    checkpoints.save_checkpoint(folder, step, 2)
    other = build_with_state(rank, world, name, plan)
    checkpoints.restore_newest(folder, other)
    found += find_misplaced_state(step, "trained") + find_misplaced_state(other, "restored")
    train_step(other, local)
    return found + find_misplaced_state(other, "trained on")


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["data_parallel", "row_wise"])
@pytest.mark.parametrize("name", ["adam", "adagrad", "sgd"])
def test_fused_optimizer_state_is_on_the_parameter_device(name, plan, tmp_path):
    arguments = name, {"sharding_type": plan}, str(tmp_path)
    assert run_on_ranks(2, collect_misplaced_state, *arguments, device="cuda") == [[], []]
