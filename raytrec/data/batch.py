"""Batch: the tensors that one rank's step reads, and how rows become one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import pyarrow as pa
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from raytrec.data.assemble import Assembler
from raytrec.data.pieces import Rows


class NewRows(NamedTuple):
    """Rows of a managed table that have another id than before, of all ranks.

    Attributes:
        rows, ids: int64 [n].
        places: rows of a shard of this rank, [start, stop) → which of `rows` it has, int64 [m].
    """

    rows: torch.Tensor
    ids: torch.Tensor
    places: Mapping[range, torch.Tensor] | None = None


@dataclass
class Batch(Pipelineable):
    """One rank's part of a global batch, B rows of which some may be padding.

    The six from `changed` to `new_rows` are None where nothing that is configured needs them.

    Attributes:
        dense: float32 [B, number of dense columns].
        sparse: KeyedJaggedTensor of stride B; keys are the schema's sparse features in its order (for a
            sequence that is read id by id, its positions: raytrec/config/features.py), values int64,
            lengths int32, weights float32 where the schema has any; it knows its length_per_key.
        labels: float32 [B, number of labels]; where a row has no label, some number that the loss takes.
        weights: float32 [B]; 1 for a row, 0 for padding (whose bags are empty and other values 0).
        global_rows: rows of the global batch over all ranks, padding not counted.
        step: the step of the run that the rows belong to, from 0 (of an evaluation: the step in it).
        changed: int64 [2, sparse features]: ids that were brought into range (clamped or hashed), and all
            ids, of row groups that were read on the way; None where no table takes ids out of range.
        task_weights: float32 [B, T], each row's factor in each task, in the order of the configuration: its
            sample weight, and 0 for padding, without a label of the task, and where the task's mask excludes
            it (raytrec/data/columns.py). None: `weights` is that of every task.
        keys: int64 [B, K], of each column in Reserved.keys: integers as they are, other values by a hash
            (raytrec/data/ids.py); 0 for padding.
        reserved: the columns in Reserved.columns, of the rows whose `weights` are 1, in their order;
            always on the host.
        side_features: sequence that is read id by id and has n side features → float64 [N, n], in the order
            of its ids in `sparse`; None where there is no such feature.
        new_rows: managed table → rows that this batch has given to ids, on the device of the maps; rows and
            ids are the same on all ranks. None: `sparse` has the ids of managed tables as
            they were read; otherwise their rows.
        requests: int64 [N], where rows are requests (schema.candidates): of each of their candidates, in
            order, its row; None: a row is one example. `labels` and `task_weights` are [N, ...] then, and
            `dense` is 0 in candidates' columns; `weights` and `keys` stay those of rows.
        dense_of_candidates: float32 [N, dense columns of candidates], in the schema's order.
        lengths: int32 [sparse features · B], those of `sparse`, always on the host, so that sizes that follow
            from them are known there before the device knows them; default: of a `sparse` that is there.
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

    def __post_init__(self) -> None:
        if self.lengths is None and self.sparse is not None and self.sparse.device().type == "cpu":
            self.lengths = self.sparse.lengths()

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        """The batch on another device."""
        return self._with(lambda part: part.to(device, non_blocking=non_blocking))

    def record_stream(self, stream: torch.Stream) -> None:
        """Keeps the memory until a CUDA stream has read it."""
        parts = [*self._moved().values(), *(self.side_features or {}).values()]
        for new in (self.new_rows or {}).values():
            parts += [new.rows, new.ids, *(new.places or {}).values()]
        for part in parts:
            part.record_stream(stream)

    def pin_memory(self) -> Batch:
        """The batch in page-locked memory, for asynchronous copies to a GPU."""
        return self._with(lambda part: part.pin_memory())

    def _moved(self) -> dict[str, torch.Tensor | KeyedJaggedTensor]:
        """What a device reads, but side features and new rows."""
        names = ["dense", "sparse", "labels", "weights", "task_weights", "keys"]
        names += ["requests", "dense_of_candidates"]
        return {name: part for name in names if (part := getattr(self, name)) is not None}

    def _with(self, move: Callable) -> Batch:
        """A copy of which everything that a device reads went through a function."""
        sides = self.side_features and {name: move(s) for name, s in self.side_features.items()}
        return replace(self, side_features=sides, **{name: move(p) for name, p in self._moved().items()})


class Collator(Assembler):
    """Puts pieces of rows together as one rank's Batch."""

    def __call__(self, pieces: list[Rows], padded_rows: int, global_rows: int, step: int = 0) -> Batch:
        """Return a Batch of `padded_rows` rows: the pieces' rows, then padding. Skipped rows are padding."""
        values = dict(vars(self.assemble(pieces, padded_rows)))
        bags = values.pop("bags")
        sparse = KeyedJaggedTensor(
            bags.keys,
            bags.ids,
            bags.weights,
            lengths=bags.lengths,
            stride=bags.rows,
            # Else TorchRec adds up the lengths on the device and waits for it, at every step.
            length_per_key=bags.counts,
        )
        return Batch(sparse=sparse, global_rows=global_rows, step=step, **values)
