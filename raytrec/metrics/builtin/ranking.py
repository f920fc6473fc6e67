"""Metrics of the order of rows: AUC, PR AUC and, within groups, recall, hit rate, MRR, MAP, NDCG, coverage and GAUC."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from raytrec.metrics.registry import ONE_CLASS, GroupMetric, RankedMetric, metric

if TYPE_CHECKING:
    import torch

    from raytrec.metrics.groups import Groups
    from raytrec.metrics.ranked import RankedRows


MAX_ROC_POINTS = 200  # maximum number of points of the ROC curve


def roc(ranked: RankedRows) -> dict[str, list] | None:
    """Return the false positive rates (fpr) and true positive rates (tpr) of the ROC curve, from (0, 0) to (1, 1).

    This is a collective operation: every rank must call it. The result is None if a prediction is NaN or unless the
    labels contain 0 and 1 and no other value. The curve has at most MAX_ROC_POINTS + 2 points.
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

    Ties count half, and pairs are weighted by the product of their row weights. The value is None if a prediction is
    NaN or unless the labels contain 0 and 1 and no other value.

    Source: the Mann-Whitney statistic, as in scikit-learn's roc_auc_score. TorchRec's AUC ignores ties.
    """

    ranked_curve = staticmethod(roc)

    @classmethod
    def sums(cls, ranked: RankedRows) -> dict[str, torch.Tensor]:
        """Return the weights of correctly ordered pairs (with half of the ties), half of the ties, and each class.

        The keys are pairs, tied, positive and negative. A pair is counted on the rank of its positive row.
        """
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
        """Return the weighted share of correctly ordered pairs, where ties count half."""
        return sums["pairs"] / (sums["positive"] * sums["negative"])

    @classmethod
    def bound(cls, sums: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return half of the weighted share of pairs in which both rows are in the same bin.

        Such a pair counts half, whereas it would count 0 or 1 in the exact order.
        """
        return sums["tied"] / (sums["positive"] * sums["negative"])


@metric("pr_auc", title="PR AUC (average precision)", label="PR AUC", better="higher")
class PRAUC(RankedMetric):
    """Average precision: Σ (R_i - R_(i-1)) P_i over distinct predictions in descending order.

    P_i and R_i are the weighted precision and recall if rows with at least the i-th prediction are classified as
    positive; R_0 is 0. The value is None if a prediction is NaN or unless the labels are 0 and 1 and both occur.

    Source: scikit-learn's average_precision_score. The trapezoidal rule would overestimate the area.
    """

    @classmethod
    def sums(cls, ranked: RankedRows) -> dict[str, torch.Tensor]:
        """Return sums over positive rows: precision (weight × P_i), off (weight × maximum error), positive (weight)."""
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
        """Return the largest error of the value if rows in the same bin are in the best or worst order."""
        return sums["off"] / sums["positive"]


@metric("recall", title="recall at {k}", label="recall@{k}", better="higher", at_k=True)
class Recall(GroupMetric):
    """Weighted mean over groups of the share of positive rows that are among the group's k highest predictions.

    Among equal predictions, negative rows come first. Groups without a positive row are excluded and counted.
    """

    @classmethod
    def of_groups(cls, groups: Groups) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the recall of each group, and a mask of groups with positive rows (see GroupMetric.of_groups)."""
        hits = groups.add(groups.relevant & (groups.ranks <= cls.k))
        return hits / groups.positives, groups.positives > 0

    @classmethod
    def of_ranks(cls, ranks_GR: torch.Tensor, positives_G: torch.Tensor) -> torch.Tensor:
        """Return the recall of each group from the ranks of its positive rows (see GroupMetric.of_ranks)."""
        return (ranks_GR <= cls.k).sum(1).double() / positives_G


@metric("hit_rate", title="hit rate at {k}", label="hit rate@{k}", better="higher", at_k=True)
class HitRate(GroupMetric):
    """Weighted share of groups with a positive row among their k highest predictions.

    Among equal predictions, negative rows come first. Groups without a positive row are excluded and counted.
    """

    @classmethod
    def of_groups(cls, groups: Groups) -> tuple[torch.Tensor, torch.Tensor]:
        """Return 1 for groups with a positive row in the first k rows, else 0, and a mask of groups with positives."""
        hits = groups.add(groups.relevant & (groups.ranks <= cls.k))
        return (hits > 0).double(), groups.positives > 0

    @classmethod
    def of_ranks(cls, ranks_GR: torch.Tensor, positives_G: torch.Tensor) -> torch.Tensor:
        """Return 1 for groups with a positive row among the first k rows, else 0."""
        return (ranks_GR <= cls.k).any(1).double()


@metric("mrr", title="MRR (mean reciprocal rank)", label="MRR", better="higher")
class MRR(GroupMetric):
    """Weighted mean over groups of 1 ÷ the rank of the first positive row, where the best rank is 1.

    Among equal predictions, negative rows come first. Groups without a positive row are excluded and counted.
    Source: E. Voorhees, The TREC-8 Question Answering Track Report, 1999.
    """

    @classmethod
    def of_groups(cls, groups: Groups) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the reciprocal rank of each group's first positive row, and a mask of groups with such a row."""
        first = groups.ranks.new_full((groups.count,), len(groups.of) + 1)
        first = first.scatter_reduce(
            0, groups.of, groups.ranks.masked_fill(~groups.relevant, len(groups.of) + 1), "amin"
        )
        return 1 / first.double(), groups.positives > 0

    @classmethod
    def of_ranks(cls, ranks_GR: torch.Tensor, positives_G: torch.Tensor) -> torch.Tensor:
        """Return the reciprocal of the best rank of each group's positive rows."""
        return 1 / ranks_GR[:, 0].double()


@metric("map", title="MAP (mean average precision) at {k}", label="MAP@{k}", better="higher", at_k=True)
class MeanAveragePrecision(GroupMetric):
    """Weighted mean over groups of the average precision: Σ precision at rank r ÷ min(k, number of positive rows).

    The sum is over the ranks r ≤ k of positive rows. The precision at rank r is the share of positive rows among
    the first r rows. Among equal predictions, negative rows come first. Groups without a positive row are
    excluded and counted.

    Source: Manning et al., Introduction to Information Retrieval, 8.4, limited to the first k as in RecBole.
    """

    @classmethod
    def of_groups(cls, groups: Groups) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the average precision of each group, and a mask of groups with positive rows."""
        reached = groups.relevant.double().cumsum(0)
        positives_before = (groups.positives.cumsum(0) - groups.positives)[groups.of]
        precision = (reached - positives_before) / groups.ranks * (groups.relevant & (groups.ranks <= cls.k))
        return groups.add(precision) / groups.positives.clamp(max=cls.k), groups.positives > 0

    @classmethod
    def of_ranks(cls, ranks_GR: torch.Tensor, positives_G: torch.Tensor) -> torch.Tensor:
        """Return the average precision of each group from the ranks of its positive rows."""
        reached = ranks_GR.new_ones(ranks_GR.shape).cumsum(1)
        precision_GR = reached / ranks_GR.double() * (ranks_GR <= cls.k)
        return precision_GR.sum(1) / positives_G.clamp(max=cls.k)


@metric("ndcg", title="NDCG at {k}", label="NDCG@{k}", better="higher", at_k=True)
class NDCG(GroupMetric):
    """Weighted mean over groups of DCG@k ÷ DCG@k of the best order; DCG@k is Σ label ÷ log2(1 + rank) over ranks ≤ k.

    The label is the gain, as in scikit-learn's ndcg_score; the gain of labels below 0 is 0. Among equal
    predictions, the lowest label comes first, whereas scikit-learn averages over all orders of the ties. Groups
    without a gain above 0 are excluded and counted.
    Source: K. Järvelin and J. Kekäläinen, Cumulated Gain-Based Evaluation of IR Techniques, ACM TOIS 20(4), 2002.
    """

    @classmethod
    def of_groups(cls, groups: Groups) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the NDCG of each group, and a mask of groups with a gain above 0."""
        gains = groups.labels.clamp(min=0)
        best = groups.sort_best_first(gains)
        discounts = (groups.ranks + 1.0).double().log2().reciprocal() * (groups.ranks <= cls.k)
        reached, possible = groups.add(gains * discounts), groups.add(best * discounts)
        return reached / possible, possible > 0

    @classmethod
    def of_ranks(cls, ranks_GR: torch.Tensor, positives_G: torch.Tensor) -> torch.Tensor:
        """Return the NDCG of each group from the ranks of its positive rows, each with gain 1."""
        reached = ((ranks_GR + 1.0).double().log2().reciprocal() * (ranks_GR <= cls.k)).sum(1)
        places = ranks_GR.new_ones(cls.k).cumsum(0)
        return reached / (places + 1.0).double().log2().reciprocal().cumsum(0)[positives_G.clamp(max=cls.k) - 1]


@metric("coverage", title="coverage at {k}", label="coverage@{k}", better="higher", at_k=True)
class Coverage(GroupMetric):
    """Share of all distinct items that are among the k highest predictions of at least one group.

    The task's `item` column identifies items. Among equal predictions, negative rows come first. Rows with
    weight 0 are excluded; other weights have no effect. Source: catalogue coverage in M. Ge et al., Beyond
    Accuracy, RecSys 2010.
    """

    needs_item = True

    @classmethod
    def sums(cls, groups: Groups) -> dict[str, torch.Tensor]:
        """Return an empty dict, because the metric uses only distinct counts."""
        return {}

    @classmethod
    def distinct(cls, groups: Groups) -> dict[str, torch.Tensor]:
        """Return the keys of the items among the k highest predictions of a group, and the keys of all items."""
        return {"shown": groups.items[groups.ranks <= cls.k], "items": groups.items}

    @classmethod
    def figure(cls, sums: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the number of distinct items among the k highest predictions of a group ÷ the number of all items."""
        return sums["shown"] / sums["items"]

    @classmethod
    def counts(cls, sums: Mapping[str, torch.Tensor]) -> dict[str, float | torch.Tensor]:
        """Return an empty dict, because no group is excluded."""
        return {}


@metric("gauc", title="GAUC (AUC within groups)", label="GAUC", better="higher")
class GAUC(GroupMetric):
    """Mean AUC within groups, Σ n_g AUC_g ÷ Σ n_g, over groups with positive and negative rows.

    AUC_g is the AUC of group g. n_g, the impressions of the group, is the sum of its rows' weights. Rows with a label
    above 0.5 are positive. Groups without both classes are excluded and counted (groups_of_one_class).

    Source: H. Zhu et al., Optimized Cost per Click in Taobao Display Advertising, KDD 2017, section 5.
    """

    left_out = ONE_CLASS

    @classmethod
    def of_groups(cls, groups: Groups) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the AUC of each group, and a mask of groups with both classes."""
        return groups.auc()

    @classmethod
    def weights(cls, groups: Groups) -> torch.Tensor:
        """Return the impressions of each group, float64 [G]."""
        return groups.add(groups.weights)
