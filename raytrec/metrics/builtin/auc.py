"""AUC, PR AUC and the ROC curve."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from raytrec.metrics.registry import RankedMetric, metric

if TYPE_CHECKING:
    import torch

    from raytrec.metrics.ranked import RankedRows


MAX_ROC_POINTS = 200  # maximum number of points of the ROC curve


def roc(ranked: RankedRows) -> dict[str, list] | None:
    """Return the false positive rates (fpr) and true positive rates (tpr) of the ROC curve, from (0, 0) to (1, 1).

    This is a collective operation: every rank must call it. The result is None unless the labels contain 0 and 1 and
    no other value.
    """
    import torch

    if not ranked.both_classes:
        return None
    positive, negative = ranked.sum_below(0), ranked.sum_below(1)
    of_ranks = ranked.peers.stack(torch.tensor([len(positive)], device=positive.device)).squeeze(1)
    offset, distinct = int(of_ranks[: ranked.peers.rank].sum()), int(of_ranks.sum())
    # For each distinct prediction, the rates if rows with at least this prediction are classified as positive.
    # Of more than MAX_ROC_POINTS distinct predictions, evenly spaced ones are kept. If two ranks have a point at the
    # same position, the point of the lower rank is kept.
    order = torch.arange(offset, offset + len(positive), device=positive.device)
    positions = (order * (MAX_ROC_POINTS / max(MAX_ROC_POINTS, distinct))).ceil().long()
    first = torch.ones_like(positions, dtype=torch.bool)
    first[1:] = positions[1:] != positions[:-1]
    own_points = positive.new_zeros(MAX_ROC_POINTS + 1, 3)
    rates = 1 - negative / ranked.total[1], 1 - positive / ranked.total[0], torch.ones_like(positive)
    own_points[positions[first]] = torch.stack(rates, 1)[first]
    all_points = ranked.peers.stack(own_points).cpu()
    points = all_points[all_points[:, :, 2].argmax(0), torch.arange(MAX_ROC_POINTS + 1)]
    rising = points[points[:, 2] > 0, :2].flip(0).unique_consecutive(dim=0)
    fpr, tpr = torch.cat([rising.new_zeros(1, 2), rising]).unique_consecutive(dim=0).T.tolist()
    return {"fpr": fpr, "tpr": tpr}


@metric("auc", title="AUC", label="AUC", better="higher")
class AUC(RankedMetric):
    """Share of pairs of a positive and a negative row in which the positive row has the higher prediction.

    Ties count half, and pairs are weighted by the product of their row weights. The value is None unless the
    labels contain 0 and 1 and no other value.

    Source: the Mann-Whitney statistic, as in scikit-learn's roc_auc_score. TorchRec's AUC ignores ties.
    """

    ranked_curve = staticmethod(roc)

    @classmethod
    def sums(cls, ranked: RankedRows) -> dict[str, torch.Tensor]:
        """Return the weights of correctly ordered pairs (with half of the ties), half of the ties, and each class."""
        positive, negative = ranked.ties.positive, ranked.ties.negative
        tied = positive * negative / 2
        return {
            "pairs": (positive * ranked.sum_below(1) + tied).sum(),
            "tied": tied.sum(),
            "positive": positive.sum(),
            "negative": negative.sum(),
        }

    @classmethod
    def figure(cls, sums: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the share of correctly ordered pairs."""
        return sums["pairs"] / (sums["positive"] * sums["negative"])

    @classmethod
    def bound(cls, sums: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return half of the share of pairs in which both rows are in the same bin.

        Such a pair counts half, whereas it would count 0 or 1 in the exact order.
        """
        return sums["tied"] / (sums["positive"] * sums["negative"])


@metric("pr_auc", title="PR AUC (average precision)", label="PR AUC", better="higher")
class PRAUC(RankedMetric):
    """Average precision: Σ (R_i - R_(i-1)) P_i over distinct predictions in descending order.

    P_i and R_i are the weighted precision and recall if rows with at least the i-th prediction are classified as
    positive.

    Source: scikit-learn's average_precision_score. The trapezoidal rule would overestimate the area.
    """

    @classmethod
    def sums(cls, ranked: RankedRows) -> dict[str, torch.Tensor]:
        """Return the weighted sums of precision and of its maximum error due to binning, and the positive weight."""
        positive, negative = ranked.ties.positive, ranked.ties.negative
        # Weights of all rows with higher predictions; rounding must not make them negative.
        above_1 = (ranked.total[0] - ranked.sum_below(0) - positive).clamp(min=0)
        above_0 = (ranked.total[1] - ranked.sum_below(1) - negative).clamp(min=0)
        above_and_here = above_1 + above_0 + positive + negative
        precision = positive * (above_1 + positive) / above_and_here
        # Bounds for bins in which all positive rows are above (upper) or below (lower) all negative rows. The lower
        # bound is an integral, because individual weights are unknown. A bin with one row is exact.
        below = above_0 + negative
        growth = above_and_here / (above_1 + below).clamp(min=1e-300)
        upper = positive * (above_1 + positive) / (above_1 + above_0 + positive).clamp(min=1e-300)
        lower = positive - below.xlogy(growth)
        error = (upper - precision).maximum(precision - lower).masked_fill(ranked.ties.rows == 1, 0)
        return {"precision": precision.sum(), "off": error.sum(), "positive": positive.sum()}

    @classmethod
    def figure(cls, sums: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the average precision."""
        return sums["precision"] / sums["positive"]

    @classmethod
    def bound(cls, sums: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the largest change that the best or worst order of rows within bins can cause."""
        return sums["off"] / sums["positive"]
