"""The registry of losses: a new one is a file here. One of yours is a class in a module of yours.

    @loss("bce")                                            # not needed for one of yours
    class BinaryCrossEntropy(Loss):
        label_range = (0, 1)
        metrics = ("auc", "ne", "logloss", "calibration")

        def predict(self, logits_B): ...
        def of_rows(self, logits_B, labels_B): ...

The configuration names it: `tasks: [{loss: bce}]`, or `loss: "my.module:MyLoss"`, which is made with the
task's `options` as keyword arguments. The driver asks losses for their labels and metrics: a file here
imports torch in its methods.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Literal

from raytrec.common.registry import Registry

if TYPE_CHECKING:
    import torch

# What a prediction is: of the label 1, in the label's units, one for each class, or an order alone.
Kind = Literal["probability", "number", "classes", "score"]


class Loss(ABC):
    """What a task minimises, row by row; how rows add up is the objective's (tasks/objective.py).

    Attributes:
        label_range: the least and the greatest label that it takes; None: any finite number.
        metrics: names of the metrics that its tasks have by default.
        predicts: what its predictions are, which metrics have to take (Metric.takes); None: any metric may be
            asked for.
    """

    label_range: tuple[float, float] | None = None
    metrics: tuple[str, ...] = ()
    predicts: Kind | None = None

    def predict(self, logits_B: torch.Tensor) -> torch.Tensor:
        """What logits mean in the label's units: float32 [B] → float32 [B]; by default, themselves."""
        return logits_B

    @abstractmethod
    def of_rows(self, logits_B: torch.Tensor, labels_B: torch.Tensor) -> torch.Tensor:
        """The loss of each row, from that row alone: float32 [B], with a gradient for the logits.

        It must be finite for padding, too, whose labels are 0 (or the nearest that the loss takes).
        """


loss: Registry[type[Loss]] = Registry("loss", __name__)
