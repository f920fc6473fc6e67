"""One definition of the loss, and what each rank must send so that every gradient agrees with it.

    mean:  loss = Σ over the rows of the global batch of the row's loss ÷ rows of the global batch
    sum:   loss = Σ over the rows of the global batch of the row's loss

A row's loss counts by its weight in the task: 0 where it has no label or a mask excludes it, else its sample
weight. Such rows stay among those that the mean divides by, unless a task's `divisor` is the sum of weights.
Losses of several tasks are multiplied by their `weight` and added.

TorchRec divides table gradients by the world size (its gradient division stays on) and
DistributedDataParallel averages dense gradients over ranks. So each rank's loss is

    world_size × Σ over its own rows ÷ rows (or weights) of the global batch (mean; for the sum, ÷ 1)

and both kinds of gradient become exactly those of the definition, for equal, unequal and empty parts.

A batch may be given to the dense layers in pieces (micro-batches). The sum above is then built piece by
piece, and the tables see one lookup and one update for the whole batch, with any kernel and optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torchrec.distributed import comm_ops

from raytrec.common.errors import RunError


def require_gradient_division() -> None:
    """Raises RunError where somebody has switched TorchRec's division off, for the whole process."""
    if not comm_ops.get_gradient_division():
        raise RunError(
            "TorchRec's gradient division is switched off in this process",
            where="torchrec.distributed.comm_ops.set_gradient_division(False)",
            expected="True, as it comes: raytrec's loss is weighted for it",
            do="remove that call, or set it back to True",
        )


def rank_loss(
    losses_B: torch.Tensor,
    weights_B: torch.Tensor,
    divisor: int | torch.Tensor,
    world: int,
    reduction: str = "mean",
    weight: float = 1.0,
) -> torch.Tensor:
    """The scalar that one rank calls backward on.

    Args:
        losses_B: float [B], the loss of each row.
        weights_B: float [B], the factor of each row; 0 for padding.
        divisor: of the mean: rows of the global batch over all ranks, padding not counted; or the sum of
            their weights, as a scalar.
        world: number of ranks.
        reduction: mean or sum over the global batch.
        weight: a factor of the whole: of a task among several.
    """
    return (losses_B * weights_B).sum() * (weight * world / (divisor if reduction == "mean" else 1))


class PieceByPiece(torch.autograd.Function):
    """Σ of the pieces' losses, whose gradient is taken piece by piece while the sum is built.

    Only one piece's activations exist at a time, which is what micro-batches are for. The gradients leave
    through the ordinary backward: DistributedDataParallel and the tables see one backward of one batch.

    Call `PieceByPiece.apply(loss_of, pieces, n, *tensors)`:
        loss_of: (rows of the piece, those rows of the inputs) → scalar loss.
        pieces: slices that cover the rows of the batch.
        n: how many of `tensors` are inputs [B, …]; the others are the parameters that loss_of uses.
    """

    @staticmethod
    def forward(
        ctx: Any,
        loss_of: Callable[[slice, list[torch.Tensor]], torch.Tensor],
        pieces: Sequence[slice],
        n: int,
        *tensors: torch.Tensor,
    ) -> torch.Tensor:
        inputs, parameters = tensors[:n], tensors[n:]
        total = inputs[0].new_zeros(())
        input_grads = [torch.empty_like(x) for x in inputs]
        parameter_grads = [torch.zeros_like(p) for p in parameters]
        for piece in pieces:
            leaves = [x[piece].detach().requires_grad_() for x in inputs]
            with torch.enable_grad():
                loss = loss_of(piece, leaves)
                grads = torch.autograd.grad(loss, [*leaves, *parameters], allow_unused=True)
            total += loss.detach()
            for whole, grad in zip(input_grads, grads[:n], strict=True):
                whole[piece] = 0 if grad is None else grad
            for whole, grad in zip(parameter_grads, grads[n:], strict=True):
                if grad is not None:
                    whole += grad
        ctx.save_for_backward(*input_grads, *parameter_grads)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        return None, None, None, *(g * grad for g in ctx.saved_tensors)
