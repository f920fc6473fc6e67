"""Focal loss: rows that are predicted well count less."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raytrec.tasks.losses import in_range, loss
from raytrec.tasks.losses.bce import BinaryCrossEntropy

if TYPE_CHECKING:
    import torch


@loss("focal")
class Focal(BinaryCrossEntropy):
    """−α·y · (1 − p)^γ · ln p − (1 − α)·(1 − y) · p^γ · ln(1 − p) with p = sigmoid(logit), in nats.

    Without alpha, both factors are 1. Source: Lin et al. 2017, arXiv:1708.02002. The factor makes predictions
    less certain than they should be: their order is what to use, unless they are calibrated afterwards.

    Args:
        gamma: ≥ 0; with 0 it is bce.
        alpha: of positives, in (0, 1); 1 − alpha is that of negatives.

    Raises:
        ValueError: one of them is out of range.
    """

    def __init__(self, gamma: float = 2.0, alpha: float | None = None):
        self.gamma = in_range("gamma", gamma, 0.0, 100.0)
        self.alpha = None if alpha is None else in_range("alpha", alpha, 0.0, 1.0, exclusive=True)

    def of_rows(self, logits_B: torch.Tensor, labels_B: torch.Tensor) -> torch.Tensor:
        from torch.nn.functional import logsigmoid

        log_p_B, log_not_p_B = logsigmoid(logits_B), logsigmoid(-logits_B)
        positive, negative = (1.0, 1.0) if self.alpha is None else (self.alpha, 1 - self.alpha)
        of_positives_B = positive * labels_B * (self.gamma * log_not_p_B).exp() * log_p_B
        return -of_positives_B - negative * (1 - labels_B) * (self.gamma * log_p_B).exp() * log_not_p_B
