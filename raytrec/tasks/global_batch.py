"""What a step has to know of the whole global batch: sums of weights, and losses that hold rows of all ranks
against one another.

Both are known before a rank's rows are given to the dense layers in pieces, so that micro-batches change
nothing. Of a loss over the batch, each rank computes the terms of its own rows, given everybody's logits, and
their gradient for all logits; the gradients are added up over ranks, and each keeps those of its rows. So
values and gradients are those of one process that has the whole batch (embeddings/gradients.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from raytrec.tasks.losses import BatchLoss, Rows

AT_ONCE = 1 << 24  # pairs of rows that are looked at together: 64 MiB for each number about them


@dataclass(frozen=True)
class Compared:
    """The terms that a rank's rows add to a loss over the global batch.

    Attributes:
        losses: float32 [B], of each row, times its weight.
        gradient: float32 [B] or [B, C], of the sum over the global batch, for the logits of these rows; None
            where it was not asked for.
    """

    losses: torch.Tensor
    gradient: torch.Tensor | None

    def of(self, logits: torch.Tensor, rows: slice) -> torch.Tensor:
        """The sum of some rows' losses, with a gradient for their logits."""
        if self.gradient is None:
            return self.losses[rows].sum()
        return _Given.apply(logits, self.losses[rows].sum(), self.gradient[rows])


@dataclass(frozen=True)
class Whole:
    """What is known of a global batch.

    Attributes:
        divisors: task → the sum of its rows' weights over all ranks, 1 where it is 0: float32 scalar.
        compared: task → the terms of this rank's rows.
    """

    divisors: dict[str, torch.Tensor] = field(default_factory=dict)
    compared: dict[str, Compared] = field(default_factory=dict)


NOTHING = Whole()


def total_weights(weights: list[torch.Tensor], world: int) -> torch.Tensor:
    """The sums of some weights [B] over all ranks: float32 [n], 1 for a sum of 0; one small collective."""
    sums = torch.stack([weights_B.sum() for weights_B in weights])
    if world > 1:
        dist.all_reduce(sums)
    return sums.masked_fill(sums == 0, 1.0)


def compare(loss: BatchLoss, own: Rows, factors_B: torch.Tensor, world: int, gradient: bool) -> Compared:
    """A loss over the global batch: what this rank's rows add to it; a collective.

    Args:
        own: this rank's rows, as many as every rank has, padding included.
        factors_B: float32 [B], by which the losses of these rows count.
        gradient: whether the gradient is wanted, too.
    """
    count = len(own.labels)
    batch, first = (_of_all_ranks(own), dist.get_rank() * count) if world > 1 else (own, 0)
    logits = batch.logits.detach().requires_grad_(gradient)
    batch, size = batch._replace(logits=logits), max(1, AT_ONCE // len(batch.labels))
    losses, grads = [], torch.zeros_like(logits, requires_grad=False)
    for start in range(0, count, size):
        stop = min(start + size, count)
        with torch.set_grad_enabled(gradient):
            losses_B = loss.of_batch(batch, slice(first + start, first + stop)) * factors_B[start:stop]
            if gradient:
                grads += torch.autograd.grad(losses_B.sum(), logits)[0]
        losses.append(losses_B.detach())
    if not gradient:
        return Compared(torch.cat(losses), None)
    if world > 1:
        dist.all_reduce(grads)
    return Compared(torch.cat(losses), grads[first : first + count])


def _of_all_ranks(own: Rows) -> Rows:
    """The rows of all ranks, in the order of ranks; a collective."""
    width = own.logits[0].numel()
    numbers = _gathered(
        torch.cat([own.logits.detach().view(-1, width), torch.stack([own.labels, own.weights], 1)], 1)
    )
    logits = numbers[:, :width].reshape(-1, *own.logits.shape[1:])
    keys, counts = (None if x is None else _gathered(x.contiguous()) for x in (own.keys, own.counts))
    return Rows(logits, numbers[:, width], numbers[:, width + 1], keys, counts)


def _gathered(values: torch.Tensor) -> torch.Tensor:
    world = dist.get_world_size()
    everyone = values.new_empty(world * len(values), *values.shape[1:])
    dist.all_gather_single(everyone, values)
    return everyone


class _Given(torch.autograd.Function):
    """A value whose gradient for some logits has been computed before."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, value: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gradient)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.saved_tensors[0] * grad, None, None
