"""What models are given of sparse features, and parts that several models share."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from raytrec.config.features import Features, positions
from raytrec.config.schema import Schema


class Sequence(NamedTuple):
    """A sequence feature, id by id.

    Attributes:
        vectors: float32 [B, L, dim], the embedding of each id (times its weight, where the feature has
            weights), the most recent first; 0 where there is none.
        present: bool [B, L], where there is an id: the first `length` of each row.
    """

    vectors: torch.Tensor
    present: torch.Tensor


class Sequences:
    """Makes a model's inputs of what was looked up, where sequences are read id by id (config/features.py).

    Args:
        features: of the run.
    """

    def __init__(self, features: Features):
        keys = features.keys
        self._features, self._key_count = list(features.schema.sparse), len(keys)
        self._keys_of = {feature: positions(feature, n) for feature, n in features.sequences.items()}
        self._first = {feature: keys.index(names[0]) for feature, names in self._keys_of.items()}

    def __call__(
        self, embeddings: dict[str, torch.Tensor], sparse: KeyedJaggedTensor, rows: slice = slice(None)
    ) -> dict[str, torch.Tensor | Sequence]:
        """The inputs by feature, in the schema's order.

        Args:
            embeddings: key → float32 [rows, dim].
            sparse: the whole batch's, for its lengths.
            rows: which rows of it these are.
        """
        lengths_FB = sparse.lengths().view(self._key_count, -1)[:, rows]
        inputs: dict[str, torch.Tensor | Sequence] = {}
        for feature in self._features:
            if feature not in self._keys_of:
                inputs[feature] = embeddings[feature]
                continue
            keys, first = self._keys_of[feature], self._first[feature]
            vectors_BLD = torch.stack([embeddings[key] for key in keys], dim=1)
            inputs[feature] = Sequence(vectors_BLD, lengths_FB[first : first + len(keys)].T > 0)
        return inputs


class Constant(nn.Module):
    """One learned vector for every row: [B, anything] → float32 [B, dim]."""

    def __init__(self, dim: int):
        super().__init__()
        self.vector = nn.Parameter(torch.randn(dim) / dim**0.5)

    def forward(self, dense: torch.Tensor) -> torch.Tensor:
        return self.vector.expand(dense.shape[0], -1)


def mlp(
    sizes: list[int], dropout: float = 0.0, activation: Callable[[int], nn.Module] = lambda _: nn.ReLU()
) -> nn.Sequential:
    """Linear layers of these sizes, each followed by ReLU, or what `activation` makes for its size (and
    dropout)."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), activation(outputs)]
        if dropout:
            layers.append(nn.Dropout(dropout))
    return nn.Sequential(*layers)


def dim_of(schema: Schema, feature: str) -> int:
    """Width of a feature's embeddings."""
    return schema.tables[schema.sparse[feature].table].dim
