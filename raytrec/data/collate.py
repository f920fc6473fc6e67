"""Canonical rows → Batch, without work in Python for each row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from raytrec.data.batch import Batch
from raytrec.data.columns import one_array
from raytrec.schema import Schema


@dataclass(frozen=True)
class Lists:
    """A list column as NumPy views of its buffers."""

    offsets: np.ndarray  # int32 [n + 1]
    values: np.ndarray

    @classmethod
    def of(cls, array: pa.ListArray) -> Lists:
        return cls(array.offsets.to_numpy(), array.values.to_numpy())

    def part(self, first: int, last: int) -> np.ndarray:
        """The values of rows [first, last)."""
        return self.values[self.offsets[first] : self.offsets[last]]


@dataclass(frozen=True)
class Rows:
    """Rows [first, last) of a canonical table (see rows.py); slicing costs nothing."""

    labels: np.ndarray  # float32 [n, labels]
    dense: np.ndarray  # float32 [n, dense]
    lengths: np.ndarray  # int32 [n, features]
    ids: list[Lists]  # int64, of each feature
    weights: list[Lists]  # float32, of each feature; empty when the schema has none
    present: np.ndarray | None  # bool [n]; None: all
    first: int
    last: int

    @classmethod
    def of(cls, table: pa.Table) -> Rows:
        columns = {name: one_array(table[name]) for name in table.column_names}
        features = range(columns["lengths"].type.list_size)
        return cls(
            _matrix(columns["labels"]),
            _matrix(columns["dense"]) if "dense" in columns else np.empty((len(table), 0), np.float32),
            _matrix(columns["lengths"]),
            [Lists.of(columns[f"ids.{f}"]) for f in features],
            [Lists.of(columns[f"weights.{f}"]) for f in features if "weights.0" in columns],
            columns["present"].to_numpy(zero_copy_only=False) if "present" in columns else None,
            0,
            len(table),
        )

    def __len__(self) -> int:
        return self.last - self.first

    def __getitem__(self, rows: slice) -> Rows:
        start, stop, _ = rows.indices(len(self))
        first, last = self.first + start, self.first + stop
        return Rows(self.labels, self.dense, self.lengths, self.ids, self.weights, self.present, first, last)


def _matrix(array: pa.FixedSizeListArray) -> np.ndarray:
    width = array.type.list_size
    return array.flatten().to_numpy().reshape(-1, width)


class Collator:
    """Puts pieces of rows together as one rank's Batch.

    Args:
        schema: gives the keys of the KeyedJaggedTensor and their order.
    """

    def __init__(self, schema: Schema):
        self._keys = list(schema.sparse)
        self._shape = len(schema.labels), len(schema.dense), len(self._keys)
        self._weighted = schema.has_weights

    def __call__(self, pieces: list[Rows], padded_rows: int, global_rows: int) -> Batch:
        """A Batch of `padded_rows` rows; those after the pieces' rows, and rows left out, are padding."""
        n_labels, n_dense, n_features = self._shape
        rows = sum(len(piece) for piece in pieces)
        labels = torch.zeros(padded_rows, n_labels)
        dense = torch.zeros(padded_rows, n_dense)
        lengths = torch.zeros(padded_rows, n_features, dtype=torch.int32)
        weights = torch.zeros(padded_rows)
        weights[:rows] = 1
        if rows:
            for target, name in ((labels, "labels"), (dense, "dense"), (lengths, "lengths")):
                parts = [getattr(piece, name)[piece.first : piece.last] for piece in pieces]
                np.concatenate(parts, out=target.numpy()[:rows])
            if pieces[0].present is not None:
                parts = [piece.present[piece.first : piece.last] for piece in pieces]
                np.concatenate(parts, out=weights.numpy()[:rows])
        sparse = KeyedJaggedTensor(
            self._keys,
            torch.from_numpy(_by_feature([(p.ids, p) for p in pieces], n_features, np.int64)),
            torch.from_numpy(_by_feature([(p.weights, p) for p in pieces], n_features, np.float32))
            if self._weighted
            else None,
            lengths=lengths.t().reshape(-1),
            stride=padded_rows,
        )
        return Batch(dense, sparse, labels, weights, global_rows)


def _by_feature(pieces: list[tuple[list[Lists], Rows]], features: int, dtype: type) -> np.ndarray:
    """All values, feature after feature, which is how a KeyedJaggedTensor lies."""
    parts = [lists[f].part(rows.first, rows.last) for f in range(features) for lists, rows in pieces]
    return np.concatenate(parts) if parts else np.empty(0, dtype)
