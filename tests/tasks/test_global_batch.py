"""The loss that each rank takes the gradient of."""

import pytest
import torch
from ranks import on_ranks
from small import batches as small_batches
from small import build, config, train

from raytrec.common.errors import RunError
from raytrec.tasks.global_batch import rank_loss


def test_ranks_losses_average_to_the_loss_of_the_global_batch():
    losses = torch.arange(1.0, 11)
    parts = [losses[:3], losses[3:3], losses[3:]]
    mine = [
        rank_loss(
            torch.cat([part, torch.full((2,), 99.0)]),
            torch.tensor([1.0] * len(part) + [0, 0]),
            10,
            3,
        )
        for part in parts
    ]
    assert float(sum(mine)) / 3 == pytest.approx(55 / 10)


def switches(rank, world):
    """TorchRec's process-wide switch after a training, and the message where it was off before."""
    from torchrec.distributed import comm_ops

    train(
        build(config(world, {"sharding_type": "row_wise"}, max_grad_norm=0.1)),
        small_batches(2, rank, world)[1],
    )
    after = comm_ops.get_gradient_division(), comm_ops.get_use_sync_collectives()
    comm_ops.set_gradient_division(False)
    try:
        build(config(world, {"sharding_type": "row_wise"}))
    except RunError as error:
        return after, str(error)
    finally:
        comm_ops.set_gradient_division(True)


def test_nothing_of_torchrecs_is_switched_and_what_was_is_seen():
    for after, message in on_ranks(2, switches):
        assert after == (True, False)  # as torchrec comes
        assert "gradient division is switched off" in message
