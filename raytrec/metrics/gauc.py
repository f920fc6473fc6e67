"""Grouped AUC."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raytrec.metrics.kinds import ONE_CLASS
from raytrec.metrics.registry import GroupMetric, metric

if TYPE_CHECKING:
    import torch

    from raytrec.metrics.over_ranks.groups import Groups


@metric("gauc", title="GAUC (AUC within groups)", label="GAUC", better="higher")
class GAUC(GroupMetric):
    """Σ n_g AUC_g ÷ Σ n_g over the groups with positive and negative rows: n_g, the impressions, is the sum
    of the weights of a group's rows. Groups without both are left out and counted (groups_of_one_class).

    Source: H. Zhu et al., Optimized Cost per Click in Taobao Display Advertising, KDD 2017, section 5.
    """

    left_out = ONE_CLASS

    @classmethod
    def of_groups(cls, groups: Groups) -> tuple[torch.Tensor, torch.Tensor]:
        return groups.auc()

    @classmethod
    def weights(cls, groups: Groups) -> torch.Tensor:
        return groups.add(groups.weights)
