"""DCN-V2: learned feature products in cross layers.

Wang et al. 2021, arXiv:2008.13535.
"""

from __future__ import annotations

import torch
from torch import nn

from raytrec.config.models.ranking import DcnSection
from raytrec.config.schema import Schema
from raytrec.models.parts.layers import get_embedding_dim, mlp


class DCN(nn.Module):
    """Cross layers over the concatenated dense columns and pooled embeddings, combined with deep layers.

    x₀ consists of the dense columns (after bottom_mlp) and the embeddings in the schema's order. stacked: the
    deep layers read the output of the cross layers. parallel: the deep layers read x₀, and the logit is
    linear in the concatenation of both outputs. MLPerf's DLRM-DCNv2 uses bottom_mlp [512, 256, 128], 3 cross
    layers of rank 512, stacked, and top_mlp [1024, 1024, 512, 256].

    Args:
        schema: Schema with any dense columns and sparse features of any dims.
        config: Layer sizes, arrangement and dropout.
        outputs: Number of logits per row; all layers except the last are shared.

    Raises:
        ConfigError: bottom_mlp is set without dense columns.
    """

    def __init__(self, schema: Schema, config: DcnSection, outputs: int = 1):
        super().__init__()
        config.check(schema)
        self.features = list(schema.sparse)
        self.bottom = mlp([len(schema.dense), *config.bottom_mlp]) if schema.dense else None
        dense = (config.bottom_mlp or [len(schema.dense)])[-1] if schema.dense else 0
        width = dense + sum(get_embedding_dim(schema, feature) for feature in self.features)
        self.cross = Cross(width, config.cross_layers, config.cross_rank)
        self.deep = mlp([width, *config.top_mlp], config.dropout)
        self.parallel = config.deep == "parallel"
        deep = config.top_mlp[-1] if config.top_mlp else width
        self.logit = nn.Linear(deep + width * self.parallel, outputs)

    def forward(self, dense: torch.Tensor, pooled: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the logit of each row, float32 [B]; [B, outputs] if there are several outputs."""
        parts = [self.bottom(dense)] if self.bottom is not None else []
        x_BN = torch.cat([*parts, *(pooled[f] for f in self.features)], dim=1)
        crossed_BN = self.cross(x_BN)
        deep_BM = self.deep(x_BN if self.parallel else crossed_BN)
        return self.logit(torch.cat([crossed_BN, deep_BM], dim=1) if self.parallel else deep_BM).squeeze(1)


class Cross(nn.Module):
    """Cross layers x ← x₀ ⊙ (W x + b) + x, where W is a full matrix or a product U V of a given rank.

    Shapes are float [B, n] → [B, n]. Matrices are initialized as in Glorot and Bengio 2010, biases with 0.
    """

    def __init__(self, n: int, layers: int, rank: int | None = None):
        super().__init__()
        self.layers = nn.ModuleList(_matrix(n, rank) for _ in range(layers))

    def forward(self, x0_BN: torch.Tensor) -> torch.Tensor:
        """Return the output of the last cross layer, float [B, n]."""
        x_BN = x0_BN
        for layer in self.layers:
            x_BN = torch.addcmul(x_BN, x0_BN, layer(x_BN))
        return x_BN


def _matrix(n: int, rank: int | None) -> nn.Module:
    """Return a module that computes x → W x + b."""
    parts = [nn.Linear(n, rank, bias=False), nn.Linear(rank, n)] if rank else [nn.Linear(n, n)]
    for part in parts:
        nn.init.xavier_normal_(part.weight)
    nn.init.zeros_(parts[-1].bias)
    return nn.Sequential(*parts)
