"""TorchRec's train pipelines, with their parts timed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from raytrec.train.phases import Phases


class TimedPipeline(TrainPipelineSparseDist):
    """TorchRec's pipeline (1.8.0) with its parts timed; it does the same.

    Args:
        phases: that the parts' times are added to. It also times waits for other ranks, in this process, by
            wrapping torch.distributed.Work.wait: TorchRec waits within autograd functions of its own.
    """

    def __init__(self, model: Any, optimizer: Any, device: torch.device, phases: Phases):
        self.phases = phases
        super().__init__(
            model, optimizer, device, execute_all_batches=True, custom_model_fwd=self._timed_forward
        )
        waiting = getattr(dist.Work.wait, "untimed", dist.Work.wait)
        dist.Work.wait = phases.waits(waiting)
        dist.Work.wait.untimed = waiting

    def _timed_forward(self, batch: Any) -> Any:
        with self.phases.phase("forward"):
            return self._model(batch)

    def _next_batch(self, dataloader_iter: Iterator) -> Any:
        with self.phases.phase("data"):
            return super()._next_batch(dataloader_iter)

    def copy_batch_to_gpu(self, dataloader_iter: Iterator) -> Any:
        with self.phases.phase("copy"):
            return super().copy_batch_to_gpu(dataloader_iter)

    def start_sparse_data_dist(self, batch: Any, context: Any) -> None:
        with self.phases.phase("input_exchange"):
            super().start_sparse_data_dist(batch, context)

    def wait_sparse_data_dist(self, context: Any) -> None:
        with self.phases.phase("input_exchange"):
            super().wait_sparse_data_dist(context)

    def _backward(self, losses: torch.Tensor) -> None:
        with self.phases.phase("backward"):
            super()._backward(losses)

    def _optimizer_step(self) -> None:
        with self.phases.phase("optimizer"):
            super()._optimizer_step()
