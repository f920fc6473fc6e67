"""Huber loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raytrec.tasks.losses import Loss, in_range, loss

if TYPE_CHECKING:
    import torch


@loss("huber")
class Huber(Loss):
    """e² ÷ 2 for errors e = logit − y of at most delta, delta · (|e| − delta ÷ 2) for others (Huber 1964).

    Args:
        delta: > 0, in the label's units.

    Raises:
        ValueError: delta is out of range.
    """

    metrics = ("mse", "mae")
    predicts = "number"

    def __init__(self, delta: float = 1.0):
        self.delta = in_range("delta", delta, 0.0, 1e9, exclusive=True)

    def of_rows(self, logits_B: torch.Tensor, labels_B: torch.Tensor) -> torch.Tensor:
        from torch.nn.functional import huber_loss

        return huber_loss(logits_B, labels_B, reduction="none", delta=self.delta)
