"""HSTU: pointwise aggregated attention over a history (Zhai et al. 2024, arXiv:2402.17152)."""

from __future__ import annotations

from math import log

import torch
from torch import nn
from torch.nn.functional import embedding, layer_norm, silu

from raytrec.config.models.sequences import HstuSection
from raytrec.config.schema import Schema
from raytrec.models.inputs import Sequence
from raytrec.models.parts.next_item import NextItem
from raytrec.models.parts.packed import Packed

BUCKETS = 128  # of times between items; the last takes all that are longer
FACTOR = log(1.35)  # a bucket's times are 1.35 × as long as those of the one before


class HSTU(NextItem):
    """Hierarchical sequential transduction units over a history (parts/next_item.py has what they predict).

    x = √D · e + p for each item's embedding e and the learned vector p of its position. Then in each layer,
    with layer norm N (without weights) and dropout d (equations 1 to 3), in each head:

        u, v, q, k = silu(W₁ N x)
        a_ij = silu(⟨q_i, k_j⟩ + r_{i−j} + s_{bucket(t_i − t_j)}) ÷ max_length   for j ≤ i, else 0
        x ← x + W₂ · d(u ⊙ N(Σ_j a_ij v_j))

    with learned biases r of each distance and s of each of 128 buckets of times between the two, on a
    logarithmic scale (s only with model.time). Weights do not add up to 1: how much of a history is about
    something counts, too. The state is the last layer's x.

    Args, Returns, Raises: see NextItem; ConfigError, too, if the heads do not divide the width, or there is
    no such column of times.
    """

    def __init__(self, schema: Schema, config: HstuSection, outputs: int = 1, vectors: bool = False):
        super().__init__(schema, config, outputs, vectors)
        self.time = None if config.time is None else config.time_place(schema)
        self.positions = nn.Parameter(torch.randn(config.max_length, self.dim) * 0.02)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(Layer(self.dim, config) for _ in range(config.blocks))

    def states(self, history: Sequence, packed: Packed) -> torch.Tensor:
        places_N = packed.recency if self.config.positions == "recency" else packed.order
        x_ND = packed.pack(history.vectors) * self.dim**0.5
        x_ND = self.dropout(x_ND + embedding(places_N, self.positions))
        buckets = None if self.time is None else self._buckets(history, packed)
        for layer in self.layers:
            x_ND = layer(x_ND, packed, buckets)
        return x_ND

    def _buckets(self, history: Sequence, packed: Packed) -> list[torch.Tensor]:
        """Of the times between every two items: int64 [b, T, T] of each group; 0: none, or before."""
        assert history.side_features is not None
        times_BL1 = history.side_features[:, :, self.time].unsqueeze(2)
        groups = [group_bT1.squeeze(2) for group_bT1 in packed.by_time(packed.pack(times_BL1))]
        return [bucket(times_bT.unsqueeze(2) - times_bT.unsqueeze(1)) for times_bT in groups]


def bucket(between: torch.Tensor) -> torch.Tensor:
    """The bucket of a time between items, in the column's own unit: float [...] → int64 [...]."""
    return (between.clamp(min=1).log() / FACTOR).long().clamp(max=BUCKETS - 1)


class Layer(nn.Module):
    """One unit: [N, D] → [N, D]."""

    def __init__(self, dim: int, config: HstuSection):
        super().__init__()
        self.heads, self.length, width = config.heads, config.max_length, config.width or dim
        self.inputs, self.output = nn.Linear(dim, 4 * width, bias=False), nn.Linear(width, dim)
        self.dropout = nn.Dropout(config.dropout)
        self.distances = nn.Parameter(torch.randn(config.max_length) * 0.02)
        self.times = None if config.time is None else nn.Parameter(torch.randn(BUCKETS) * 0.02)
        nn.init.normal_(self.inputs.weight, std=0.02)
        nn.init.xavier_uniform_(self.output.weight)

    def forward(self, x_ND: torch.Tensor, packed: Packed, buckets: list[torch.Tensor] | None) -> torch.Tensor:
        of_all_NW = silu(self.inputs(layer_norm(x_ND, x_ND.shape[1:])))
        gate_NW, others_NW = of_all_NW.tensor_split([of_all_NW.shape[1] // 4], dim=1)
        groups = packed.by_time(others_NW)
        read_NW = packed.from_time(
            [self._read(group, buckets and buckets[place]) for place, group in enumerate(groups)]
        )
        read_NW = gate_NW * layer_norm(read_NW, read_NW.shape[1:])
        return x_ND + self.output(self.dropout(read_NW))

    def _read(self, group_bTW: torch.Tensor, buckets_bTT: torch.Tensor | None) -> torch.Tensor:
        """Σ_j a_ij v_j: [b, T, 3 · width] → [b, T, width]."""
        rows, length, _ = group_bTW.shape
        by_head = group_bTW.unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        value_nTd, query_nTd, key_nTd = by_head.flatten(1, 2).unbind(0)  # n = b · heads
        bias = self._bias(length, buckets_bTT).to(query_nTd.dtype)
        scores_nTT = torch.baddbmm(bias, query_nTd, key_nTd.transpose(1, 2))
        read_nTd = torch.bmm(silu(scores_nTT).tril(), value_nTd) / self.length
        return read_nTd.unflatten(0, (rows, self.heads)).transpose(1, 2).flatten(2)

    def _bias(self, length: int, buckets_bTT: torch.Tensor | None) -> torch.Tensor:
        """Of each query for each key: [1, T, T], with times [b · heads, T, T]; of later keys, any."""
        places_T = torch.arange(length, device=self.distances.device)
        back_TT = (places_T.unsqueeze(1) - places_T).clamp(min=0)
        bias_1TT = self.distances[back_TT].unsqueeze(0)
        if self.times is None or buckets_bTT is None:
            return bias_1TT
        of_times_bTT = embedding(buckets_bTT, self.times.unsqueeze(1)).squeeze(3)
        return (bias_1TT + of_times_bTT).repeat_interleave(self.heads, 0)
