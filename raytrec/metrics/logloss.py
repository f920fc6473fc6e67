"""Log loss."""

from __future__ import annotations

from collections.abc import Mapping
from math import log
from typing import TYPE_CHECKING

from raytrec.metrics.binary import ETA, entropy_sums
from raytrec.metrics.registry import SumMetric, metric

if TYPE_CHECKING:
    import torch


@metric(
    "logloss", title="log loss (nats)", label="log loss", better="lower", takes=("probability", "classes")
)
class LogLoss(SumMetric):
    """The mean cross-entropy of a row, in nats: -Σ w (y ln p + (1 - y) ln (1 - p)) ÷ Σ w, or of classes,
    -Σ w ln p_label ÷ Σ w.

    Source: torchrec.metrics.ne.compute_logloss, which is in bits.
    """

    sums = staticmethod(entropy_sums)

    @staticmethod
    def figure(sums: Mapping[str, torch.Tensor]) -> float:
        from torchrec.metrics.ne import compute_logloss

        positive, negative = sums["pos_labels"], sums["neg_labels"]
        return float(compute_logloss(sums["cross_entropy_sum"], positive, negative, ETA)) * log(2)
