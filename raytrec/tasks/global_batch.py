"""Each rank's part of the loss of a global batch.

    loss = Σ over the rows of the global batch of the row's loss ÷ rows of the global batch

Of requests with candidates, each candidate is a row here.

A row's loss counts by its weight in the task: 0 where it has no label or a mask excludes it, else its sample
weight. Such rows stay among those that are divided by. Losses of several tasks are multiplied by their
`weight` and added.

TorchRec divides table gradients by the world size (its gradient division stays on) and
DistributedDataParallel averages dense gradients over ranks. So each rank's loss is

    world_size × Σ over its own rows ÷ rows of the global batch

and both kinds of gradient become exactly those of the definition, for equal, unequal and empty parts.

Of a loss that compares rows, each rank computes the terms of its rows, given the logits of all ranks, and
their gradient for all logits; the gradients are added up over ranks, and each keeps those of its rows. So
values and gradients are those of one process that has the whole batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torchrec.distributed import comm_ops

from raytrec.common.collectives import Peers
from raytrec.common.errors import RunError
from raytrec.tasks.losses import BatchLoss, Rows

# Pairs of rows that are compared together: 64 MiB for each number about them; on a GPU, which launches a few
# dozen kernels for each piece, 256 MiB.
AT_ONCE = {"cpu": 1 << 24, "cuda": 1 << 26}


def require_gradient_division() -> None:
    """Raises RunError where TorchRec's division has been switched off for the whole process."""
    if not comm_ops.get_gradient_division():
        raise RunError(
            "TorchRec's gradient division is switched off in this process",
            where="torchrec.distributed.comm_ops.set_gradient_division(False)",
            expected="True, TorchRec's default: raytrec's loss is weighted for it",
            do="remove that call, or set it back to True",
        )


def rank_loss(
    losses_B: torch.Tensor, weights_B: torch.Tensor, rows: int | torch.Tensor, world: int, weight: float = 1.0
) -> torch.Tensor:
    """The scalar that one rank calls backward on.

    Args:
        losses_B: float [B], the loss of each row.
        weights_B: float [B], the factor of each row; 0 for padding.
        rows: of the global batch over all ranks, padding not counted.
        world: number of ranks.
        weight: a factor of the whole: of a task among several.
    """
    return (losses_B * weights_B).sum() * (weight * world / rows)


def compared_loss(loss: BatchLoss, own: Rows, factors_B: torch.Tensor, world: int) -> torch.Tensor:
    """What this rank's rows add to a loss that compares rows of the global batch; a collective.

    Args:
        own: this rank's rows, as many as every rank has, padding included.
        factors_B: float32 [B], by which the losses of these rows count.

    Returns:
        Float32 scalar. Where gradients are enabled, it has the gradient of the sum over the global batch for
        `own.logits`.
    """
    count, gradient, peers = len(own.labels), torch.is_grad_enabled(), Peers(alone=world == 1)
    batch, first = (_of_all_ranks(own, peers), peers.rank * count) if world > 1 else (own, 0)
    logits = batch.logits.detach().requires_grad_(gradient)
    batch, size = batch._replace(logits=logits), max(1, AT_ONCE[logits.device.type] // len(batch.labels))
    losses, grads = [], torch.zeros_like(logits, requires_grad=False)
    for start in range(0, count, size):
        stop = min(start + size, count)
        losses_B = loss.of_batch(batch, slice(first + start, first + stop)) * factors_B[start:stop]
        if gradient:
            grads += torch.autograd.grad(losses_B.sum(), logits)[0]
        losses.append(losses_B.detach())
    value = torch.cat(losses).sum()
    if not gradient:
        return value
    return _Given.apply(own.logits, value, peers.sum_own(grads.view(peers.world, *own.logits.shape)))


def _of_all_ranks(own: Rows, peers: Peers) -> Rows:
    """The rows of all ranks, in the order of ranks; a collective."""
    width = own.logits[0].numel()
    mine = torch.cat([own.logits.detach().view(-1, width), torch.stack([own.labels, own.weights], 1)], 1)
    numbers = peers.stack(mine).flatten(0, 1)
    logits = numbers[:, :width].reshape(-1, *own.logits.shape[1:])
    keys, counts = (None if x is None else peers.stack(x).flatten(0, 1) for x in (own.keys, own.counts))
    return Rows(logits, numbers[:, width], numbers[:, width + 1], keys, counts)


class _Given(torch.autograd.Function):
    """A value whose gradient for some logits has been computed before."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, value: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gradient)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.saved_tensors[0] * grad, None, None
