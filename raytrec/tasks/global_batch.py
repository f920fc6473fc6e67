"""Compute losses that compare rows of the global batch.

Each rank computes the losses of its rows from the logits of all ranks, and the gradient of these losses with respect
to all logits. The gradients are summed over ranks, and each rank keeps the gradients of its rows. Therefore, values
and gradients are the same as in one process that holds the global batch. Losses within requests need no exchange,
because all candidates of a request are on one rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Any

import torch
from torch.nn.functional import pad

from raytrec.common.collectives import Peers
from raytrec.tasks.losses import BatchLoss, Rows

# Maximum number of row pairs compared at a time. A float32 tensor of them takes 64 MiB, or 256 MiB on a GPU, where
# comparing fewer pairs at a time would require more kernel launches.
MAX_PAIRS_AT_ONCE = {"cpu": 1 << 24, "cuda": 1 << 26}
# Maximum number of candidates of consecutive requests that are compared at once. In larger blocks, more pairs belong
# to different requests and are ignored. Smaller blocks require more kernel launches.
MAX_BLOCK_ROWS = {"cpu": 1 << 9, "cuda": 1 << 12}


def compute_batch_loss(
    loss: BatchLoss, rank_rows: Rows, factors_B: torch.Tensor, world: int, candidate_counts: Iterable[int] | None = None
) -> torch.Tensor:
    """Return this rank's part of a loss that compares rows of the global batch.

    Unless `candidate_counts` is given, this is a collective operation: every rank must call it.

    Args:
        loss: Loss of the task.
        rank_rows: Rows of this rank, including padding; every rank has the same number of rows, unless
            `candidate_counts` is given.
        factors_B: Factor of each row's loss, float32 [B].
        world: Number of ranks.
        candidate_counts: Number of rows of each request, to compare only rows of the same request; `rank_rows.keys`
            must then identify the requests. None: rows of the global batch are compared.

    Returns:
        Sum of the losses of this rank's rows, multiplied by their factors; float32 scalar. If gradients are enabled,
        the gradient with respect to `rank_rows.logits` is the gradient of the sum over the global batch.
    """
    gradient, peers = torch.is_grad_enabled(), Peers(alone=world == 1 or candidate_counts is not None)
    batch = rank_rows if peers.world == 1 else _gather_rows(rank_rows, peers)
    batch = batch._replace(logits=batch.logits.detach().requires_grad_(gradient))
    losses, grads = [factors_B[:0]], torch.zeros_like(batch.logits, requires_grad=False)
    for block, factors_b, first in _split_blocks(loss, batch, factors_B, peers.rank, candidate_counts):
        pairs = MAX_PAIRS_AT_ONCE[factors_b.device.type]
        size = max(1, len(factors_b) if loss.is_linear else pairs // max(1, len(block.labels)))
        for start in range(0, len(factors_b), size):
            piece_b = factors_b[start : start + size]
            losses_b = loss.of_batch(block, slice(first + start, first + start + len(piece_b))) * piece_b
            if gradient:
                grads += torch.autograd.grad(losses_b.sum(), batch.logits)[0]
            losses.append(losses_b.detach())
    value = torch.cat(losses).sum()
    if not gradient:
        return value
    gradient_B = peers.reduce_scatter_sum(grads.view(peers.world, *rank_rows.logits.shape))
    return _PrecomputedGradient.apply(rank_rows.logits, value, gradient_B)


def equalize_rows(rows: Rows, factors_B: torch.Tensor, world: int) -> tuple[Rows, torch.Tensor]:
    """Return rows and factors, padded with zeros to the largest number of rows of any rank, at least 1.

    This is a collective operation: every rank must call it. The host waits for the result of the exchange.
    """
    missing = int(Peers(alone=world == 1).max_number(max(1, len(factors_B)))) - len(factors_B)
    columns = (None if x is None else pad(x, (0, 0) * (x.dim() - 1) + (0, missing)) for x in (*rows, factors_B))
    *padded, factors_B = columns
    return Rows(*padded), factors_B


def _split_blocks(
    loss: BatchLoss, batch: Rows, factors_B: torch.Tensor, rank: int, candidate_counts: Iterable[int] | None
) -> Iterator[tuple[Rows, torch.Tensor, int]]:
    """Yield (block of rows to compare, factors of this rank's rows in the block, index of the first of these rows).

    If `candidate_counts` is None or the loss is linear (BatchLoss.is_linear), the only block is the whole batch.
    Otherwise, a block consists of complete requests, with at most MAX_BLOCK_ROWS rows unless one request has more.
    """
    if candidate_counts is None or loss.is_linear:
        yield batch, factors_B, rank * len(factors_B)
        return
    sizes = [0]
    for count in candidate_counts:
        if sizes[-1] and sizes[-1] + count > MAX_BLOCK_ROWS[factors_B.device.type]:
            sizes.append(0)
        sizes[-1] += count
    for size, end in zip(sizes, accumulate(sizes), strict=True):
        rows = slice(end - size, end)
        yield Rows(*(None if column is None else column[rows] for column in batch)), factors_B[rows], 0


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
    """Autograd function that returns `value`; its gradient with respect to `logits` is the given `gradient`."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, value: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gradient)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.saved_tensors[0] * grad, None, None
