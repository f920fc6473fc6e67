"""Normalised entropy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from raytrec.metrics.binary import ETA, entropy_sums
from raytrec.metrics.registry import SumMetric, metric

if TYPE_CHECKING:
    import torch


@metric("ne", title="NE (normalised entropy)", label="NE", better="lower", takes=("probability",))
class NE(SumMetric):
    """The cross-entropy ÷ that of always predicting the mean label; NaN where all labels are equal.

    Source: X. He et al., Practical Lessons from Predicting Clicks on Ads at Facebook, ADKDD 2014, section 3.
    """

    sums = staticmethod(entropy_sums)

    @staticmethod
    def figure(sums: Mapping[str, torch.Tensor]) -> float:
        from torchrec.metrics.ne import compute_ne

        positive, negative = sums["pos_labels"], sums["neg_labels"]
        if positive <= 0 or negative <= 0:
            return float("nan")
        rows = sums["weighted_num_samples"]
        return float(compute_ne(sums["cross_entropy_sum"], rows, positive, negative, ETA))
