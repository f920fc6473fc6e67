"""A batch as people write it for TorchRec's train pipelines."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable


@dataclass
class Batch(Pipelineable):
    """float32 [B, dense columns], KeyedJaggedTensor of stride B, float32 [B]."""

    dense: torch.Tensor
    sparse: KeyedJaggedTensor
    labels: torch.Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        parts = (self.dense, self.sparse, self.labels)
        return Batch(*(part.to(device, non_blocking=non_blocking) for part in parts))

    def record_stream(self, stream: torch.Stream) -> None:
        for part in (self.dense, self.sparse, self.labels):
            part.record_stream(stream)

    def pin_memory(self) -> Batch:
        return Batch(*(part.pin_memory() for part in (self.dense, self.sparse, self.labels)))
