"""Tasks that share their lowest layers (Caruana 1997, "Multitask Learning", Machine Learning 28)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from raytrec.config.models.shared_bottom import SharedBottomSection
from raytrec.config.schema import Schema
from raytrec.models.fields import SideBySide
from raytrec.models.inputs import mlp
from raytrec.models.towers import TaskTowers


class SharedBottom(nn.Module):
    """logits of task k = towerₖ(MLP(dense columns and embeddings side by side)).

    Args:
        schema: any dense columns, sparse features of any dims.
        config: sizes and dropout.
        tasks: task → its columns of logits.

    Returns (forward):
        float32 [B, columns of all tasks], in their order; [B] of one column.
    """

    def __init__(self, schema: Schema, config: SharedBottomSection, tasks: Mapping[str, int]):
        super().__init__()
        self.beside = SideBySide(schema)
        self.bottom = mlp([self.beside.width, *config.bottom_mlp], config.dropout)
        self.towers = TaskTowers(config.bottom_mlp[-1], config.tower_mlp, tasks, config.dropout)
        self.count = len(tasks)

    def forward(self, dense: torch.Tensor, pooled: dict[str, torch.Tensor]) -> torch.Tensor:
        shared_BN = self.bottom(self.beside(dense, pooled))
        return self.towers([shared_BN] * self.count)
