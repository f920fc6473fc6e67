"""Hand-written DLRM-HSTU in plain torch, without raytrec, for one process and padded rows.

This independent implementation has the layers, loss, dropout and optimizer of raytrec/models/hstu_rank.py, with a
user as the only context. Histories are padded to the longest of the batch, oldest event first.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

NUM_BUCKETS, BUCKET_RATIO = 128, 1.35
TOWER = 64


class PlainRanker(nn.Module):
    """Model that scores one candidate per row, and outputs the loss of a batch.

    Args:
        shape: Sizes and settings, such as SHAPE in benchmarks/hstu_rank.py.
    """

    def __init__(self, shape: dict):
        super().__init__()
        dim, length, self.actions = shape["dim"], shape["length"], shape["actions"]
        self.items, self.users = nn.Embedding(shape["items"], dim), nn.Embedding(shape["users"], dim)
        for table in (self.items, self.users):
            nn.init.uniform_(table.weight, -(dim**-0.5), dim**-0.5)
        self.context = nn.Linear(dim, dim)
        self.item_encoder, self.action_encoder = make_encoder(dim, shape), make_encoder(self.actions, shape)
        self.candidate_encoder = make_encoder(dim, shape)
        self.positions = nn.Parameter(torch.randn(length, 2 * dim) * 0.02)
        self.candidate = nn.Parameter(torch.randn(dim) * 0.02)
        self.times = nn.Parameter(torch.randn(NUM_BUCKETS, dim) * 0.02)
        self.layers = nn.ModuleList(PlainLayer(shape) for _ in range(shape["blocks"]))
        self.norm = nn.LayerNorm(dim)
        self.tower = nn.Sequential(nn.Linear(dim, TOWER), nn.ReLU(), nn.Dropout(shape["dropout"]), nn.Linear(TOWER, 1))

    def forward(
        self,
        users: torch.Tensor,
        items: torch.Tensor,
        labels: torch.Tensor,
        history: torch.Tensor,
        present: torch.Tensor,
        actions: torch.Tensor,
        times: torch.Tensor,
    ) -> torch.Tensor:
        """Return the mean loss.

        Args:
            users: User of each row, int64 [B].
            items: Candidate of each row, int64 [B].
            labels: 0 or 1, float32 [B].
            history: Items of the events, int64 [B, T].
            present: True for positions with an event, bool [B, T].
            actions: Bit masks of the events' actions, int64 [B, T].
            times: Times of the events, float64 [B, T].
        """
        lengths = present.sum(1)
        recency = (lengths.unsqueeze(1) - 1 - torch.arange(history.shape[1])).clamp(min=0)
        bits = (actions.unsqueeze(2) >> torch.arange(self.actions)) & 1
        ages = times.gather(1, (lengths.unsqueeze(1) - 1).clamp(min=0)) - times
        buckets = (ages.clamp(min=1).log() / math.log(BUCKET_RATIO)).long().clamp(max=NUM_BUCKETS - 1)
        events = torch.stack([self.item_encoder(self.items(history)), self.action_encoder(bits.float())], 2)
        events = events + self.positions[recency].unflatten(2, (2, -1)) + self.times[buckets].unsqueeze(2)
        item = self.items(items)
        context, candidate = self.context(self.users(users)), self.item_encoder(item) + self.candidate
        x = torch.cat([context.unsqueeze(1), events.flatten(1, 2), candidate.unsqueeze(1)], 1)
        one = torch.ones(len(users), 1, dtype=torch.bool)
        keys = torch.cat([one, present.repeat_interleave(2, 1), one], 1)
        mask = (keys.unsqueeze(1) & torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()).unsqueeze(1).float()
        for layer in self.layers:
            x = layer(x, mask)
        logits = self.tower(self.norm(x[:, -1]) * self.candidate_encoder(item)).squeeze(1)
        return F.binary_cross_entropy_with_logits(logits, labels)


class Gate(nn.Module):
    """x · σ(layer norm of x): [..., width] → [..., width]."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the gated values."""
        return x * torch.sigmoid(self.norm(x))


def make_encoder(inputs: int, shape: dict) -> nn.Sequential:
    """Return an MLP with layer norm: [..., inputs] → [..., D]."""
    dim, hidden = shape["dim"], shape["encoder"]
    return nn.Sequential(nn.Linear(inputs, hidden), Gate(hidden), nn.Linear(hidden, dim), nn.LayerNorm(dim))


class PlainLayer(nn.Module):
    """Hierarchical sequential transduction unit on padded tokens: [B, T, D] → [B, T, D]."""

    def __init__(self, shape: dict):
        super().__init__()
        dim, self.heads, self.tokens = shape["dim"], shape["heads"], 2 * shape["length"] + 2
        self.norm, self.read_norm = nn.LayerNorm(dim, 1e-6), nn.LayerNorm(dim, 1e-6)
        self.inputs, self.output = nn.Linear(dim, 4 * dim), nn.Linear(3 * dim, dim, bias=False)
        self.dropout = nn.Dropout(shape["dropout"])

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the outputs of the layer.

        Args:
            x: Tokens, float32 [B, T, D].
            mask: 1 where a token (third dim) attends to another (last dim), else 0, float32 [B, 1, T, T].
        """
        k, v, q, u = self.inputs(self.norm(x)).chunk(4, -1)
        k, v, q = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in (k, v, q))
        weights = F.silu(q @ k.transpose(2, 3) * q.shape[-1] ** -0.5) * mask / self.tokens
        read, u = (weights @ v).transpose(1, 2).flatten(2), F.silu(u)
        return x + self.output(self.dropout(torch.cat([u, read, u * self.read_norm(read)], -1)))


def padded(rows: dict[str, np.ndarray]) -> tuple[torch.Tensor, ...]:
    """Return a batch for the plain model, padded from the columns of benchmarks/hstu_rank.py."""
    lengths = np.diff(rows["offsets"])
    present = np.arange(lengths.max()) < lengths[:, None]

    def spread(values: np.ndarray) -> np.ndarray:
        table = np.zeros(present.shape, values.dtype)
        table[present] = values
        return table

    events = [spread(rows["history"]), present, spread(rows["actions"]), spread(rows["times"])]
    return tuple(torch.from_numpy(part) for part in (rows["users"], rows["items"], rows["labels"], *events))
