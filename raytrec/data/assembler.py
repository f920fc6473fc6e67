"""Convert rows in canonical form (canonical.py) to the tensors of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import torch

from raytrec.config.features import Features, resolve_features
from raytrec.data.read_plans import ResolvedReadPlan
from raytrec.data.row_slices import JoinedRows, Rows


@dataclass(frozen=True)
class Bags:
    """Bags of B rows in the layout of a KeyedJaggedTensor: all rows of the first feature, then of the second, etc.

    A bag contains the ids of one feature in one row.

    Attributes:
        keys: Names of the F features.
        ids: Ids, int64 [N].
        weights: Weight of each id, float32 [N]; None if no feature has weights.
        lengths: Number of ids in each row of each feature, int32 [F · B].
        counts: Total number of ids of each feature, a list of F integers.
        rows: Number of rows, B.
    """

    keys: list[str]
    ids: torch.Tensor
    weights: torch.Tensor | None
    lengths: torch.Tensor
    counts: list[int]
    rows: int


@dataclass(frozen=True)
class AssembledTensors:
    """Tensors of assembled rows. `batch.Batch` describes the fields other than `bags` under the same names."""

    dense: torch.Tensor
    bags: Bags
    labels: torch.Tensor
    weights: torch.Tensor
    changed: torch.Tensor | None
    task_weights: torch.Tensor | None
    keys: torch.Tensor | None
    reserved: pa.Table | None
    side_features: Mapping[str, torch.Tensor] | None
    requests: torch.Tensor | None = None
    dense_of_candidates: torch.Tensor | None = None


class Assembler:
    """Builder of batch tensors from row slices.

    Args:
        form: Resolved read plan of the rows.
        features: Features of the run; their schema defines the keys of the bags and their order. Features
            missing from the form's schema have empty bags, and missing dense columns are 0. Default: the
            features of a model that reads no sequence id by id.
        pin_memory: True to allocate page-locked memory, from which a GPU copies asynchronously.
        part: (rank, number of ranks). Each feature in ResolvedReadPlan.full_vocabulary_features gets this
            rank's share of all ids; the batches of all ranks together contain every id once. None: these
            features have no ids.
    """

    def __init__(
        self,
        form: ResolvedReadPlan,
        features: Features | None = None,
        pin_memory: bool = False,
        part: tuple[int, int] | None = None,
    ):
        features = features or resolve_features(form.schema)
        schema, self._pin_memory, self._part = features.schema, pin_memory, part
        self._form, self._weighted, self._sequences = form, schema.has_weights, features.sequences
        self._side_features = features.side_features
        self._keys = features.keys
        self._column = {name: i for i, name in enumerate(form.singles)}
        self._has_single_ids_only = form.singles == self._keys
        self._candidate_feature = next(iter(form.schema.select_candidate_names(form.schema.sparse)), None)
        places = [schema.dense.index(name) for name in form.schema.select_request_names(form.schema.dense)]
        self._dense_places = None if len(places) == len(schema.dense) else places
        # Matrix of a Batch → (number of columns, dtype); None: the Batch has no such matrix.
        self._matrices = {
            "labels": (len(schema.labels), torch.float32),
            "dense": (len(schema.dense), torch.float32),
            "task_weights": (len(form.plan.tasks), torch.float32) if form.plan.has_task_weights else None,
            "keys": (len(form.plan.reserved.keys), torch.int64) if form.plan.reserved.keys else None,
        }

    def assemble(self, pieces: list[Rows], padded_rows: int) -> AssembledTensors:
        """Return tensors of `padded_rows` rows: all rows of the row slices `pieces` in order, then padding.

        Padding and skipped rows (data.on_error: skip) have weight 0.
        """
        batch = JoinedRows(pieces)
        matrices = {name: self._matrix(name, batch, padded_rows) for name in self._matrices}
        weights, values = self._allocate(padded_rows, torch.float32)
        present = batch.present()
        values[: batch.rows] = 1 if present is None else present
        values[batch.rows :] = 0
        if self._candidate_feature:
            matrices |= self._candidate_tensors(batch)
        side_features = {
            name: self._concatenate([], torch.float64, width) for name, width in self._side_features.items()
        }
        return AssembledTensors(
            **matrices,
            bags=self._replace_with_all_ids(self._bags(batch, padded_rows, side_features)),
            weights=weights,
            changed=self._sum_change_counts(batch),
            reserved=self._reserved(pieces, present) if self._form.plan.reserved.columns else None,
            side_features=side_features or None,
        )

    def _candidate_tensors(self, batch: JoinedRows) -> dict[str, torch.Tensor | None]:
        """Return the fields of AssembledTensors with one row per candidate, by name.

        The fields are requests, labels, dense_of_candidates and task_weights. task_weights is None if every
        candidate has weight 1 in every task.
        """
        rows, widths = batch.rows, self._form.of_candidates
        counts = batch.lengths(f"ids.{self._candidate_feature}") if rows else np.zeros(0, np.int32)
        count = int(counts.sum())
        flat = np.concatenate(batch.values("candidates")) if rows and sum(widths) else np.zeros(0, np.float32)
        columns = np.split(flat.reshape(count, sum(widths)), np.cumsum(widths)[:2], axis=1)
        requests, values = self._allocate(count, torch.int64)
        values[:] = np.repeat(np.arange(rows), counts)
        tensors: dict[str, torch.Tensor | None] = {"requests": requests}
        for name, matrix in zip(("labels", "dense_of_candidates", "task_weights"), columns, strict=True):
            width = matrix.shape[1] if name != "labels" else self._matrices[name][0]
            tensor, values = self._allocate((count, width), torch.float32)
            values[:] = matrix if matrix.shape[1] else 0
            tensors[name] = tensor if width or name != "task_weights" else None
        return tensors

    def _matrix(self, name: str, batch: JoinedRows, padded_rows: int) -> torch.Tensor | None:
        """Return the tensor of a field of AssembledTensors, a key of `_matrices`, padded with rows of 0.

        All rows are 0 if the rows do not contain the field. The result is None if batches have no such field.
        """
        if self._matrices[name] is None:
            return None
        width, dtype = self._matrices[name]
        tensor, values = self._allocate((padded_rows, width), dtype)
        filled = batch.rows if width and batch.has(name) else 0
        if filled and name == "dense" and self._dense_places is not None:
            values[:] = 0
            values[:filled, self._dense_places] = batch.matrix(name)
            return tensor
        values[filled:] = 0
        if filled:
            batch.matrix(name, out=values[:filled])
        return tensor

    def _reserved(self, pieces: list[Rows], present: np.ndarray | None) -> pa.Table:
        """Return the reserved columns of all rows that are not skipped, with combined chunks."""
        if not pieces:
            types = self._form.types
            return pa.schema([(n, types.get(n, pa.null())) for n in self._form.plan.reserved.columns]).empty_table()
        table = pa.Table.from_batches([piece.reserved() for piece in pieces])
        return table.combine_chunks() if present is None else table.filter(present).combine_chunks()

    def _allocate(self, shape: int | tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, np.ndarray]:
        """Return an uninitialized tensor and a NumPy array that shares its memory.

        PyTorch reuses page-locked memory only after its own pending copies from that memory have finished.
        """
        tensor = torch.empty(shape, dtype=dtype, pin_memory=self._pin_memory)
        return tensor, tensor.numpy()

    def _sum_change_counts(self, batch: JoinedRows) -> torch.Tensor | None:
        """Return the number of ids brought into range and the number of all ids, int64 [2, sparse features].

        The features are those of the read plan. The result is the sum of the `changed` lists of the rows
        (canonical.py), or None if no table accepts out-of-range ids.
        """
        if not self._form.accepts_out_of_range_ids:
            return None
        read = len(self._form.schema.sparse)
        if not read:
            return torch.zeros(2, 0, dtype=torch.int64)
        flat = np.concatenate([np.zeros(2 * read, np.int64), *batch.values("changed")], dtype=np.int64)
        return torch.from_numpy(flat.reshape(-1, 2, read).sum(0))

    def _bags(self, batch: JoinedRows, padded_rows: int, side_features: dict[str, torch.Tensor]) -> Bags:
        """Return the ids of all rows as bags.

        Args:
            batch: Rows of the batch.
            padded_rows: Number of rows including padding.
            side_features: Sequence → its side features; filled by this method if there are rows.
        """
        rows = batch.rows
        flat, lengths = self._allocate(len(self._keys) * padded_rows, torch.int32)
        lengths = lengths.reshape(len(self._keys), padded_rows)
        lengths[:, rows:] = 0
        ids, weights = [], []
        singles = batch.matrix("ids") if rows and self._column else None
        no_id = self._form.no_id
        some_missing = singles is not None and singles.min() <= no_id
        if rows and self._has_single_ids_only:
            # All features are copied in one call, because NumPy releases the GIL in each call and then
            # competes with the training step for it. The copies themselves do not delay the step (make
            # bench-host).
            id_matrix = singles.T
            lengths[:, :rows] = has_id = id_matrix > no_id if some_missing else True
            id_matrix = id_matrix[has_id] if some_missing else id_matrix
            tensor, values = self._allocate(id_matrix.size, torch.int64)
            values.reshape(id_matrix.shape)[:] = id_matrix
            counts = lengths.sum(1, dtype=np.int32).tolist()
            return Bags(self._keys, tensor, None, flat, counts, padded_rows)
        for key, name in enumerate(self._keys if rows else ()):
            if name not in self._form.schema.sparse:
                lengths[key, :rows] = 0
                continue
            row_lengths = lengths[key, :rows]
            first_ids, first_weights = len(ids), len(weights)
            if name in self._column:
                column, row_lengths[:] = singles[:, self._column[name]], 1
                if some_missing:
                    row_lengths[:] = column > no_id
                    column = column[column > no_id]
                ids.append(column)
            else:
                row_lengths[:] = batch.lengths(f"ids.{name}")
                ids += batch.values(f"ids.{name}")
            if self._weighted and self._form.schema.sparse[name].weights:
                weights += batch.values(f"weights.{name}")
            elif self._weighted:
                weights.append(np.ones(row_lengths.sum(), np.float32))
            if name in self._sequences:
                order, row_lengths[:] = order_recent_first(row_lengths, self._sequences[name])
                for parts, first in (ids, first_ids), (weights, first_weights):
                    parts[first:] = [np.concatenate(part)[order] for part in [parts[first:]] if part]
                if width := self._side_features.get(name):
                    side_values = np.concatenate(batch.values(f"side_features.{name}")).reshape(-1, width)
                    side_features[name] = self._concatenate([side_values[order]], torch.float64, width)
        return Bags(
            self._keys,
            self._concatenate(ids, torch.int64),
            self._concatenate(weights, torch.float32) if self._weighted else None,
            flat,
            lengths.sum(1, dtype=np.int32).tolist(),
            padded_rows,
        )

    def _replace_with_all_ids(self, bags: Bags) -> Bags:
        """Return bags in which each full-vocabulary feature contains this rank's share of all ids (see `part`)."""
        if self._part is None or not self._form.full_vocabulary_features:
            return bags
        (rank, world), rows, counts = self._part, bags.rows, list(bags.counts)
        ids, lengths = list(bags.ids.split(counts)), bags.lengths.view(-1, rows)
        for name, count in self._form.full_vocabulary_features.items():
            bounds = np.arange(rank * rows, (rank + 1) * rows + 1) * count // (world * rows)
            key, row_lengths = self._keys.index(name), np.diff(bounds)
            ids[key], counts[key] = torch.arange(bounds[0], bounds[-1]), int(bounds[-1] - bounds[0])
            lengths[key] = torch.from_numpy(row_lengths)
        all_ids, values = self._allocate(sum(counts), torch.int64)
        np.concatenate([part.numpy() for part in ids], out=values)
        weights = None
        if bags.weights is not None:
            weights = self._allocate(sum(counts), torch.float32)[0].fill_(1)
            for old, new in zip(bags.weights.split(bags.counts), weights.split(counts), strict=True):
                new[: len(old)] = old
        return replace(bags, ids=all_ids, weights=weights, counts=counts)

    def _concatenate(self, parts: list[np.ndarray], dtype: torch.dtype, width: int | None = None) -> torch.Tensor:
        """Return a tensor that concatenates arrays of shape [n], or [n, width] if `width` is given."""
        size = sum(map(len, parts))
        joined, values = self._allocate(size if width is None else (size, width), dtype)
        if parts:
            np.concatenate(parts, out=values)
        return joined


def order_recent_first(lengths: np.ndarray, max_ids: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions of each bag's most recent ids, from the last id backwards.

    Args:
        lengths: Lengths of n consecutive bags, int [n]; the most recent id of a bag is its last.
        max_ids: Maximum number of ids per bag.

    Returns:
        Positions of the N kept ids, bag by bag, int64 [N]; and the number of ids kept from each bag, int [n].
    """
    kept_lengths = np.minimum(lengths, max_ids)
    # The first output of a bag is its last id; the following positions decrease by one within the bag.
    last_in, first_out = lengths.cumsum() - 1, kept_lengths.cumsum() - kept_lengths
    return np.repeat(last_in + first_out, kept_lengths) - np.arange(kept_lengths.sum()), kept_lengths
