"""One definition of the loss, and what each rank must send so that every gradient agrees with it.

    loss = Σ over the rows of the global batch of the row's loss ÷ rows of the global batch

TorchRec divides table gradients by the world size (its gradient division stays on) and
DistributedDataParallel averages dense gradients over ranks. So each rank's loss is

    world_size × Σ over its own rows ÷ rows of the global batch

and both kinds of gradient become exactly those of the definition, for equal, unequal and empty parts.
"""

from __future__ import annotations

import torch


def rank_loss(losses_B: torch.Tensor, weights_B: torch.Tensor, global_rows: int, world: int) -> torch.Tensor:
    """The scalar that one rank calls backward on.

    Args:
        losses_B: float [B], the loss of each row.
        weights_B: float [B], 1 for a row and 0 for padding.
        global_rows: rows of the global batch over all ranks, padding not counted.
        world: number of ranks.
    """
    return (losses_B * weights_B).sum() * (world / global_rows)
