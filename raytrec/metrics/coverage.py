"""Coverage of items by the first k places."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from raytrec.metrics.registry import GroupMetric, metric

if TYPE_CHECKING:
    import torch

    from raytrec.metrics.over_ranks.groups import Groups


@metric("coverage", title="coverage at {k}", label="coverage@{k}", better="higher", at_k=True)
class Coverage(GroupMetric):
    """The distinct items among the k highest predictions of all groups ÷ the distinct items of all rows.

    The task's column `item` names them. Among equal predictions, negative rows come first. Weights only say
    which rows count. Source: catalogue coverage of M. Ge et al., Beyond Accuracy, RecSys 2010.
    """

    needs_item = True

    @classmethod
    def sums(cls, groups: Groups) -> dict[str, torch.Tensor]:
        return {}

    @classmethod
    def distinct(cls, groups: Groups) -> dict[str, torch.Tensor]:
        return {"shown": groups.items[groups.ranks <= cls.k], "items": groups.items}

    @classmethod
    def figure(cls, sums: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return sums["shown"] / sums["items"]

    @classmethod
    def counts(cls, sums: Mapping[str, torch.Tensor]) -> dict[str, float | torch.Tensor]:
        return {}
