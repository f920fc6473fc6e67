"""Binary cross-entropy: the logit is the log-odds of the label."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raytrec.tasks.losses import Loss, loss

if TYPE_CHECKING:
    import torch


@loss("bce")
class BinaryCrossEntropy(Loss):
    """−y · ln p − (1 − y) · ln(1 − p) with p = sigmoid(logit), in nats; labels may be rates."""

    label_range = (0.0, 1.0)
    metrics = ("auc", "ne", "logloss", "calibration")
    predicts = "probability"
    log_odds = True

    def predict(self, logits_B: torch.Tensor) -> torch.Tensor:
        """Probabilities."""
        return logits_B.sigmoid()

    def of_rows(self, logits_B: torch.Tensor, labels_B: torch.Tensor) -> torch.Tensor:
        from torch.nn.functional import binary_cross_entropy_with_logits

        return binary_cross_entropy_with_logits(logits_B, labels_B, reduction="none")
