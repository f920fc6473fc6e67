"""The gradient norm used for clipping: all dense layers and all touched table rows, each counted once."""

import pytest
import torch
from ranks import run_on_ranks
from small import (
    build_step_on_rank,
    gather_weights,
    make_batches,
    make_reference_model,
    make_small_config,
    max_weight_difference,
    train_step,
)
from standin import StandInGpu

from raytrec.checks.parity import reference
from raytrec.embeddings.taps import rank_distinct_ids


def run_clipped_step(rank, world, plan, max_norm):
    """Return the norm of a clipped step, the reference's norm, and the largest weight difference."""
    settings = make_small_config(world, plan, "sgd", lr=1.0, max_grad_norm=max_norm)
    step = build_step_on_rank(settings)
    one, (whole, local) = make_reference_model(step, settings), make_batches(1, rank, world)
    train_step(step, local)
    optimizers = [torch.optim.SGD(one.tables.values(), lr=1.0), torch.optim.SGD(one.model.parameters(), lr=0.1)]
    reference.train(one, whole, [])
    norm = torch.stack([p.grad.square().sum() for p in one.parameters()]).sum().sqrt()
    reference.train(one, whole, optimizers, max_grad_norm=max_norm)
    error = max_weight_difference(gather_weights(step), one.tables)
    return float(step.optimizer.last_norm), float(norm), error


@pytest.mark.parametrize("max_norm", [0.1, 100.0])
@pytest.mark.parametrize(
    "world,plan",
    [
        (1, {"sharding_type": "table_wise"}),
        (2, {"sharding_type": "data_parallel"}),
        (2, {"sharding_type": "row_wise", "compute_kernel": "dense"}),
        (3, {"sharding_type": "row_wise"}),
        (2, ["table_wise", "data_parallel"]),
    ],
)
def test_clipping_norm_matches_one_process(world, plan, max_norm):
    for seen, expected, error in run_on_ranks(world, run_clipped_step, plan, max_norm):
        assert expected > 0.1 and seen == pytest.approx(expected, rel=1e-6)
        assert error < 1e-6


@pytest.mark.parametrize("count", [0, 1, 300])
def test_places_of_matches_unique_inverse(count):
    for dtype in (torch.int32, torch.int64):
        ids = torch.randint(0, 50, (count,), generator=torch.Generator().manual_seed(count), dtype=dtype)
        assert torch.equal(rank_distinct_ids(ids), ids.unique(return_inverse=True)[1])


def collect_clipping_waits(rank, world, plan):
    """Return the host's waits for the GPU in raytrec's clipping code, and the norm."""
    step = build_step_on_rank(make_small_config(world, plan, max_grad_norm=0.01), device=torch.device("cuda", rank))
    _, local = make_batches(3, rank, world)
    train_step(step, [batch.pin_memory() for batch in local])
    return [wait for wait in StandInGpu.active.waits if "optim.py:" in wait.ours], float(step.optimizer.last_norm)


@pytest.mark.slow
@pytest.mark.parametrize("plan", [{"sharding_type": "row_wise"}, ["table_wise", "data_parallel"]])
def test_clipping_does_not_wait_for_the_gpu(plan):
    for waits, norm in run_on_ranks(2, collect_clipping_waits, plan, device="cuda"):
        assert waits == [] and norm > 0.01
