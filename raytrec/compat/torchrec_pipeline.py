"""TorchRec's train pipelines (1.8.0), timed.

Most of their methods are private; they are at rest between steps.

Both exchange the next batch's ids during this batch's forward. Where tables are in host memory with a cache
on the GPU, PrefetchPipeline also brings the next batch's rows into the cache while this batch is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torchrec.distributed import embedding_sharding
from torchrec.distributed.train_pipeline import PrefetchTrainPipelineSparseDist, TrainPipelineSparseDist
from torchrec.distributed.train_pipeline.utils import _wait_for_batch

from raytrec.compat.fbgemm import fbgemm_of
from raytrec.compat.torch_ import call_after_nodes
from raytrec.compat.torchrec_ import sharded_kernels

if TYPE_CHECKING:
    from torchrec.distributed.train_pipeline import TrainPipelineSparseDist as Pipeline
else:
    Pipeline = object


# What it reads of the device before sizes are exchanged is for a check that is off: the host would wait for
# each feature's and way of sharding's in every step.
embedding_sharding._safe_tolist = lambda tensor: []


class Timed(Pipeline):
    """A pipeline with its parts timed; it does the same.

    Args:
        phase: a part's name (data, copy, input_exchange, forward, backward, optimizer) → a context in which
            it runs.
        waits: called in backward when only the dense layers' all-reduce is left to be waited for.
        options: of TorchRec's.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        device: torch.device,
        phase: Callable[[str], AbstractContextManager],
        waits: Callable[[], object],
        **options: Any,
    ):
        self._phase, self._waits = phase, waits
        super().__init__(model, optimizer, device, custom_model_fwd=self._timed_forward, **options)

    def _timed_forward(self, batch: Any) -> Any:
        with self._phase("forward"):
            return self._model(batch)

    def _next_batch(self, dataloader_iter: Iterator) -> Any:
        with self._phase("data"):
            return super()._next_batch(dataloader_iter)

    def copy_batch_to_gpu(self, dataloader_iter: Iterator) -> Any:
        with self._phase("copy"):
            return super().copy_batch_to_gpu(dataloader_iter)

    def start_sparse_data_dist(self, batch: Any, context: Any) -> None:
        with self._phase("input_exchange"):
            super().start_sparse_data_dist(batch, context)

    def wait_sparse_data_dist(self, context: Any) -> None:
        with self._phase("input_exchange"):
            super().wait_sparse_data_dist(context)

    def _backward(self, losses: torch.Tensor) -> None:
        with self._phase("backward"):
            call_after_nodes(losses, self._waits)
            super()._backward(losses)

    def _optimizer_step(self) -> None:
        with self._phase("optimizer"):
            super()._optimizer_step()


class PrefetchPipeline(PrefetchTrainPipelineSparseDist):
    """TorchRec's pipeline for tables with a cache on the GPU; for GPUs only, as it works by streams alone.

    The order of a step's parts is TorchRec's. Four things differ:

    - It knows enqueue_batch_after_forward, as TorchRec's other pipeline does.
    - Backward and the optimizer's step go through the methods that TorchRec's other pipeline has for them.
    - A step ends, for the current stream, when the next batch's rows are in the cache, and no further ones
      come into it before what is put on that stream between two steps. So the cache may be written back there
      (for a checkpoint, a check) without a row that is being replaced in it.
    - In evaluation rows are not locked into the cache: what FBGEMM unlocks them in is backward, so that they
      would stay there. Instead, nothing is brought into the cache while a batch is being looked up.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        device: torch.device,
        enqueue_batch_after_forward: bool = False,
        **options: Any,
    ):
        # pipeline_postproc would take nothing here: the tables' input is an attribute of the batch.
        super().__init__(model, optimizer, device, pipeline_postproc=False, **options)
        self._enqueue_batch_after_forward = enqueue_batch_after_forward
        # TorchRec's is a new one, on which nothing runs.
        self._default_stream = torch.get_device_module(device).current_stream()
        self._kernels = [k for kernel in sharded_kernels(model) if (k := fbgemm_of(kernel)) is not None]

    def progress(self, dataloader_iter: Iterator) -> Any:
        self._prefetch_stream.wait_stream(self._default_stream)
        for kernel in self._kernels:
            kernel.lock_cache_line = kernel.prefetch_pipeline and self._model.training
        self.fill_pipeline(dataloader_iter)
        if not self.batches:
            for kernel in self._kernels:  # rows of steps that were skipped without a backward
                kernel.lxu_cache_locking_counter.zero_()
            raise StopIteration
        self._set_module_context(self.contexts[0])
        if self._model.training:
            self._optimizer.zero_grad()
        _wait_for_batch(self.batches[0], self._prefetch_stream)
        if not self._enqueue_batch_after_forward:
            self.enqueue_batch(dataloader_iter)
        if len(self.batches) >= 2:
            self.wait_sparse_data_dist(self.contexts[1])
        losses, output = self._model_fwd(self.batches[0])
        if self._enqueue_batch_after_forward:
            self.enqueue_batch(dataloader_iter)
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

    def _prefetch(self, context: Any) -> None:
        with self._phase("input_exchange"):
            super()._prefetch(context)
