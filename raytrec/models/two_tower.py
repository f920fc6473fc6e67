"""Two towers: what asks and what is recommended become vectors that can be searched by their dot product."""

from __future__ import annotations

import torch
from torch import nn

from raytrec.config.models.two_tower import TwoTowerSection
from raytrec.config.schema import Schema
from raytrec.models.inputs import dim_of, mlp


class TwoTower(nn.Module):
    """logit = scale · ⟨query, item⟩ + bias, with a learned scale and bias.

    `query` and `item` alone are what retrieval needs: the items' vectors go into an index, which is asked
    with the query's. Scale and bias change no order of the items of one query, as long as
    the scale is positive.

    Args:
        schema: any; sequences enter by their mean.
        config: which features belong to which tower, and the sizes of the towers.

    Returns (forward):
        float32 [B]: the logit of each row.

    Raises:
        ConfigError: a feature of no or of two towers; a pattern that matches nothing.
    """

    def __init__(self, schema: Schema, config: TwoTowerSection):
        super().__init__()
        of_tower = config.members(schema)
        self.towers = nn.ModuleDict({side: Tower(schema, of_tower[side], config) for side in of_tower})
        self.normalize = config.normalize
        # Dot products of vectors grow with the root of their width; cosines are at most 1.
        self.scale = nn.Parameter(torch.tensor(5.0 if config.normalize else config.tower_mlp[-1] ** -0.5))
        self.bias = nn.Parameter(torch.zeros(()))

    def query(self, dense: torch.Tensor, pooled: dict[str, torch.Tensor]) -> torch.Tensor:
        """The query tower's vectors: float32 [B, tower_mlp[-1]]; only its own features are looked at."""
        return self._vectors("query", dense, pooled)

    def item(self, dense: torch.Tensor, pooled: dict[str, torch.Tensor]) -> torch.Tensor:
        """The item tower's vectors: float32 [B, tower_mlp[-1]]; only its own features are looked at."""
        return self._vectors("item", dense, pooled)

    def forward(self, dense: torch.Tensor, pooled: dict[str, torch.Tensor]) -> torch.Tensor:
        products_B = (self.query(dense, pooled) * self.item(dense, pooled)).sum(1)
        return self.scale * products_B + self.bias

    def _vectors(self, side: str, dense: torch.Tensor, pooled: dict[str, torch.Tensor]) -> torch.Tensor:
        vectors_BD = self.towers[side](dense, pooled)
        return nn.functional.normalize(vectors_BD, dim=1) if self.normalize else vectors_BD


class Tower(nn.Module):
    """An MLP over some dense columns and pooled embeddings side by side; its last layer is linear.

    Args:
        members: names of dense columns and sparse features.
    """

    def __init__(self, schema: Schema, members: set[str], config: TwoTowerSection):
        super().__init__()
        self.features = [feature for feature in schema.sparse if feature in members]
        columns = [place for place, name in enumerate(schema.dense) if name in members]
        self.register_buffer("columns", torch.tensor(columns, dtype=torch.long), persistent=False)
        width = len(columns) + sum(dim_of(schema, feature) for feature in self.features)
        *hidden, last = config.tower_mlp
        self.hidden = mlp([width, *hidden], config.dropout)
        self.last = nn.Linear(hidden[-1] if hidden else width, last)

    def forward(self, dense: torch.Tensor, pooled: dict[str, torch.Tensor]) -> torch.Tensor:
        parts = [dense.index_select(1, self.columns)] if len(self.columns) else []
        return self.last(self.hidden(torch.cat([*parts, *(pooled[f] for f in self.features)], dim=1)))
