"""MMoE: experts that all tasks share, and that each weighs for itself (Ma et al. 2018,
doi:10.1145/3219819.3220007)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from raytrec.config.models.mmoe import MMoESection
from raytrec.config.schema import Schema
from raytrec.models.fields import SideBySide
from raytrec.models.towers import Experts, Gate, TaskTowers


class MMoE(nn.Module):
    """logits of task k = towerₖ(Σₑ softmax(Wₖ x)ₑ · expertₑ(x)) (equations 6 and 7).

    x has the dense columns and embeddings side by side.

    Args:
        schema: any dense columns, sparse features of any dims.
        config: experts, sizes and dropout.
        tasks: task → its columns of logits.

    Returns (forward):
        float32 [B, columns of all tasks], in their order; [B] of one column.
    """

    def __init__(self, schema: Schema, config: MMoESection, tasks: Mapping[str, int]):
        super().__init__()
        self.beside = SideBySide(schema)
        width = self.beside.width
        self.experts = Experts(config.experts, width, config.expert_mlp, config.dropout)
        self.gates = nn.ModuleList(Gate(width, config.experts) for _ in tasks)
        self.towers = TaskTowers(config.expert_mlp[-1], config.tower_mlp, tasks, config.dropout)

    def forward(self, dense: torch.Tensor, pooled: dict[str, torch.Tensor]) -> torch.Tensor:
        x_BN = self.beside(dense, pooled)
        experts_BEM = self.experts(x_BN)
        return self.towers([gate(x_BN, experts_BEM) for gate in self.gates])
