"""The loss that a model gives itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raytrec.tasks.losses import Loss, loss

if TYPE_CHECKING:
    import torch


@loss("from_model")
class FromModel(Loss):
    """y · the row's own loss, as the model gives it, such as of its item against others that are drawn.

    Nothing else is learned of the task's label: rows of label 0 have no loss. Metrics and predictions are of
    the model's score. It is the objective that adds up the model's loss (tasks/objective.py); that of the
    score is 0.
    """

    label_range = (0.0, 1.0)
    metrics = ("auc",)
    predicts = "score"
    from_model = True

    def of_rows(self, logits_B: torch.Tensor, labels_B: torch.Tensor) -> torch.Tensor:
        return logits_B.new_zeros(logits_B.shape)
