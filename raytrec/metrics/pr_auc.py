"""Area under the precision-recall curve: average precision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from raytrec.metrics.registry import RankedMetric, metric

if TYPE_CHECKING:
    import torch

    from raytrec.metrics.over_ranks.ranked import Ranked


@metric(
    "pr_auc",
    title="PR AUC (average precision)",
    label="PR AUC",
    better="higher",
    takes=("probability", "number", "score"),
)
class PRAUC(RankedMetric):
    """Σ (R_i - R_(i-1)) P_i over the distinct predictions from the highest down: P_i is the precision and R_i
    the recall of all rows predicted at least as high, rows counted by their weights.

    Source: scikit-learn's average_precision_score. (Not the trapezoids below the curve, which flatter.)
    """

    @classmethod
    def sums(cls, ranked: Ranked) -> dict[str, torch.Tensor]:
        positive, negative = ranked.ties.positive, ranked.ties.negative
        # Of all rows that are predicted higher; rounding must not make them less than none.
        above_1 = (ranked.total[0] - ranked.before(0) - positive).clamp(min=0)
        above_0 = (ranked.total[1] - ranked.before(1) - negative).clamp(min=0)
        above_and_here = above_1 + above_0 + positive + negative
        precision = positive * (above_1 + positive) / above_and_here
        # Were a bin's positive rows all above its negative ones, or (an integral, as weights are not known)
        # below them. A single row is where it is.
        below = above_0 + negative
        growth = above_and_here / (above_1 + below).clamp(min=1e-300)
        most = positive * (above_1 + positive) / (above_1 + above_0 + positive).clamp(min=1e-300)
        least = positive - below.xlogy(growth)
        off = (most - precision).maximum(precision - least).masked_fill(ranked.ties.rows == 1, 0)
        return {"precision": precision.sum(), "off": off.sum(), "positive": positive.sum()}

    @classmethod
    def figure(cls, sums: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return sums["precision"] / sums["positive"]

    @classmethod
    def bound(cls, sums: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """As far as the best and the worst order within each bin can move it."""
        return sums["off"] / sums["positive"]
