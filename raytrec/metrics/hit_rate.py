"""Hit rate of the first k places."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raytrec.metrics.registry import GroupMetric, metric

if TYPE_CHECKING:
    import torch

    from raytrec.metrics.over_ranks.groups import Groups


@metric("hit_rate", title="hit rate at {k}", label="hit rate@{k}", better="higher", at_k=True)
class HitRate(GroupMetric):
    """The share of groups that have a positive row among their k highest predictions.

    Among equal predictions, negative rows come first. Groups without a positive row are left out and counted.
    """

    @classmethod
    def of_groups(cls, groups: Groups) -> tuple[torch.Tensor, torch.Tensor]:
        found = groups.add(groups.relevant & (groups.ranks <= cls.k))
        return (found > 0).double(), groups.positives > 0

    @classmethod
    def of_ranks(cls, ranks_N: torch.Tensor) -> torch.Tensor:
        return (ranks_N <= cls.k).double()
