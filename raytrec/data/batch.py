"""Batch, the input tensors of one step on a rank, and the collator that builds batches from rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import pyarrow as pa
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from raytrec.data.assembler import Assembler
from raytrec.data.row_slices import Rows


class NewRows(NamedTuple):
    """Table rows to which the batches of one step, on any rank, have assigned new managed ids (`ids: managed`).

    Attributes:
        rows: Indexes of the table rows, int64 [n].
        ids: New id of each row, int64 [n].
        places: Range of the table rows in each shard on this rank → positions of these rows in `rows`, int64
            [m]. None: the positions have not been computed.
    """

    rows: torch.Tensor
    ids: torch.Tensor
    places: Mapping[range, torch.Tensor] | None = None


@dataclass
class Batch(Pipelineable):
    """One rank's part of a global batch: B rows, some of which may be padding.

    A bag contains the ids of one feature in one row. The fields from `changed` to `new_rows` are None if the
    configuration does not need them.

    Attributes:
        dense: Dense features, float32 [B, number of dense columns].
        sparse: KeyedJaggedTensor of stride B with int64 values, int32 lengths and, if the schema has weights,
            float32 weights; length_per_key is set. The keys are the schema's sparse features in its order.
            The bag of a sequence that is read id by id contains the most recent ids, the most recent first.
        labels: Labels, float32 [B, number of labels]; rows without a label have a value that the loss accepts.
        weights: 1 for a row, 0 for padding and skipped rows, float32 [B]. Rows with weight 0 have empty bags
            (except in full-vocabulary features) and 0 for all other values.
        global_rows: Number of rows of the global batch over all ranks, with skipped rows but without padding.
        step: Index of the step in the run or, for an evaluation, in the evaluation; the first step is 0.
        changed: Number of ids brought into range (clamped or hashed) and number of all ids, int64 [2, sparse
            features]. Counts of a decoded table are in the batch that contains its first row (canonical.py).
            None if no table accepts out-of-range ids.
        task_weights: Factor of each row in each task, float32 [B, T], in the order of the configuration. The
            factor is the sample weight, or 1 if the task has none. It is 0 for padding, skipped rows, rows
            without the task's label and rows that the task masks. None: `weights` applies to every task.
        keys: Group keys of the columns in ReservedColumnSet.keys, int64 [B, K], as computed by
            `ids.compute_group_keys`. 0 for padding and skipped rows.
        reserved: Columns in ReservedColumnSet.columns for the rows whose `weights` are 1, in row order; on
            the host.
        side_features: Sequence that is read id by id and has n side features → float64 [N, n], in the order
            of the sequence's ids in `sparse`; None if there is no such sequence.
        new_rows: Managed table → rows that get new ids in this step, on the device of the id maps; the same on
            all ranks. If None, `sparse` contains the ids of managed tables as read; otherwise, it
            contains the table rows of these ids.
        requests: Row of each candidate, ascending, int64 [N], if rows are requests (schema.candidates); None:
            each row is one example. With requests, `labels` and `task_weights` have shape [N, ...] and
            `dense` is 0 in candidate columns; `weights` and `keys` still have one entry per row.
        dense_of_candidates: Dense columns of the candidates, float32 [N, columns], in the schema's order;
            None: each row is one example.
        lengths: Lengths of `sparse`, int32 [sparse features · B], always on the host so that sizes can be
            computed without waiting for the device. Default: the lengths of `sparse` if `sparse` is on the
            host, else None.
        candidate_counts: Number of candidates of each row, int64 [B], always on the host. Default: computed from
            `requests`; None without `requests`.
    """

    dense: torch.Tensor
    sparse: KeyedJaggedTensor
    labels: torch.Tensor
    weights: torch.Tensor
    global_rows: int
    step: int = 0
    changed: torch.Tensor | None = None
    task_weights: torch.Tensor | None = None
    keys: torch.Tensor | None = None
    reserved: pa.Table | None = None
    side_features: Mapping[str, torch.Tensor] | None = None
    new_rows: Mapping[str, NewRows] | None = None
    lengths: torch.Tensor | None = None
    requests: torch.Tensor | None = None
    dense_of_candidates: torch.Tensor | None = None
    candidate_counts: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.candidate_counts is None and self.requests is not None:
            self.candidate_counts = torch.bincount(self.requests, minlength=len(self.weights)).cpu()
        if self.lengths is None and self.sparse is not None and self.sparse.device().type == "cpu":
            self.lengths = self.sparse.lengths()

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        """Return a copy of the batch whose model inputs are on a device.

        The fields `changed`, `reserved`, `new_rows`, `lengths` and `candidate_counts` are not moved.
        """
        return self._map_tensors(lambda part: part.to(device, non_blocking=non_blocking))

    def record_stream(self, stream: torch.Stream) -> None:
        """Prevent reuse of the memory of the device tensors until a CUDA stream has finished its queued work."""
        parts = [*self._device_tensors().values(), *(self.side_features or {}).values()]
        for new in (self.new_rows or {}).values():
            parts += [new.rows, new.ids, *(new.places or {}).values()]
        for part in parts:
            part.record_stream(stream)

    def pin_memory(self) -> Batch:
        """Return a copy of the batch whose model inputs are in page-locked memory, for asynchronous copies to a GPU."""
        return self._map_tensors(lambda part: part.pin_memory())

    def _device_tensors(self) -> dict[str, torch.Tensor | KeyedJaggedTensor]:
        """Return the tensors that `to` moves, by field, except side features."""
        names = ["dense", "sparse", "labels", "weights", "task_weights", "keys", "requests", "dense_of_candidates"]
        return {name: part for name in names if (part := getattr(self, name)) is not None}

    def _map_tensors(self, move: Callable) -> Batch:
        """Return a copy of the batch with `move` applied to its device tensors and side features."""
        sides = self.side_features and {name: move(s) for name, s in self.side_features.items()}
        return replace(self, side_features=sides, **{name: move(p) for name, p in self._device_tensors().items()})


class Collator(Assembler):
    """Callable that builds one rank's Batch from row slices."""

    def __call__(self, pieces: list[Rows], padded_rows: int, global_rows: int, step: int = 0) -> Batch:
        """Return a Batch of `padded_rows` rows: all rows of the row slices `pieces` in order, then padding.

        `global_rows` and `step` are fields of the Batch.
        """
        values = dict(vars(self.assemble(pieces, padded_rows)))
        bags = values.pop("bags")
        sparse = KeyedJaggedTensor(
            bags.keys,
            bags.ids,
            bags.weights,
            lengths=bags.lengths,
            stride=bags.rows,
            # Without length_per_key, TorchRec sums the lengths on the device and waits for the result at
            # every step.
            length_per_key=bags.counts,
        )
        return Batch(sparse=sparse, global_rows=global_rows, step=step, **values)
