"""DBMTL: tasks that depend on other tasks, as in a Bayesian network (Wang et al. 2019, arXiv:1902.09154)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from raytrec.config.models.multitask import DBMTLSection
from raytrec.config.schema import Schema
from raytrec.models.inputs import mlp
from raytrec.models.parts.fields import SideBySide


class DBMTL(nn.Module):
    """P(labels | x) = Πₖ P(label k | x, the labels that it depends on), in the layers below the logits.

    With s the layers that all share over the dense columns and embeddings side by side, and tₖ = towerₖ(s)
    those of task k: rₖ = MLPₖ(tₖ next to rⱼ of each task j that it depends on); its logits are linear in rₖ.

    Args:
        schema: any dense columns, sparse features of any dims.
        config: relations, sizes and dropout.
        tasks: task → its columns of logits.

    Returns (forward):
        float32 [B, columns of all tasks], in their order; [B] of one column.

    Raises:
        ConfigError: relations of tasks that there are not, or in a circle.
    """

    def __init__(self, schema: Schema, config: DBMTLSection, tasks: Mapping[str, int]):
        super().__init__()
        self.beside = SideBySide(schema)
        self.bottom = mlp([self.beside.width, *config.bottom_mlp], config.dropout)
        shared = (config.bottom_mlp or [self.beside.width])[-1]
        places = {name: place for place, name in enumerate(tasks)}
        # place of a task → places of those that it depends on, in an order in which they can be computed
        self.parents = {
            places[name]: [places[parent] for parent in parents]
            for name, parents in config.order(tasks).items()
        }
        own, related = config.tower_mlp[-1], config.relation_mlp[-1]
        self.towers = nn.ModuleList(mlp([shared, *config.tower_mlp], config.dropout) for _ in tasks)
        self.relations = nn.ModuleList(
            mlp([own + len(self.parents[place]) * related, *config.relation_mlp], config.dropout)
            for place in range(len(tasks))
        )
        self.logits = nn.ModuleList(nn.Linear(related, columns) for columns in tasks.values())

    def forward(self, dense: torch.Tensor, pooled: dict[str, torch.Tensor]) -> torch.Tensor:
        shared_BN = self.bottom(self.beside(dense, pooled))
        related: dict[int, torch.Tensor] = {}
        for place, parents in self.parents.items():
            own_BM = self.towers[place](shared_BN)
            inputs = torch.cat([own_BM, *(related[parent] for parent in parents)], dim=1)
            related[place] = self.relations[place](inputs)
        logits = [logit(related[place]) for place, logit in enumerate(self.logits)]
        return torch.cat(logits, dim=1).squeeze(1)
