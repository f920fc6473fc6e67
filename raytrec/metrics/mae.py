"""Mean absolute error."""

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
