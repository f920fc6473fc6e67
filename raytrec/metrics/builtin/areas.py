"""AUC, PR AUC and the ROC curve."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from raytrec.metrics.registry import RankedMetric, metric

if TYPE_CHECKING:
    import torch

    from raytrec.metrics.ranked import Ranked


POINTS = 200  # of the ROC curve


def roc(ranked: Ranked) -> dict[str, list] | None:
    """The ROC curve: fpr, tpr, from (0, 0) to (1, 1); None when labels are not both 0 and 1. A collective."""
    import torch

    if not ranked.both_classes:
        return None
    positive, negative = ranked.before(0), ranked.before(1)
    of_ranks = ranked.peers.stack(torch.tensor([len(positive)], device=positive.device)).squeeze(1)
    before, distinct = int(of_ranks[: ranked.peers.rank].sum()), int(of_ranks.sum())
    # The rates of what is predicted at least as high as each distinct prediction; of more than POINTS, of as
    # many, evenly spread. Where two ranks have a point of one place, the lower one's counts.
    order = torch.arange(before, before + len(positive), device=positive.device)
    places = (order * (POINTS / max(POINTS, distinct))).ceil().long()
    first = torch.ones_like(places, dtype=torch.bool)
    first[1:] = places[1:] != places[:-1]
    found = positive.new_zeros(POINTS + 1, 3)
    rates = 1 - negative / ranked.total[1], 1 - positive / ranked.total[0], torch.ones_like(positive)
    found[places[first]] = torch.stack(rates, 1)[first]
    all_found = ranked.peers.stack(found).cpu()
    points = all_found[all_found[:, :, 2].argmax(0), torch.arange(POINTS + 1)]
    rising = points[points[:, 2] > 0, :2].flip(0).unique_consecutive(dim=0)
    fpr, tpr = torch.cat([rising.new_zeros(1, 2), rising]).unique_consecutive(dim=0).T.tolist()
    return {"fpr": fpr, "tpr": tpr}


@metric("auc", title="AUC", label="AUC", better="higher")
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


@metric("pr_auc", title="PR AUC (average precision)", label="PR AUC", better="higher")
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
