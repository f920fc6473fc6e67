"""Mean errors of predictions: MAE, MSE, RMSE, accuracy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from raytrec.metrics.registry import SumMetric, metric
from raytrec.tasks.losses import Kind

if TYPE_CHECKING:
    import torch

    from raytrec.tasks.outputs import TaskOutputs

NUMBERS: tuple[Kind, ...] = ("probability", "number")
HALF = 0.5


@metric("mae", title="MAE (mean absolute error)", label="MAE", better="lower", format="{:.4g}", takes=NUMBERS)
class MAE(SumMetric):
    """Σ w |p - y| ÷ Σ w, in units of the label; NaN without rows.

    Source: torchrec.metrics.mae, which sums in the same way.
    """

    @staticmethod
    def sums(outputs: TaskOutputs) -> dict[str, torch.Tensor]:
        errors_B = outputs.predictions.double() - outputs.labels
        return {"errors": (outputs.weights * errors_B.abs()).sum(), "weight": outputs.weights.sum()}

    @staticmethod
    def figure(sums: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return sums["errors"] / sums["weight"]


@metric("mse", title="MSE (mean squared error)", label="MSE", better="lower", format="{:.4g}", takes=NUMBERS)
class MSE(SumMetric):
    """Σ w (p - y)² ÷ Σ w, in squared units of the label; NaN without rows.

    Source: torchrec.metrics.mse, which sums in the same way.
    """

    @staticmethod
    def sums(outputs: TaskOutputs) -> dict[str, torch.Tensor]:
        errors_B = outputs.predictions.double() - outputs.labels
        return {"squares": (outputs.weights * errors_B.square()).sum(), "weight": outputs.weights.sum()}

    @staticmethod
    def figure(sums: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return sums["squares"] / sums["weight"]


@metric(
    "rmse",
    title="RMSE (root of the mean squared error)",
    label="RMSE",
    better="lower",
    format="{:.4g}",
    takes=NUMBERS,
)
class RMSE(SumMetric):
    """√(Σ w (p - y)² ÷ Σ w), in units of the label; NaN without rows."""

    sums = staticmethod(MSE.sums)

    @staticmethod
    def figure(sums: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return MSE.figure(sums).sqrt()


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
