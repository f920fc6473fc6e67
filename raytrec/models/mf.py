"""Matrix factorisation: a dot product with biases (Rendle et al. 2020, arXiv:2005.09683)."""

from __future__ import annotations

import torch
from torch import nn

from raytrec.config.models.retrieval import MfSection
from raytrec.config.schema import Schema
from raytrec.models.inputs import dim_of
from raytrec.models.parts.sampled import Queries, result, sampled_loss


class MatrixFactorization(nn.Module):
    """score = ⟨p, q⟩ + b_user + b_item + b for embeddings (p, b_user) and (q, b_item), with a learned b.

    Of these, ⟨p, q⟩ + b_item orders the items of a user: query = (p, 1), item = (q, b_item). b_user and b are
    in logits, and in the model's own loss where it is bce. Of a feature with several ids, the sum or mean of
    their embeddings takes the place of one.

    Args:
        schema: the features of user and item, with one dim; others are not read.
        config: their names; the negatives, and what is learned from them.
        outputs: logits of a row; of several, each has its own query (sampled.Queries) and b.
        vectors: whether vectors are given, too.

    Returns (forward):
        float32 [B], or [B, outputs | own loss | query D, item D] (models/__init__.py), D = dim.

    Raises:
        ConfigError: no such feature; tables of different dims.
    """

    def __init__(self, schema: Schema, config: MfSection, outputs: int = 1, vectors: bool = False):
        super().__init__()
        config.check(schema)
        self.config, self.outputs, self.vectors = config, outputs, vectors
        self.queries = Queries(outputs, vectors, dim_of(schema, config.item))
        self.bias = nn.Parameter(torch.zeros(outputs)) if config.bias and outputs else None

    def query(self, dense: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """float32 [B, D] of the user alone; of several outputs, [B, outputs, D]."""
        return self.queries(self._factors(inputs))

    def item(self, dense: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """float32 [B, D] of the item alone."""
        return inputs[self.config.item]

    def forward(self, dense: torch.Tensor, inputs: dict) -> torch.Tensor:
        item_BD, bias_BT = self.item(dense, inputs), None
        if self.bias is not None:
            bias_BT = inputs[self.config.user][:, -1:] + self.bias
        own_B = self._own_loss(item_BD, inputs, bias_BT) if self.config.own_loss else None
        return result(self.query(dense, inputs), item_BD, self.outputs, self.vectors, own_B, bias_BT)

    def _own_loss(self, item_BD: torch.Tensor, inputs: dict, bias_BT: torch.Tensor | None) -> torch.Tensor:
        """float32 [B]; 0 in evaluations."""
        if not self.training:
            return item_BD.new_zeros(len(item_BD), dtype=torch.float32)
        query_B1D = self.queries.of_own_loss(self._factors(inputs)).unsqueeze(1)
        bias_B1 = None if bias_BT is None else bias_BT[:, -1:]
        drawn, item_B1D = inputs[self.config.negatives], item_BD.unsqueeze(1)
        return sampled_loss(self.config.loss, query_B1D, item_B1D, drawn, bias_B1).squeeze(1)

    def _factors(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """(p, b_user) → (p, 1): [B, D]."""
        user_BD = inputs[self.config.user]
        if not self.config.bias:
            return user_BD
        return torch.cat([user_BD[:, :-1], torch.ones_like(user_BD[:, :1])], dim=1)
