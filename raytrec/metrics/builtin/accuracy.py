"""Accuracy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from raytrec.metrics.registry import SumMetric, metric

if TYPE_CHECKING:
    import torch

    from raytrec.tasks.outputs import TaskOutputs


HALF = 0.5


@metric("accuracy", better="higher", takes=("probability", "classes"))
class Accuracy(SumMetric):
    """Σ w [right] ÷ Σ w; NaN without rows.

    Of probabilities: right where prediction and label are on one side of 0.5 (above it, or not). Of classes:
    right where the class with the highest prediction, the first of equal ones, is the label.
    """

    @staticmethod
    def sums(outputs: TaskOutputs) -> dict[str, torch.Tensor]:
        if outputs.predictions.dim() == 2:
            right_B = outputs.predictions.argmax(1) == outputs.labels
        else:
            right_B = (outputs.predictions > HALF) == (outputs.labels > HALF)
        return {"right": (right_B * outputs.weights).double().sum(), "weight": outputs.weights.double().sum()}

    @staticmethod
    def figure(sums: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return sums["right"] / sums["weight"]
