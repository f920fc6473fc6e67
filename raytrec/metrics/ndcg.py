"""Normalised discounted cumulative gain of the first k places."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raytrec.metrics.registry import GroupMetric, metric

if TYPE_CHECKING:
    import torch

    from raytrec.metrics.over_ranks.groups import Groups


@metric("ndcg", title="NDCG at {k}", label="NDCG@{k}", better="higher", at_k=True)
class NDCG(GroupMetric):
    """The mean over groups of DCG@k ÷ the DCG@k of the best order, DCG@k = Σ label ÷ log2(1 + rank) over the
    first k ranks. The label is the gain, as in scikit-learn's ndcg_score; negative labels gain nothing.

    Among equal predictions, the lowest label comes first (scikit-learn takes the mean over their orders).
    Groups without a gain are left out and counted.
    """

    @classmethod
    def of_groups(cls, groups: Groups) -> tuple[torch.Tensor, torch.Tensor]:
        gains = groups.labels.clamp(min=0)
        best = groups.best_first(gains)
        discounts = (groups.ranks + 1.0).double().log2().reciprocal() * (groups.ranks <= cls.k)
        reached, possible = groups.add(gains * discounts), groups.add(best * discounts)
        return reached / possible, possible > 0

    @classmethod
    def of_ranks(cls, ranks_N: torch.Tensor) -> torch.Tensor:
        return (ranks_N + 1.0).double().log2().reciprocal() * (ranks_N <= cls.k)
