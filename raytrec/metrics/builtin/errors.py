"""Mean errors of predictions: MAE, MSE, RMSE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from raytrec.metrics.registry import SumMetric, metric

if TYPE_CHECKING:
    import torch

    from raytrec.tasks.outputs import TaskOutputs


@metric(
    "mae",
    title="MAE (mean absolute error)",
    label="MAE",
    better="lower",
    format="{:.4g}",
    takes=("probability", "number"),
)
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


@metric(
    "mse",
    title="MSE (mean squared error)",
    label="MSE",
    better="lower",
    format="{:.4g}",
    takes=("probability", "number"),
)
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
    takes=("probability", "number"),
)
class RMSE(SumMetric):
    """√(Σ w (p - y)² ÷ Σ w), in units of the label; NaN without rows."""

    sums = staticmethod(MSE.sums)

    @staticmethod
    def figure(sums: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return MSE.figure(sums).sqrt()
