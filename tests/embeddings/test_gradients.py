"""The loss that each rank takes the gradient of, and its gradient piece by piece."""

import pytest
import torch
from ranks import on_ranks
from small import batches as small_batches
from small import build, config, train
from torch import nn

from raytrec.common.errors import RunError
from raytrec.embeddings.gradients import PieceByPiece, rank_loss


@pytest.mark.parametrize("reduction,divisor", [("mean", 10), ("sum", 1)])
def test_ranks_losses_average_to_the_loss_of_the_global_batch(reduction, divisor):
    losses = torch.arange(1.0, 11)
    parts = [losses[:3], losses[3:3], losses[3:]]
    mine = [
        rank_loss(
            torch.cat([part, torch.full((2,), 99.0)]),
            torch.tensor([1.0] * len(part) + [0, 0]),
            10,
            3,
            reduction,
        )
        for part in parts
    ]
    assert float(sum(mine)) / 3 == pytest.approx(55 / divisor)


@pytest.mark.parametrize(
    "pieces", [[slice(0, 7)], [slice(0, 4), slice(4, 7)], [slice(i, i + 1) for i in range(7)]]
)
def test_piece_by_piece_is_the_gradient_of_the_whole(pieces):
    torch.manual_seed(0)
    model, unused = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 1)), nn.Parameter(torch.ones(2))
    a, b = torch.randn(7, 2, requires_grad=True), torch.randn(7, 3, requires_grad=True)
    alive = []

    def loss_of(rows, inputs):
        alive.append(len(inputs[0]))
        return model(torch.cat(inputs, 1)).square().sum()

    parameters = [*model.parameters(), unused]
    whole = loss_of(None, [a, b])
    expected = torch.autograd.grad(2 * whole, [a, b, *model.parameters()])
    alive.clear()
    loss = PieceByPiece.apply(loss_of, pieces, 2, a, b, *parameters)
    (2 * loss).backward()
    assert alive == [rows.stop - rows.start for rows in pieces]
    torch.testing.assert_close(loss, whole.detach())
    for got, wanted in zip([a.grad, b.grad, *(p.grad for p in model.parameters())], expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-7)
    assert unused.grad.tolist() == [0, 0]


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
