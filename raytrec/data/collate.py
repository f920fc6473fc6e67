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
class Rows:
    """A canonical table (see rows.py) as NumPy views of its buffers; slicing costs next to nothing."""

    labels: np.ndarray  # float32 [n, labels]
    dense: np.ndarray  # float32 [n, dense]
    lengths: np.ndarray  # int32 [n, features]
    offsets: np.ndarray  # int32 [n + 1], where a row's ids begin
    ids: np.ndarray  # int64
    weights: np.ndarray | None  # float32
    present: np.ndarray | None  # bool [n]; None: all

    @classmethod
    def of(cls, table: pa.Table) -> Rows:
        columns = {name: one_array(table[name]) for name in table.column_names}
        ids = columns["ids"]
        return cls(
            _matrix(columns["labels"]),
            _matrix(columns["dense"]) if "dense" in columns else np.empty((len(table), 0), np.float32),
            _matrix(columns["lengths"]),
            ids.offsets.to_numpy(),
            ids.values.to_numpy(),
            columns["weights"].values.to_numpy() if "weights" in columns else None,
            columns["present"].to_numpy(zero_copy_only=False) if "present" in columns else None,
        )

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, rows: slice) -> Rows:
        start, stop, _ = rows.indices(len(self))
        return Rows(
            self.labels[start:stop],
            self.dense[start:stop],
            self.lengths[start:stop],
            self.offsets[start : stop + 1],
            self.ids,
            self.weights,
            None if self.present is None else self.present[start:stop],
        )

    def values(self, array: np.ndarray) -> np.ndarray:
        """The part of `ids` or `weights` that belongs to these rows."""
        return array[self.offsets[0] : self.offsets[-1]]


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
        self._orders: dict[int, torch.Tensor] = {}

    def __call__(self, pieces: list[Rows], padded_rows: int, global_rows: int) -> Batch:
        """A Batch of `padded_rows` rows; those after the pieces' rows, and rows left out, are padding."""
        n_labels, n_dense, n_features = self._shape
        rows = sum(len(piece) for piece in pieces)
        labels = torch.zeros(padded_rows, n_labels)
        dense = torch.zeros(padded_rows, n_dense)
        lengths = torch.zeros(padded_rows, n_features, dtype=torch.int32)
        weights = torch.zeros(padded_rows)
        weights[:rows] = 1
        if rows and pieces[0].present is not None:
            np.concatenate([p.present for p in pieces], out=weights.numpy()[:rows])
        if rows:
            np.concatenate([p.labels for p in pieces], out=labels.numpy()[:rows])
            np.concatenate([p.dense for p in pieces], out=dense.numpy()[:rows])
            np.concatenate([p.lengths for p in pieces], out=lengths.numpy()[:rows])
        ids = np.concatenate([np.empty(0, np.int64), *(p.values(p.ids) for p in pieces)])
        per_id = None
        if self._weighted:
            per_id = np.concatenate([np.empty(0, np.float32), *(p.values(p.weights) for p in pieces)])
        return Batch(dense, self._by_feature(lengths, ids, per_id), labels, weights, global_rows)

    def _by_feature(self, lengths_BF: torch.Tensor, ids: np.ndarray, per_id: np.ndarray | None):
        """From row by row to feature by feature, which is how a KeyedJaggedTensor lies."""
        order = self._order(lengths_BF.shape[0])
        lengths, values, weights = torch.ops.fbgemm.permute_1D_sparse_data(
            order,
            lengths_BF.view(-1),
            torch.from_numpy(ids),
            None if per_id is None else torch.from_numpy(per_id),
        )
        return KeyedJaggedTensor(self._keys, values, weights, lengths=lengths, stride=lengths_BF.shape[0])

    def _order(self, rows: int) -> torch.Tensor:
        if rows not in self._orders:
            index = torch.arange(rows * len(self._keys), dtype=torch.int32)
            self._orders[rows] = index.view(rows, -1).t().reshape(-1).contiguous()
        return self._orders[rows]
