"""Compute losses that compare rows of the global batch.

Each rank computes the losses of its rows from the logits of all ranks, and their gradient for all logits. The
gradients are summed over ranks, and each rank keeps the gradients of its rows. Therefore, values and
gradients are the same as in one process that holds the whole batch.
"""

from __future__ import annotations

from typing import Any

import torch

from raytrec.common.collectives import Peers
from raytrec.tasks.losses import BatchLoss, Rows

# Number of row pairs compared at a time. Each float32 tensor takes 64 MiB, or 256 MiB on a GPU, where each
# piece requires a few dozen kernel launches.
MAX_PAIRS_AT_ONCE = {"cpu": 1 << 24, "cuda": 1 << 26}


def compute_batch_loss(loss: BatchLoss, rank_rows: Rows, factors_B: torch.Tensor, world: int) -> torch.Tensor:
    """Return this rank's part of a loss that compares rows of the global batch.

    This is a collective operation: every rank must call it.

    Args:
        loss: Loss of the task.
        rank_rows: Rows of this rank, including padding; every rank has the same number of rows.
        factors_B: Factors of these rows' losses, float32 [B].
        world: Number of ranks.

    Returns:
        Float32 scalar. If gradients are enabled, its gradient for `rank_rows.logits` is the gradient of the
        sum over the global batch.
    """
    count, gradient, peers = len(rank_rows.labels), torch.is_grad_enabled(), Peers(alone=world == 1)
    batch, first = (_gather_rows(rank_rows, peers), peers.rank * count) if world > 1 else (rank_rows, 0)
    logits = batch.logits.detach().requires_grad_(gradient)
    batch, size = (batch._replace(logits=logits), max(1, MAX_PAIRS_AT_ONCE[logits.device.type] // len(batch.labels)))
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
    return _PrecomputedGradient.apply(
        rank_rows.logits, value, peers.reduce_scatter_sum(grads.view(peers.world, *rank_rows.logits.shape))
    )


def _gather_rows(rows: Rows, peers: Peers) -> Rows:
    """Return the rows of all ranks in the order of ranks.

    This is a collective operation: every rank must call it.
    """
    width = rows.logits[0].numel()
    flat = torch.cat([rows.logits.detach().view(-1, width), torch.stack([rows.labels, rows.weights], 1)], 1)
    numbers = peers.stack(flat).flatten(0, 1)
    logits = numbers[:, :width].reshape(-1, *rows.logits.shape[1:])
    keys, counts = (None if x is None else peers.stack(x).flatten(0, 1) for x in (rows.keys, rows.counts))
    return Rows(logits, numbers[:, width], numbers[:, width + 1], keys, counts)


class _PrecomputedGradient(torch.autograd.Function):
    """Autograd function that returns a value whose gradient for the logits is already known."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, value: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gradient)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.saved_tensors[0] * grad, None, None
