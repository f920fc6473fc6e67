"""Hand-written SASRec and HSTU in plain torch, without raytrec, for one process and padded rows.

This independent implementation has the layers, loss, dropout and optimizer of raytrec/models/next_item.py.
Rows are padded to the longest row of the batch, oldest id first, so causal attention needs no other mask.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F


class PlainModel(nn.Module):
    """Model that predicts each item from the items before it, and outputs the loss of a batch.

    Args:
        shape: Sizes and settings, such as ML1M in benchmarks/next_item.py.
    """

    def __init__(self, shape: dict):
        super().__init__()
        self.dim, self.length, self.shared = shape["dim"], shape["length"], shape["share_negatives"]
        self.temperature = 0.05
        self.items = nn.Embedding(shape["items"] + 1, self.dim, padding_idx=shape["items"])
        nn.init.uniform_(self.items.weight, -(self.dim**-0.5), self.dim**-0.5)
        self.positions = nn.Embedding(self.length, self.dim)
        nn.init.normal_(self.positions.weight, std=0.02)
        self.dropout = nn.Dropout(shape["dropout"])
        make = SasrecBlock if shape["model"] == "sasrec" else HstuBlock
        self.blocks = nn.ModuleList(make(shape) for _ in range(shape["blocks"]))
        self.norm = nn.LayerNorm(self.dim) if shape["model"] == "sasrec" else nn.Identity()

    def forward(self, ids: torch.Tensor, present: torch.Tensor, negatives: torch.Tensor) -> torch.Tensor:
        """Return the mean over rows of the sum of losses over positions, divided by max_length.

        Args:
            ids: Each row's history and own item, int64 [B, T + 1].
            present: True for positions with an id, bool [B, T].
            negatives: Negative items, int64 [B, K].
        """
        vectors = self.items(ids)
        x = self.dropout(vectors[:, :-1] * self.dim**0.5 + self.positions.weight[: present.shape[1]])
        for block in self.blocks:
            x = block(x)
        states, following = self.norm(x), vectors[:, 1:]
        drawn = F.normalize(self.items(negatives), dim=-1)
        if self.shared:
            states, following = states[present], following[present]
        query = F.normalize(states, dim=-1) / self.temperature
        positive = (query * F.normalize(following, dim=-1)).sum(-1)
        if self.shared:
            same = ids[:, 1:][present].unsqueeze(1) == negatives.view(-1)
            scores = (query @ drawn.view(-1, self.dim).T).masked_fill(same, -torch.inf)
            losses = F.softplus(scores.logsumexp(-1) - positive)
        else:
            losses = F.softplus((query @ drawn.transpose(1, 2)).logsumexp(-1) - positive)[present]
        return losses.sum() / (self.length * len(ids))


class SasrecBlock(nn.Module):
    """Block of causal self-attention and a two-layer network: [B, T, D] → [B, T, D]."""

    def __init__(self, shape: dict):
        super().__init__()
        dim, hidden, self.heads = shape["dim"], shape["feedforward"], shape["heads"]
        self.norm_1, self.norm_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.dropout = nn.Dropout(shape["dropout"])
        self.network = nn.Sequential(
            nn.Linear(dim, hidden), nn.ReLU(), nn.Dropout(shape["dropout"]), nn.Linear(hidden, dim)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs of the block, [B, T, D]."""
        rows, length, dim = x.shape
        qkv = self.qkv(self.norm_1(x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        read = F.scaled_dot_product_attention(*qkv.unbind(0), is_causal=True)
        x = x + self.dropout(self.out(read.transpose(1, 2).reshape(rows, length, dim)))
        return x + self.dropout(self.network(self.norm_2(x)))


class HstuBlock(nn.Module):
    """Block of pointwise attention with a bias for each distance: [B, T, D] → [B, T, D]."""

    def __init__(self, shape: dict):
        super().__init__()
        dim, self.heads, self.length = shape["dim"], shape["heads"], shape["length"]
        self.uvqk, self.out = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(dim, dim)
        self.distances = nn.Parameter(torch.randn(self.length) * 0.02)
        self.dropout = nn.Dropout(shape["dropout"])
        places = torch.arange(self.length)
        self.register_buffer("back", (places.unsqueeze(1) - places).clamp(min=0))
        self.register_buffer("causal", torch.ones(self.length, self.length).tril())
        nn.init.normal_(self.uvqk.weight, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs of the block, [B, T, D]."""
        rows, length, dim = x.shape
        u, v, q, k = F.silu(self.uvqk(F.layer_norm(x, (dim,)))).chunk(4, -1)
        v, q, k = (part.view(rows, length, self.heads, -1).transpose(1, 2) for part in (v, q, k))
        bias = self.distances[self.back[:length, :length]]
        weights = F.silu(q @ k.transpose(2, 3) + bias) * self.causal[:length, :length]
        read = (weights @ v).transpose(1, 2).reshape(rows, length, dim) / self.length
        return x + self.out(self.dropout(u * F.layer_norm(read, (dim,))))


class PlainStep:
    """Training step of a plain model, with the same `train` method as raytrec's Step.

    Adam updates every row of the tables, as in raytrec on CPU, where FBGEMM has no kernel for Adam.

    Args:
        model: Model that maps a batch to its loss.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self.optimizer = torch.optim.Adam(self.model.parameters(), fused=True)

    def train(self, batches: Iterator[tuple[torch.Tensor, ...]], steps: int) -> Iterator[torch.Tensor]:
        """Train on `steps` batches, and yield the loss after each."""
        for _ in range(steps):
            loss = self.model(*next(batches))
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            yield loss.detach()


def padded(offsets: np.ndarray, ids: np.ndarray, own: np.ndarray, negatives: np.ndarray, shape: dict):
    """Return a batch for the plain model, padded from concatenated ids, the oldest first."""
    lengths = np.diff(offsets)
    places = np.arange(lengths.max() + 1)
    present = places[:-1] < lengths[:, None]
    padded_ids = np.full((len(lengths), len(places)), shape["items"])
    padded_ids[:, :-1][present] = ids
    padded_ids[np.arange(len(lengths)), lengths] = own
    return tuple(torch.from_numpy(part) for part in (padded_ids, present, negatives))
