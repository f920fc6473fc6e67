"""Losses that compare rows of the global batch.

Each rank computes the terms of its rows, given the logits of all ranks, and their gradient for all logits.
The gradients are summed over ranks, and each rank keeps those of its rows. Values and gradients are therefore
those of one process that has the whole batch.
"""

from __future__ import annotations

from typing import Any

import torch

from raytrec.common.collectives import Peers
from raytrec.tasks.losses import BatchLoss, Rows

# Pairs of rows that are compared together: 64 MiB for each number about them; on a GPU, which launches a few
# dozen kernels for each piece, 256 MiB.
AT_ONCE = {"cpu": 1 << 24, "cuda": 1 << 26}


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
