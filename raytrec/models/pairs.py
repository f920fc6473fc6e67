"""Matrix factorisation, and neural collaborative filtering (NeuMF)."""

from __future__ import annotations

import torch
from torch import nn

from raytrec.config.models.retrieval import MfSection, NcfSection
from raytrec.config.schema import Schema
from raytrec.models.inputs import once
from raytrec.models.parts.layers import dim_of, mlp
from raytrec.models.parts.sampled import Queries, SampledLoss, absence, result
from raytrec.models.parts.shared import SharedNegatives, losses_of_pairs


class MatrixFactorization(nn.Module):
    """score = ⟨p, q⟩ + b_user + b_item + b for embeddings (p, b_user) and (q, b_item), with a learned b
    (Rendle et al. 2020, arXiv:2005.09683).

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
        self.loss = SampledLoss.of(schema, config, config.item)
        self.shared = SharedNegatives.of(schema, config, self.loss)

    def query(self, dense: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """float32 [B, D] of the user alone; of several outputs, [B, outputs, D]."""
        return self.queries(self._factors(inputs))

    def item(self, dense: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """float32 [B, D] of the item alone."""
        return inputs[self.config.item]

    def forward(self, dense: torch.Tensor, inputs: dict) -> torch.Tensor:
        item_BD, bias_BT = self.item(dense, inputs), None
        if self.bias is not None:
            bias_BT = once(lambda _, given: given[self.config.user][:, -1:], dense, inputs) + self.bias
        own_B = self._own_loss(item_BD, inputs, bias_BT) if self.config.own_loss else None
        query = once(self.query, dense, inputs)
        return result(query, item_BD, self.outputs, self.vectors, own_B, bias_BT)

    def _own_loss(self, item_BD: torch.Tensor, inputs: dict, bias_BT: torch.Tensor | None) -> torch.Tensor:
        """float32 [B]; 0 in evaluations."""
        if not self.training:
            return item_BD.new_zeros(item_BD.shape[0], dtype=torch.float32)
        query_BD = self.queries.of_own_loss(self._factors(inputs))
        bias_B1 = None if bias_BT is None else bias_BT[:, -1:]
        item, drawn = self.config.item, inputs[self.config.negatives]
        return losses_of_pairs(self.loss, self.shared, query_BD, item_BD, item, drawn, inputs, bias_B1)

    def _factors(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """(p, b_user) → (p, 1): [B, D]."""
        user_BD = inputs[self.config.user]
        if not self.config.bias:
            return user_BD
        return torch.cat([user_BD[:, :-1], torch.ones_like(user_BD[:, :1])], dim=1)


class NeuMF(nn.Module):
    """logit = wᵀ (p_user ⊙ p_item, MLP(m_user, m_item)) + b: weighed products (GMF), and an MLP
    (He et al. 2017, arXiv:1708.05031).

    Products and MLP have separate embeddings, as in the paper: the first `gmf_dim` numbers of a feature's
    embedding are p, the others m. With `shared`, both read the whole of it. Scores are not dot products of
    two vectors, so there is no index of items to search: every item is scored.

    Args:
        schema: the features of user and item; others are not read.
        config: their names; sizes; the negatives, and what is learned from them.
        outputs: logits of a row, which share all but w and b. The model's own loss is of the last one.

    Returns (forward):
        float32 [B], or [B, outputs | own loss] (models/__init__.py).

    Raises:
        ConfigError: no such feature; embeddings that are too narrow.
    """

    def __init__(self, schema: Schema, config: NcfSection, outputs: int = 1):
        super().__init__()
        config.check(schema)
        self.config = config
        self.products, users, items = config.widths(schema)
        self.users, self.items, self.hidden = users, items, config.mlp[0]
        self.first = nn.Linear(users + items, self.hidden) if users + items else None
        layers = mlp(config.mlp, config.dropout)
        self.mlp = nn.Sequential(nn.ReLU(), nn.Dropout(config.dropout), *layers) if self.first else None
        self.logit = nn.Linear(self.products + (config.mlp[-1] if self.first else 0), outputs, bias=False)
        self.bias = nn.Parameter(torch.zeros(outputs))
        self.loss = SampledLoss.of(schema, config, config.item)

    def forward(self, dense: torch.Tensor, inputs: dict) -> torch.Tensor:
        user_B1E, item_B1E = (inputs[f].unsqueeze(1) for f in (self.config.user, self.config.item))
        scores_BT = self._scores(user_B1E, item_B1E).squeeze(1)
        logits_BT = scores_BT + self.bias
        if not self.config.own_loss:
            return logits_BT.squeeze(1)
        own_B = self._own_loss(user_B1E, scores_BT[:, -1], inputs)
        return torch.cat([logits_BT, own_B.unsqueeze(1)], dim=1)

    def _own_loss(self, user_B1E: torch.Tensor, own_B: torch.Tensor, inputs: dict) -> torch.Tensor:
        """float32 [B]; 0 in evaluations."""
        if not self.training:
            return torch.zeros_like(own_B, dtype=torch.float32)
        drawn, bias = inputs[self.config.negatives], self.loss.bias_of(self.bias[-1])
        scores_BK = self._scores(user_B1E, drawn.vectors)[:, :, -1].float() + absence(drawn.present)
        return self.loss(own_B.float() + bias, scores_BK + bias, drawn.present.sum(1))

    def _scores(self, user_B1E: torch.Tensor, items_BKE: torch.Tensor) -> torch.Tensor:
        """Of each user for K items: [B, 1, E], [B, K, E] → [B, K, outputs], without b."""
        parts = []
        if self.products:
            parts.append(user_B1E[..., : self.products] * items_BKE[..., : self.products])
        if self.first:
            # The first layer of a user is the same for all of its items.
            of_user, of_item = self.first.weight.split([self.users, self.items], dim=1)
            user_B1H = nn.functional.linear(user_B1E[..., user_B1E.shape[-1] - self.users :], of_user)
            items_BKH = nn.functional.linear(
                items_BKE[..., items_BKE.shape[-1] - self.items :], of_item, self.first.bias
            )
            parts.append(self.mlp(user_B1H + items_BKH))
        return self.logit(torch.cat(parts, dim=-1))
