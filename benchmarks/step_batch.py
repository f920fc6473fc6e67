"""A batch as users write it for TorchRec's training pipelines."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable


@dataclass
class Batch(Pipelineable):
    """Batch for TorchRec's training pipelines.

    Attributes:
        dense: Dense columns, float32 [B, dense columns].
        sparse: Ids, with stride B.
        labels: Labels, float32 [B].
    """

    dense: torch.Tensor
    sparse: KeyedJaggedTensor
    labels: torch.Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        """Return a copy of the batch on a device."""
        parts = (self.dense, self.sparse, self.labels)
        return Batch(*(part.to(device, non_blocking=non_blocking) for part in parts))

    def record_stream(self, stream: torch.Stream) -> None:
        """Mark the batch's tensors as used by a CUDA stream."""
        for part in (self.dense, self.sparse, self.labels):
            part.record_stream(stream)

    def pin_memory(self) -> Batch:
        """Return a copy of the batch in page-locked memory."""
        return Batch(*(part.pin_memory() for part in (self.dense, self.sparse, self.labels)))
