"""SASRec: self-attention over a history (Kang and McAuley 2018, arXiv:1808.09781)."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from raytrec.config.models.sequences import SasrecSection
from raytrec.config.schema import Schema
from raytrec.models.inputs import Sequence
from raytrec.models.parts.next_item import NextItem
from raytrec.models.parts.packed import Packed


class SASRec(NextItem):
    """A causal transformer over a history (parts/next_item.py has what it predicts).

    x = √D · e + p for each item's embedding e and the learned vector p of its position (the factor is that of
    the authors' code). Then in each block, with layer norm N and dropout d (sections III.A to III.C):

        x ← x + d(attention(N x))         multi-head, causal
        x ← x + d(W₂ · d(relu(W₁ N x)))

    The state is N of the last block's x.

    Args, Returns, Raises: see NextItem; ConfigError, too, if the heads do not divide D.
    """

    def __init__(self, schema: Schema, config: SasrecSection, outputs: int = 1, vectors: bool = False):
        super().__init__(schema, config, outputs, vectors)
        self.positions = nn.Parameter(torch.randn(config.max_length, self.dim) * 0.02)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(self.dim, config) for _ in range(config.blocks))
        self.norm = nn.LayerNorm(self.dim)

    def states(self, history: Sequence, packed: Packed) -> torch.Tensor:
        places_N = packed.recency if self.config.positions == "recency" else packed.order
        x_ND = packed.pack(history.vectors) * self.dim**0.5
        x_ND = self.dropout(x_ND + nn.functional.embedding(places_N, self.positions))
        for block in self.blocks:
            x_ND = block(x_ND, packed)
        return self.norm(x_ND)


class Block(nn.Module):
    """Attention, and a network of two layers for each item: [N, D] → [N, D]."""

    def __init__(self, dim: int, config: SasrecSection):
        super().__init__()
        hidden = config.feedforward or dim
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        self.attention = Attention(dim, config.heads, config.attention_dropout)
        self.dropout = nn.Dropout(config.dropout)
        self.network = nn.Sequential(
            nn.Linear(dim, hidden), nn.ReLU(), nn.Dropout(config.dropout), nn.Linear(hidden, dim)
        )

    def forward(self, x_ND: torch.Tensor, packed: Packed) -> torch.Tensor:
        x_ND = x_ND + self.dropout(self.attention(self.norms[0](x_ND), packed))
        return x_ND + self.dropout(self.network(self.norms[1](x_ND)))


class Attention(nn.Module):
    """Causal multi-head attention (Vaswani et al. 2017, arXiv:1706.03762): [N, D] → [N, D]."""

    def __init__(self, dim: int, heads: int, dropout: float):
        super().__init__()
        self.heads, self.rate = heads, dropout
        self.inputs, self.output = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x_ND: torch.Tensor, packed: Packed) -> torch.Tensor:
        rate, read = self.rate if self.training else 0.0, []
        for group_bTE in packed.by_time(self.inputs(x_ND)):
            of_all = group_bTE.unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # [3, b, H, T, D ÷ H]
            query_bHTd, key_bHTd, value_bHTd = of_all.unbind(0)
            read_bHTd = scaled_dot_product_attention(
                query_bHTd, key_bHTd, value_bHTd, dropout_p=rate, is_causal=True
            )
            read.append(read_bHTd.transpose(1, 2).flatten(2))
        return self.output(packed.from_time(read))
