"""Ranking metrics over groups of rows: recall, hit rate, MRR, MAP, NDCG, coverage and GAUC."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from raytrec.metrics.registry import ONE_CLASS, GroupMetric, metric

if TYPE_CHECKING:
    import torch

    from raytrec.metrics.groups import Groups


@metric("recall", title="recall at {k}", label="recall@{k}", better="higher", at_k=True)
class Recall(GroupMetric):
    """Mean over groups of the share of positive rows that are among the group's k highest predictions.

    Among equal predictions, negative rows come first. Groups without a positive row are excluded and counted.
    """

    @classmethod
    def of_groups(cls, groups: Groups) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the recall of each group, and a mask of groups with positive rows (see GroupMetric.of_groups)."""
        hits = groups.add(groups.relevant & (groups.ranks <= cls.k))
        return hits / groups.positives, groups.positives > 0

    @classmethod
    def of_ranks(cls, ranks_GR: torch.Tensor, positives_G: torch.Tensor) -> torch.Tensor:
        """Return the recall from the ranks of positive rows."""
        return (ranks_GR <= cls.k).sum(1).double() / positives_G


@metric("hit_rate", title="hit rate at {k}", label="hit rate@{k}", better="higher", at_k=True)
class HitRate(GroupMetric):
    """Weighted share of groups with a positive row among their k highest predictions.

    Among equal predictions, negative rows come first. Groups without a positive row are excluded and counted.
    """

    @classmethod
    def of_groups(cls, groups: Groups) -> tuple[torch.Tensor, torch.Tensor]:
        """Return 1 for groups with a hit, else 0, and a mask of groups with positive rows."""
        hits = groups.add(groups.relevant & (groups.ranks <= cls.k))
        return (hits > 0).double(), groups.positives > 0

    @classmethod
    def of_ranks(cls, ranks_GR: torch.Tensor, positives_G: torch.Tensor) -> torch.Tensor:
        """Return 1 for groups with a hit, else 0."""
        return (ranks_GR <= cls.k).any(1).double()


@metric("mrr", title="MRR (mean reciprocal rank)", label="MRR", better="higher")
class MRR(GroupMetric):
    """Mean over groups of 1 ÷ the rank of the first positive row.

    Among equal predictions, negative rows come first. Groups without a positive row are excluded and counted.
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
        """Return the reciprocal of each group's first rank."""
        return 1 / ranks_GR[:, 0].double()


@metric("map", title="MAP (mean average precision) at {k}", label="MAP@{k}", better="higher", at_k=True)
class MeanAveragePrecision(GroupMetric):
    """Mean over groups of the average precision: Σ precision at rank r ÷ min(k, number of positive rows).

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
        """Return the average precision from the ranks of positive rows."""
        reached = ranks_GR.new_ones(ranks_GR.shape).cumsum(1)
        precision_GR = reached / ranks_GR.double() * (ranks_GR <= cls.k)
        return precision_GR.sum(1) / positives_G.clamp(max=cls.k)


@metric("ndcg", title="NDCG at {k}", label="NDCG@{k}", better="higher", at_k=True)
class NDCG(GroupMetric):
    """Mean over groups of DCG@k ÷ the DCG@k of the best order, where DCG@k = Σ label ÷ log2(1 + rank), rank ≤ k.

    The label is the gain, as in scikit-learn's ndcg_score; the gain of negative labels is 0. Among equal
    predictions, the lowest label comes first, whereas scikit-learn averages over all orders of the ties. Groups
    without a gain above 0 are excluded and counted.
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
        """Return the NDCG from the ranks of positive rows, each with gain 1."""
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
        """Return the share of distinct items that are among the k highest predictions."""
        return sums["shown"] / sums["items"]

    @classmethod
    def counts(cls, sums: Mapping[str, torch.Tensor]) -> dict[str, float | torch.Tensor]:
        """Return an empty dict, because no group is excluded."""
        return {}


@metric("gauc", title="GAUC (AUC within groups)", label="GAUC", better="higher")
class GAUC(GroupMetric):
    """Mean AUC within groups, Σ n_g AUC_g ÷ Σ n_g, over groups with positive and negative rows.

    n_g, the impressions of a group, is the sum of its rows' weights. Groups without both classes are excluded
    and counted (groups_of_one_class).

    Source: H. Zhu et al., Optimized Cost per Click in Taobao Display Advertising, KDD 2017, section 5.
    """

    left_out = ONE_CLASS

    @classmethod
    def of_groups(cls, groups: Groups) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the AUC of each group, and a mask of groups with both classes."""
        return groups.auc()

    @classmethod
    def weights(cls, groups: Groups) -> torch.Tensor:
        """Return the impressions of each group."""
        return groups.add(groups.weights)
