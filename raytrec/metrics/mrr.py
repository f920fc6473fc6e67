"""Mean reciprocal rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raytrec.metrics.registry import GroupMetric, metric

if TYPE_CHECKING:
    import torch

    from raytrec.metrics.over_ranks.groups import Groups


@metric("mrr", title="MRR (mean reciprocal rank)", label="MRR", better="higher")
class MRR(GroupMetric):
    """The mean over groups of 1 ÷ the rank of the first positive row.

    Among equal predictions, negative rows come first. Groups without a positive row are left out and counted.
    """

    @classmethod
    def of_groups(cls, groups: Groups) -> tuple[torch.Tensor, torch.Tensor]:
        first = groups.ranks.new_full((groups.count,), len(groups.of) + 1)
        first = first.scatter_reduce(
            0, groups.of, groups.ranks.masked_fill(~groups.relevant, len(groups.of) + 1), "amin"
        )
        return 1 / first.double(), groups.positives > 0

    @classmethod
    def of_ranks(cls, ranks_N: torch.Tensor) -> torch.Tensor:
        return 1 / ranks_N.double()
