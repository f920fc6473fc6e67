"""Models of feature interactions: DLRM, DCN-V2 and Wukong."""

from __future__ import annotations

import torch
from torch import nn

from raytrec.config.models.base import get_common_dim
from raytrec.config.models.ranking import DcnSection, DlrmSection, WukongSection
from raytrec.config.models.sequences import SequenceSection
from raytrec.config.schema import Schema
from raytrec.models.parts.layers import Constant, mlp, mlp_and_linear


class DLRM(nn.Module):
    """DLRM: pairwise dot products of the pooled embeddings and a bottom MLP's output, followed by a top MLP.

    Naumov et al. 2019, arXiv:1906.00091. The bottom MLP maps the dense columns to one vector with the dim of
    the tables. Without dense columns, the vector is a learned constant, whose dot products give each feature a
    first-order term.

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
        self.bottom = mlp([len(schema.dense), *config.bottom_mlp, dim]) if schema.dense else Constant(dim)
        self.interact = DotInteraction(1 + len(self.features))
        self.top, self.logit = mlp_and_linear(dim + self.interact.size, config.top_mlp, outputs, config.dropout)

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


class DCN(nn.Module):
    """DCN-V2: cross layers over the concatenated dense columns and pooled embeddings, combined with deep layers.

    Wang et al. 2021, arXiv:2008.13535. x₀ consists of the dense columns (after bottom_mlp) and the embeddings in
    the schema's order. With `deep: stacked`, the deep layers read the output of the cross layers. With `deep:
    parallel`, the deep layers read x₀, and the logit is linear in the concatenation of both outputs. MLPerf's
    DLRM-DCNv2 uses bottom_mlp [512, 256, 128], 3 cross layers of rank 512, and top_mlp [1024, 1024, 512, 256].

    Args:
        schema: Schema with any dense columns and sparse features of any dims.
        config: Layer sizes, arrangement and dropout.
        outputs: Number of logits per row; all layers except the last are shared.
    """

    def __init__(self, schema: Schema, config: DcnSection, outputs: int = 1):
        super().__init__()
        self.features = list(schema.sparse)
        self.bottom = mlp([len(schema.dense), *config.bottom_mlp]) if schema.dense else None
        dense = (config.bottom_mlp or [len(schema.dense)])[-1] if schema.dense else 0
        width = dense + sum(schema.get_feature_dim(feature) for feature in self.features)
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
    """Cross layers x ← x₀ ⊙ (W x + b) + x of DCN-V2, float [B, n] → [B, n].

    W is a full matrix, or a product U V of rank `rank` if `rank` is not None. Weights are initialized as in Glorot
    and Bengio 2010, and biases with 0.
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
    """Return a module that computes W x + b; if `rank` is set, W is the product of two matrices of this rank."""
    parts = [nn.Linear(n, rank, bias=False), nn.Linear(rank, n)] if rank else [nn.Linear(n, n)]
    for part in parts:
        nn.init.xavier_normal_(part.weight)
    nn.init.zeros_(parts[-1].bias)
    return nn.Sequential(*parts)


class Wukong(nn.Module):
    """Wukong: interaction layers over the vectors of all features, and a top MLP over the last layer's vectors.

    Zhang et al. 2024, arXiv:2403.02545. The first layer reads the pooled embeddings and, if the schema has dense
    columns, the output of an MLP over these columns. The output of layer i contains interactions of 1 to 2ⁱ
    features.

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
        self.top, self.logit = mlp_and_linear(vectors * dim, config.top_mlp, outputs, config.dropout)

    def forward(self, dense: torch.Tensor, pooled: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the logit of each row, float32 [B]; [B, outputs] if there are several outputs."""
        parts = [self.bottom(dense)] if self.bottom is not None else []
        vectors_BFD = torch.stack([*parts, *(pooled[f] for f in self.features)], dim=1)
        return self.logit(self.top(self.layers(vectors_BFD).flatten(1))).squeeze(1)


class InteractionLayer(nn.Module):
    """Wukong's layer LN(concat(FMB(X), LCB(X)) + X) for a row's n vectors X, float [B, n, D] → [B, n_F + n_L, D].

    The factorization machine block FMB(X) = MLP(LN(flatten(X Xᵀ Y))) is reshaped to n_F vectors (sections 3.4
    and 3.6). Xᵀ Y is computed first, which avoids the n × n matrix X Xᵀ. The linear compression block LCB(X) =
    W X has n_L vectors. If n ≠ n_F + n_L, R X replaces X in the sum, where R is a learned matrix. A single
    matrix product computes Yᵀ X, W X and R X.

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
        outputs = config.fmb_vectors * dim
        self.hidden, self.last = mlp_and_linear(count * config.rank, config.fmb_mlp, outputs, config.dropout)

    def forward(self, vectors_BFD: torch.Tensor) -> torch.Tensor:
        """Return the output vectors of the layer, float [B, n_F + n_L, D]."""
        projected_BDK, compressed_BDL, residual_BDM = self.linear(vectors_BFD.transpose(1, 2)).split(self.sizes, dim=2)
        interactions_BP = self.interaction_norm((vectors_BFD @ projected_BDK).flatten(1))
        machine_BMD = self.last(self.hidden(interactions_BP)).unflatten(1, (-1, vectors_BFD.shape[2]))
        residual = residual_BDM.transpose(1, 2) if self.sizes[2] else vectors_BFD
        return self.norm(torch.cat([machine_BMD, compressed_BDL.transpose(1, 2)], dim=1) + residual)
