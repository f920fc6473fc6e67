"""Calibration, and the reliability diagram."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from raytrec.metrics.curves import reliability
from raytrec.metrics.registry import POSITIVES, SumMetric, metric

if TYPE_CHECKING:
    import torch

    from raytrec.tasks.outputs import TaskOutputs


@metric(
    "calibration",
    title="calibration (predicted ÷ real)",
    better="closer to 1",
    takes=("probability", "number"),
)
class Calibration(SumMetric):
    """The sum of predictions ÷ the sum of labels, both weighted; 0 where no label is positive.

    Source: torchrec.metrics.calibration; He et al. 2014 (ne.py), section 3.
    """

    ranked_curve = staticmethod(reliability)

    @staticmethod
    def sums(outputs: TaskOutputs) -> dict[str, torch.Tensor]:
        from torchrec.metrics.calibration import get_calibration_states

        return get_calibration_states(outputs.labels, outputs.predictions, outputs.weights)

    @staticmethod
    def figure(sums: Mapping[str, torch.Tensor]) -> float:
        from torchrec.metrics.calibration import compute_calibration

        return float(compute_calibration(sums["calibration_num"], sums["calibration_denom"]))

    @staticmethod
    def counts(sums: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The positives: the ratio varies by about 1 ÷ √positives by chance."""
        return {POSITIVES: sums["calibration_denom"]}
