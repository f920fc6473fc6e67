"""Root of the mean squared error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from raytrec.metrics.mse import MSE
from raytrec.metrics.registry import SumMetric, metric

if TYPE_CHECKING:
    import torch


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
