"""Recall of the first k places."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raytrec.metrics.registry import GroupMetric, metric

if TYPE_CHECKING:
    import torch

    from raytrec.metrics.over_ranks.groups import Groups


@metric("recall", title="recall at {k}", label="recall@{k}", better="higher", at_k=True)
class Recall(GroupMetric):
    """The mean over groups of the share of a group's positive rows that are among its k highest predictions.

    Among equal predictions, negative rows come first. Groups without a positive row are left out and counted.
    """

    @classmethod
    def of_groups(cls, groups: Groups) -> tuple[torch.Tensor, torch.Tensor]:
        found = groups.add(groups.relevant & (groups.ranks <= cls.k))
        return found / groups.positives, groups.positives > 0
