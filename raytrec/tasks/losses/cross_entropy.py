"""Cross-entropy over classes: one logit for each of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raytrec.tasks.losses import Loss, loss

if TYPE_CHECKING:
    import torch


@loss("cross_entropy")
class CrossEntropy(Loss):
    """−ln of the softmax of the logits at the label's class, in nats; labels are 0 to classes − 1.

    Args:
        classes: how many there are, at least 2.

    Raises:
        ValueError: fewer, or no whole number.
    """

    whole_labels = True
    metrics = ("accuracy", "logloss")
    predicts = "classes"

    def __init__(self, classes: int = 2):
        if isinstance(classes, bool) or not isinstance(classes, int) or not 2 <= classes <= 2**16:
            raise ValueError(f"classes is {classes!r}, not a whole number from 2 to 65536")
        self.outputs, self.label_range = classes, (0.0, classes - 1.0)

    def predict(self, logits_BC: torch.Tensor) -> torch.Tensor:
        """The probability of each class: [B, C]."""
        return logits_BC.softmax(1)

    def of_rows(self, logits_BC: torch.Tensor, labels_B: torch.Tensor) -> torch.Tensor:
        from torch.nn.functional import cross_entropy

        return cross_entropy(logits_BC, labels_B.long(), reduction="none")
