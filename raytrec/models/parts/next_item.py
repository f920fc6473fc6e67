"""What models of the next item share: a state after each item of a history, and what is learned from all."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import nn

from raytrec.config.models.sequences import NextItemSection
from raytrec.config.schema import Schema
from raytrec.models.inputs import Sequence, dim_of
from raytrec.models.parts.packed import Packed
from raytrec.models.parts.sampled import Queries, result, sampled_loss


class NextItem(nn.Module, ABC):
    """A causal model of a sequence: the state after each item is a query for the next one.

    score = ⟨state after the most recent item, item⟩ ÷ temperature, of unit vectors with `normalize`. A row
    without a history has the state 0, and so the score 0 for every item.

    The model's own loss is that of every item of the history, the oldest aside, and of the row's own item,
    each predicted from what was before it and held against the row's negatives. A row's loss is the sum over
    these places ÷ max_length, so that all places of all rows count alike.

    Args:
        schema: history and item, of one table; others are not read.
        config: their names, sizes, and what is learned.
        outputs: logits of a row; of several, each has its own query (sampled.Queries).
        vectors: whether vectors are given, too: the query's is divided by the temperature.

    Returns (forward):
        float32 [B], or [B, outputs | own loss | query D, item D] (models/__init__.py), D = dim of the table.

    Raises:
        ConfigError: no such feature; no sequence; history, item and negatives of different tables.
    """

    def __init__(self, schema: Schema, config: NextItemSection, outputs: int = 1, vectors: bool = False):
        super().__init__()
        config.check(schema)
        self.config, self.outputs, self.vectors = config, outputs, vectors
        self.dim = dim_of(schema, config.item)
        self.queries = Queries(outputs, vectors, self.dim)

    @abstractmethod
    def states(self, history: Sequence, packed: Packed) -> torch.Tensor:
        """The state after each item that there is: float32 [N, D], each from it and older ones alone.

        Args:
            packed: where these items are in the history.
        """

    def query(self, dense: torch.Tensor, inputs: dict) -> torch.Tensor:
        """float32 [B, D] of the history alone; of several outputs, [B, outputs, D]."""
        history = inputs[self.config.history]
        packed = Packed(history.present)
        return self._query(self.states(history, packed), packed)

    def item(self, dense: torch.Tensor, inputs: dict) -> torch.Tensor:
        """float32 [B, D] of the item alone."""
        return self._unit(inputs[self.config.item])

    def forward(self, dense: torch.Tensor, inputs: dict) -> torch.Tensor:
        history, item_BD = inputs[self.config.history], self.item(dense, inputs)
        packed = Packed(history.present)
        states_ND, own_B = self.states(history, packed), None
        if self.config.own_loss and self.training:
            own_B = self._own_loss(states_ND, packed, inputs)
        elif self.config.own_loss:
            own_B = item_BD.new_zeros(len(item_BD), dtype=torch.float32)
        query = self._query(states_ND, packed) / self.config.temperature
        return result(query, item_BD, self.outputs, self.vectors, own_B)

    def _own_loss(self, states_ND: torch.Tensor, packed: Packed, inputs: dict) -> torch.Tensor:
        """float32 [B]."""
        history, drawn = inputs[self.config.history], inputs[self.config.negatives]
        # What follows each item; the row's own follows the most recent one.
        next_BLD = torch.cat([inputs[self.config.item].unsqueeze(1), history.vectors[:, :-1]], dim=1)
        query_ND = self._unit(self.queries.of_own_loss(states_ND)) / self.config.temperature
        groups = zip(
            packed.by_time(query_ND),
            packed.by_time(self._unit(packed.pack(next_BLD))),
            packed.in_groups(self._unit(drawn.vectors)),
            packed.in_groups(drawn.present),
            packed.there,
            strict=True,
        )
        losses = [
            (sampled_loss(self.config.loss, query_bTD, next_bTD, Sequence(vectors, present)) * there_bT).sum(
                1
            )
            for query_bTD, next_bTD, vectors, present, there_bT in groups
        ]
        return packed.in_rows(losses) / self.config.max_length

    def _query(self, states_ND: torch.Tensor, packed: Packed) -> torch.Tensor:
        return self._unit(self.queries(packed.newest(states_ND)))

    def _unit(self, vectors: torch.Tensor) -> torch.Tensor:
        return nn.functional.normalize(vectors, dim=-1) if self.config.normalize else vectors
