"""DLRM: pairwise dot products of dense and sparse features."""

from __future__ import annotations

import torch
from torch import nn

from raytrec.config.models.base import get_common_dim
from raytrec.config.models.ranking import DlrmSection
from raytrec.config.models.sequences import SequenceSection
from raytrec.config.schema import Schema
from raytrec.models.parts.layers import Constant, mlp, mlp_and_linear


class DLRM(nn.Module):
    """Bottom MLP, pairwise dot products of its output and the pooled embeddings, and top MLP.

    Naumov et al. 2019, arXiv:1906.00091. The bottom MLP maps the dense columns to one vector with the dim of
    the tables. Without dense columns, a learned constant takes its place; its dot products still give each
    feature a first-order term.

    Args:
        schema: Schema with any dense columns; all tables have the same dim.
        config: Layer sizes and dropout.
        outputs: Number of logits per row; all layers except the last are shared.

    Raises:
        ConfigError: The tables have different dims.
    """

    def __init__(self, schema: Schema, config: DlrmSection | SequenceSection, outputs: int = 1):
        super().__init__()
        dim = get_common_dim(schema, config.name)
        self.features = list(schema.sparse)
        if schema.dense:
            self.bottom = mlp([len(schema.dense), *config.bottom_mlp, dim])
        else:
            self.bottom = Constant(dim)
        self.interact = DotInteraction(1 + len(self.features))
        sizes = [dim + self.interact.size, *config.top_mlp]
        self.top, self.logit = mlp_and_linear(sizes, outputs, config.dropout)

    def forward(self, dense: torch.Tensor, pooled: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the logit of each row, float32 [B]; [B, outputs] if there are several outputs."""
        dense_BD = self.bottom(dense)
        vectors_BFD = torch.stack([dense_BD] + [pooled[f] for f in self.features], dim=1)
        pairs_BP = self.interact(vectors_BFD)
        return self.logit(self.top(torch.cat([dense_BD, pairs_BP], dim=1))).squeeze(1)


class DotInteraction(nn.Module):
    """Dot products of all pairs of n vectors: float [B, n, D] → [B, n·(n-1)/2]."""

    def __init__(self, n: int):
        super().__init__()
        self.size = n * (n - 1) // 2
        rows, columns = torch.triu_indices(n, n, offset=1)
        self.register_buffer("upper", rows * n + columns, persistent=False)

    def forward(self, vectors_BFD: torch.Tensor) -> torch.Tensor:
        """Return the dot product of each pair of vectors, float [B, n·(n-1)/2]."""
        products_BFF = torch.bmm(vectors_BFD, vectors_BFD.transpose(1, 2))
        return products_BFF.flatten(1).index_select(1, self.upper)
