"""Wukong: stacked factorization machines."""

from __future__ import annotations

import torch
from torch import nn

from raytrec.config.models.base import get_common_dim
from raytrec.config.models.ranking import WukongSection
from raytrec.config.schema import Schema
from raytrec.models.parts.layers import mlp, mlp_and_linear


class Wukong(nn.Module):
    """Interaction layers over the vectors of all features, and a top MLP over the last layer's vectors.

    Zhang et al. 2024, arXiv:2403.02545. X₀ contains the output of an MLP over the dense columns, if there are
    any, and the pooled embeddings. Layer i returns interactions of 1 to 2ⁱ features.

    Args:
        schema: Schema with any dense columns; all tables have the same dim.
        config: Number and sizes of the layers, and dropout.
        outputs: Number of logits per row; all layers except the last are shared.

    Raises:
        ConfigError: The tables have different dims.
    """

    def __init__(self, schema: Schema, config: WukongSection, outputs: int = 1):
        super().__init__()
        dim = get_common_dim(schema, config.name)
        self.features = list(schema.sparse)
        self.bottom = mlp([len(schema.dense), *config.bottom_mlp, dim]) if schema.dense else None
        vectors = config.fmb_vectors + config.lcb_vectors
        counts = [len(self.features) + bool(schema.dense), *[vectors] * (config.layers - 1)]
        self.layers = nn.Sequential(*(InteractionLayer(count, dim, config) for count in counts))
        self.top, self.logit = mlp_and_linear([vectors * dim, *config.top_mlp], outputs, config.dropout)

    def forward(self, dense: torch.Tensor, pooled: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the logit of each row, float32 [B]; [B, outputs] if there are several outputs."""
        parts = [self.bottom(dense)] if self.bottom is not None else []
        vectors_BFD = torch.stack([*parts, *(pooled[f] for f in self.features)], dim=1)
        return self.logit(self.top(self.layers(vectors_BFD).flatten(1))).squeeze(1)


class InteractionLayer(nn.Module):
    """LN(concat(FMB(X), LCB(X)) + X) for the n vectors X of a row, float [B, n, D] → [B, n_F + n_L, D].

    FMB(X) = MLP(LN(flatten(X Xᵀ Y))) is reshaped to n_F vectors (sections 3.4 and 3.6). Xᵀ Y is computed first,
    so the n × n products are not. LCB(X) = W X has n_L vectors. If n ≠ n_F + n_L, a linear map of the vectors
    replaces X in the sum. One matrix product computes all linear maps of the vectors: Yᵀ X, W X and this one.

    Args:
        count: n, the number of vectors of the input.
        dim: D, the dim of all vectors.
        config: n_F, n_L, the rank (number of columns of Y), the hidden sizes of the MLP, and dropout.
    """

    def __init__(self, count: int, dim: int, config: WukongSection):
        super().__init__()
        vectors = config.fmb_vectors + config.lcb_vectors
        self.sizes = [config.rank, config.lcb_vectors, vectors if count != vectors else 0]
        self.linear = nn.Linear(count, sum(self.sizes), bias=False)
        self.interaction_norm, self.norm = nn.LayerNorm(count * config.rank), nn.LayerNorm(dim)
        sizes = [count * config.rank, *config.fmb_mlp]
        self.hidden, self.last = mlp_and_linear(sizes, config.fmb_vectors * dim, config.dropout)

    def forward(self, vectors_BFD: torch.Tensor) -> torch.Tensor:
        """Return the vectors of the layer, float [B, n_F + n_L, D]."""
        projected_BDK, compressed_BDL, residual_BDM = self.linear(vectors_BFD.transpose(1, 2)).split(self.sizes, dim=2)
        interactions_BP = self.interaction_norm((vectors_BFD @ projected_BDK).flatten(1))
        machine_BMD = self.last(self.hidden(interactions_BP)).unflatten(1, (-1, vectors_BFD.shape[2]))
        residual = residual_BDM.transpose(1, 2) if self.sizes[2] else vectors_BFD
        return self.norm(torch.cat([machine_BMD, compressed_BDL.transpose(1, 2)], dim=1) + residual)
