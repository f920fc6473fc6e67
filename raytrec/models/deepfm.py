"""DeepFM: a factorization machine and an MLP over the same vectors (Guo et al. 2017, arXiv:1703.04247)."""

from __future__ import annotations

import torch
from torch import nn

from raytrec.config.models.deepfm import DeepFMSection
from raytrec.config.schema import Schema
from raytrec.models.fields import Fields
from raytrec.models.inputs import mlp


class DeepFM(nn.Module):
    """logit = Σᵢ wᵢ xᵢ + Σᵢ<ⱼ ⟨vᵢ, vⱼ⟩ xᵢ xⱼ + wᵀ MLP(all vectors side by side) + b.

    Weights wᵢ and vectors vᵢ are parts of one row of a table (fields.Fields). Several outputs have weights
    and a last layer each, and sum the D numbers of Σᵢ<ⱼ vᵢ ⊙ vⱼ with learned factors, which begin as 1; those
    of one output are 1. (torchrec.modules.deepfm.FactorizationMachine also multiplies each number of a vector
    by the others: its products are not the paper's.)

    Args:
        schema: any dense columns, sparse features whose tables all have one dim, larger than T.
        config: sizes and dropout.
        outputs: T, logits of a row.

    Returns (forward):
        float32 [B]: the logit of each row; [B, T] for several.

    Raises:
        ConfigError: tables of different dims.
    """

    def __init__(self, schema: Schema, config: DeepFMSection, outputs: int = 1):
        super().__init__()
        self.fields = Fields(schema, config.name, outputs)
        width = self.fields.count * self.fields.dim
        self.factors = nn.Parameter(torch.ones(self.fields.dim, outputs)) if outputs > 1 else None
        self.deep = mlp([width, *config.top_mlp], config.dropout)
        self.logit = nn.Linear((config.top_mlp or [width])[-1], outputs)

    def forward(self, dense: torch.Tensor, pooled: dict[str, torch.Tensor]) -> torch.Tensor:
        first_BT, vectors_BFD = self.fields(dense, pooled)
        pairs_BD = sum_of_pairs(vectors_BFD)
        second = pairs_BD.sum(1, keepdim=True) if self.factors is None else pairs_BD @ self.factors
        return (first_BT + second + self.logit(self.deep(vectors_BFD.flatten(1)))).squeeze(1)


def sum_of_pairs(vectors_BFD: torch.Tensor) -> torch.Tensor:
    """Σᵢ<ⱼ vᵢ ⊙ vⱼ = ((Σ v)² − Σ v²) ÷ 2: float [B, F, D] → [B, D]."""
    return (vectors_BFD.sum(1).square() - vectors_BFD.square().sum(1)) / 2
