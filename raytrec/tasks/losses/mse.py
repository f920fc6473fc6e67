"""Squared error: the logit is the prediction."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raytrec.tasks.losses import Loss, loss

if TYPE_CHECKING:
    import torch


@loss("mse")
class SquaredError(Loss):
    """(logit − y)²; any finite label. Large labels make large gradients: scale them before (transforms)."""

    metrics = ("mse", "mae")
    predicts = "number"

    def of_rows(self, logits_B: torch.Tensor, labels_B: torch.Tensor) -> torch.Tensor:
        return (logits_B - labels_B).square()
