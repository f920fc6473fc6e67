"""Poisson regression."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raytrec.tasks.losses import Loss, loss

if TYPE_CHECKING:
    import torch


@loss("poisson")
class Poisson(Loss):
    """exp(logit) − y · logit: −ln of the Poisson density of y, without ln y!, which no weight changes."""

    label_range = (0.0, float("inf"))
    metrics = ("mse", "mae")
    predicts = "number"

    def predict(self, logits_B: torch.Tensor) -> torch.Tensor:
        """Expected counts."""
        return logits_B.exp()

    def of_rows(self, logits_B: torch.Tensor, labels_B: torch.Tensor) -> torch.Tensor:
        return logits_B.exp() - labels_B * logits_B
