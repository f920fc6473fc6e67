"""Two towers: vectors that are searched by dot product."""

from __future__ import annotations

import torch
from torch import nn

from raytrec.config.models.retrieval import TwoTowerSection
from raytrec.config.schema import Schema
from raytrec.models.inputs import Sequence, once
from raytrec.models.parts.layers import SideBySide, mlp_and_linear
from raytrec.models.parts.sampled import SampledLoss, result
from raytrec.models.parts.shared import SharedNegatives, losses_of_pairs


class TwoTower(nn.Module):
    """logit = scale · ⟨query, item⟩ + bias, with a learned bias, and a scale that is learned or fixed.

    `query` and `item` alone are what retrieval needs: the items' vectors go into an index, which is asked
    with the query's. Scale and bias change no order of the items of one query, as long as
    the scale is positive.

    With several outputs, each has its own query vector, scale and bias, so that one index of items
    serves all tasks. With `vectors`, one more query vector is for losses that compare rows; they are given
    scale · query next to item, so that the scale is a learned temperature.

    With `negatives`, the model's own loss holds a row's item against theirs, whose vectors the item tower
    makes of their ids (sampled.py). It is of the last output's query; without outputs, of the one for losses
    that compare rows, to which it is then added: negatives from the batch are frequent items more often
    than others, drawn ones are not (mixed, as in Yang et al. 2020, https://doi.org/10.1145/3366424.3386195).

    Args:
        schema: any; sequences enter by their mean.
        config: which features belong to which tower, and the sizes of the towers.
        outputs: logits of a row. vectors: whether vectors are given, too.

    Returns (forward):
        float32 [B]: the logit of each row; [B, outputs] for several; else [B, outputs | own loss | query D,
        item D] (models/__init__.py), where D is tower_mlp[-1].

    Raises:
        ConfigError: a feature of no or of two towers; a pattern that matches nothing; negatives for an item
            tower that reads more than ids.
    """

    def __init__(self, schema: Schema, config: TwoTowerSection, outputs: int = 1, vectors: bool = False):
        super().__init__()
        config.check(schema)
        of_tower = config.members(schema)
        self.config = config
        self.queries, self.vectors, self.width = outputs + vectors, vectors, config.tower_mlp[-1]
        widths = {"query": self.queries * self.width, "item": self.width}
        self.towers = nn.ModuleDict(
            {name: Tower(schema, of_tower[name], config, widths[name]) for name in of_tower}
        )
        self.normalize = config.normalize
        # Dot products of vectors grow with the root of their width; cosines are at most 1.
        scale = 5.0 if config.normalize else self.width**-0.5
        scale = 1 / config.temperature if config.temperature else scale
        scales = torch.full((self.queries,) if self.queries > 1 else (), scale)
        if config.learn_temperature:
            self.scale = nn.Parameter(scales)
        else:
            self.register_buffer("scale", scales, persistent=False)
        self.bias = nn.Parameter(torch.zeros((outputs,) if outputs > 1 else ())) if outputs else None
        self.loss, self.shared = None, None
        if config.own_loss:
            (item,) = of_tower["item"]
            self.loss = SampledLoss.of(schema, config, item)
            self.shared = SharedNegatives.of(schema, config, self.loss)

    def query(self, dense: torch.Tensor, pooled: dict[str, torch.Tensor]) -> torch.Tensor:
        """The query tower's vectors: float32 [B, tower_mlp[-1]]; only its own features are looked at.

        With several outputs, [B, outputs, tower_mlp[-1]], and one more, the last, with `vectors`.
        """
        return self._vectors("query", dense, pooled)

    def item(self, dense: torch.Tensor, pooled: dict[str, torch.Tensor]) -> torch.Tensor:
        """The item tower's vectors: float32 [B, tower_mlp[-1]]; only its own features are looked at."""
        return self._vectors("item", dense, pooled)

    def forward(self, dense: torch.Tensor, pooled: dict[str, torch.Tensor]) -> torch.Tensor:
        query, item_BD = once(self.query, dense, pooled), self.item(dense, pooled)
        if self.queries == 1 and not self.vectors and not self.config.own_loss:
            return self.scale * (query * item_BD).sum(1) + self.bias
        query_BQD = self.scale.view(-1, 1) * query.view(-1, self.queries, self.width)
        own_B = self._own_loss(query_BQD, item_BD, dense, pooled) if self.config.own_loss else None
        outputs = self.queries - self.vectors
        return result(query_BQD, item_BD, outputs, self.vectors, own_B, self.bias)

    def _own_loss(
        self, query_BQD: torch.Tensor, item_BD: torch.Tensor, dense: torch.Tensor, pooled: dict
    ) -> torch.Tensor:
        """float32 [B]; 0 in evaluations. query_BQD: times the scale."""
        if not self.training:
            return item_BD.new_zeros(item_BD.shape[0], dtype=torch.float32)
        drawn, (feature,) = pooled[self.config.negatives], self.towers["item"].beside.first_of
        of_all = self._vectors("item", dense, {feature: drawn.vectors.flatten(0, 1)})
        # The last output's, or without outputs the only one.
        own = self.queries - 1 - (self.vectors and self.bias is not None)
        bias_11 = None if self.bias is None else self.bias.view(1, -1)[:, -1:]
        drawn = Sequence(of_all.view(*drawn.present.shape, self.width), drawn.present)
        query_BD = query_BQD[:, own]
        return losses_of_pairs(self.loss, self.shared, query_BD, item_BD, feature, drawn, pooled, bias_11)

    def _vectors(self, tower: str, dense: torch.Tensor, pooled: dict[str, torch.Tensor]) -> torch.Tensor:
        vectors = self.towers[tower](dense, pooled)
        if tower == "query" and self.queries > 1:
            vectors = vectors.view(-1, self.queries, self.width)
        return nn.functional.normalize(vectors, dim=-1) if self.normalize else vectors


class Tower(nn.Module):
    """An MLP over some dense columns and pooled embeddings side by side; its last layer is linear.

    Args:
        members: names of dense columns and sparse features.
        outputs: width of the last layer.
    """

    def __init__(self, schema: Schema, members: set[str], config: TwoTowerSection, outputs: int):
        super().__init__()
        self.beside = SideBySide(schema, members)
        sizes = [self.beside.width, *config.tower_mlp[:-1]]
        self.hidden, self.last = mlp_and_linear(sizes, outputs, config.dropout)

    def forward(self, dense: torch.Tensor, pooled: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.last(self.hidden(self.beside(dense, pooled)))
