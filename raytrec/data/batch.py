"""Batch: what one rank's step reads. (Arrow → Batch is in collate.py.)"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable


@dataclass
class Batch(Pipelineable):
    """One rank's part of a global batch, B rows of which some may be padding.

    Attributes:
        dense: float32 [B, number of dense columns].
        sparse: KeyedJaggedTensor of stride B; keys are the schema's sparse features in its order (for a
            sequence that is read id by id, its positions: raytrec/config/features.py), values int64,
            lengths int32, weights float32 where the schema has any; it knows its length_per_key.
        labels: float32 [B, number of labels].
        weights: float32 [B]; 1 for a row, 0 for padding (whose bags are empty and other values 0).
        global_rows: rows of the global batch over all ranks, padding not counted.
        step: the step of the run that the rows belong to, from 0 (of an evaluation: the step in it).
        changed: int64 [2, sparse features]: ids that were brought into range (clamped or hashed), and all
            ids, of row groups that were read on the way; None where no table takes ids out of range.
    """

    dense: torch.Tensor
    sparse: KeyedJaggedTensor
    labels: torch.Tensor
    weights: torch.Tensor
    global_rows: int
    step: int = 0
    changed: torch.Tensor | None = None

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        """The batch on another device."""
        return Batch(
            self.dense.to(device, non_blocking=non_blocking),
            self.sparse.to(device, non_blocking=non_blocking),
            self.labels.to(device, non_blocking=non_blocking),
            self.weights.to(device, non_blocking=non_blocking),
            self.global_rows,
            self.step,
            self.changed,
        )

    def record_stream(self, stream: torch.Stream) -> None:
        """Keeps the memory until a CUDA stream has read it."""
        for part in (self.dense, self.sparse, self.labels, self.weights):
            part.record_stream(stream)

    def pin_memory(self) -> Batch:
        """The batch in page-locked memory, for asynchronous copies to a GPU."""
        return Batch(
            self.dense.pin_memory(),
            self.sparse.pin_memory(),
            self.labels.pin_memory(),
            self.weights.pin_memory(),
            self.global_rows,
            self.step,
            self.changed,
        )
