"""TorchRec's train pipelines (1.8.0), with their parts timed.

Both exchange the next batch's ids during this batch's forward. Where tables lie in host memory with a cache
on the GPU, PrefetchPipeline also brings the next batch's rows into the cache while this batch is trained.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.train_pipeline import PrefetchTrainPipelineSparseDist, TrainPipelineSparseDist
from torchrec.distributed.train_pipeline.utils import _wait_for_batch

from raytrec.embeddings.kernels import fbgemm_of, sharded_kernels
from raytrec.worker.step_timing import Phases


class Timed:
    """A pipeline with its parts timed; it does the same.

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

    def _prefetch(self, context: Any) -> None:
        with self.phases.phase("input_exchange"):
            super()._prefetch(context)

    def _backward(self, losses: torch.Tensor) -> None:
        with self.phases.phase("backward"):
            super()._backward(losses)

    def _optimizer_step(self) -> None:
        with self.phases.phase("optimizer"):
            super()._optimizer_step()


class PrefetchPipeline(PrefetchTrainPipelineSparseDist):
    """TorchRec's pipeline for tables with a cache on the GPU; for GPUs only, as it works by streams alone.

    The order of a step's parts is TorchRec's. Three things differ:

    - Backward and the optimizer's step go through the methods that TorchRec's other pipeline has for them.
    - A step ends, for the current stream, when the next batch's rows are in the cache, and no further ones
      come into it before what is put on that stream between two steps. So the cache may be written back there
      (for a checkpoint, a check) without a row that is being replaced in it.
    - In evaluation rows are not locked into the cache: what FBGEMM unlocks them in is backward, so that they
      would stay there. Instead, nothing is brought into the cache while a batch is being looked up.
    """

    def __init__(self, model: Any, optimizer: Any, device: torch.device, **options: Any):
        # pipeline_postproc would take nothing here: the tables' input is an attribute of the batch.
        super().__init__(model, optimizer, device, pipeline_postproc=False, **options)
        # TorchRec's is a new one, on which nothing runs.
        self._default_stream = torch.get_device_module(device).current_stream()
        self._kernels = [k for kernel in sharded_kernels(model) if (k := fbgemm_of(kernel)) is not None]

    def progress(self, dataloader_iter: Iterator) -> Any:
        self._prefetch_stream.wait_stream(self._default_stream)
        for kernel in self._kernels:
            kernel.lock_cache_line = kernel.prefetch_pipeline and self._model.training
        self.fill_pipeline(dataloader_iter)
        if not self.batches:
            for kernel in self._kernels:  # rows of steps that were left out without a backward
                kernel.lxu_cache_locking_counter.zero_()
            raise StopIteration
        self._set_module_context(self.contexts[0])
        if self._model.training:
            self._optimizer.zero_grad()
        _wait_for_batch(self.batches[0], self._prefetch_stream)
        self.enqueue_batch(dataloader_iter)
        if len(self.batches) >= 2:
            self.wait_sparse_data_dist(self.contexts[1])
        losses, output = self._model_fwd(self.batches[0])
        self.contexts[0].module_input_post_prefetch.clear()
        self.contexts[0].module_contexts_post_prefetch.clear()
        if len(self.batches) >= 2:
            self._prefetch(self.contexts[1])
        if self._model.training:
            self._backward(losses)
            self._optimizer_step()
        if len(self.batches) >= 3:
            self.start_sparse_data_dist(self.batches[2], self.contexts[2])
        self.dequeue_batch()
        self._default_stream.wait_stream(self._prefetch_stream)
        return output

    def _prefetch(self, context: Any) -> None:
        if not self._model.training:
            self._prefetch_stream.wait_stream(self._default_stream)
        super()._prefetch(context)


class TimedPipeline(Timed, TrainPipelineSparseDist):
    """TorchRec's pipeline."""


class TimedPrefetchPipeline(Timed, PrefetchPipeline):
    """The one for tables with a cache."""


def pipeline(
    model: Any, optimizer: Any, device: torch.device, phases: Phases | None, *, prefetch: bool
) -> TrainPipelineSparseDist:
    """The pipeline that a model is trained by.

    Args:
        phases: that the parts' times are added to; None: they are not timed.
        prefetch: whether any rank has a table with a cache. The same on all ranks, whose collectives come in
            another order with it.
    """
    if phases:
        return (TimedPrefetchPipeline if prefetch else TimedPipeline)(model, optimizer, device, phases)
    kind = PrefetchPipeline if prefetch else TrainPipelineSparseDist
    return kind(model, optimizer, device, execute_all_batches=True)
