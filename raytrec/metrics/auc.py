"""Area under the ROC curve, and the curve."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from raytrec.metrics.curves import roc
from raytrec.metrics.registry import RankedMetric, metric

if TYPE_CHECKING:
    import torch

    from raytrec.metrics.over_ranks.ranked import Ranked


@metric("auc", title="AUC", label="AUC", better="higher", takes=("probability", "number", "score"))
class AUC(RankedMetric):
    """The share of pairs of a positive and a negative row in which the positive one is predicted higher, ties
    counted half, and pairs by the product of their weights. None when labels are not both 0 and 1.

    Source: the Mann-Whitney statistic; scikit-learn's roc_auc_score is the same. TorchRec's AUC ignores ties.
    """

    ranked_curve = staticmethod(roc)

    @classmethod
    def sums(cls, ranked: Ranked) -> dict[str, torch.Tensor]:
        positive, negative = ranked.ties.positive, ranked.ties.negative
        tied = positive * negative / 2
        return {
            "pairs": (positive * ranked.before(1) + tied).sum(),
            "tied": tied.sum(),
            "positive": positive.sum(),
            "negative": negative.sum(),
        }

    @classmethod
    def figure(cls, sums: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return sums["pairs"] / (sums["positive"] * sums["negative"])

    @classmethod
    def bound(cls, sums: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Half of the share of pairs in one bin: in the exact order, a pair of these counts 0 or 1."""
        return sums["tied"] / (sums["positive"] * sums["negative"])
