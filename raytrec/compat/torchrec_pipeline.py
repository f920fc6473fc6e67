"""TorchRec's train pipelines (1.8.0) with timed parts.

Most of the pipelines' methods are private. The pipelines are idle between steps. Both exchange the ids of the next
batch during the forward pass of the current batch. For tables in host memory with a cache on the GPU, PrefetchPipeline
also loads the next batch's rows into the cache during the current step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torchrec.distributed import embedding_sharding
from torchrec.distributed.dist_data import SplitsAllToAllAwaitable
from torchrec.distributed.embedding_sharding import KJTSplitsAllToAllMeta
from torchrec.distributed.train_pipeline import PrefetchTrainPipelineSparseDist, TrainPipelineSparseDist, utils
from torchrec.distributed.train_pipeline.runtime_forwards import KJTAllToAllForward
from torchrec.distributed.train_pipeline.utils import _wait_for_batch

from raytrec.common.collectives import to_device_tensor
from raytrec.compat.fbgemm import find_fused_lookup
from raytrec.compat.torch_ import call_after_nodes
from raytrec.compat.torchrec_ import iterate_sharded_kernels

if TYPE_CHECKING:
    from torchrec.distributed.train_pipeline import TrainPipelineSparseDist as Pipeline
else:
    Pipeline = object


class _PinnedSizesForward(KJTAllToAllForward):
    """Start of an exchange of ids, which copies this rank's sizes to the device from page-locked memory.

    TorchRec copies them from pageable memory, one tensor per sharding type and column of sizes, and the host waits
    for each copy.
    """

    def __call__(self, input: Any) -> KJTSplitsAllToAllMeta:
        sizes, device, starts = input.dist_splits(self._splits), input.device(), self._splits_cumsum
        rank, strides = dist.get_rank(self._pg), [[input.stride()] * self._pg.size()]
        columns = sizes if input.variable_stride_per_key() else sizes + strides
        return KJTSplitsAllToAllMeta(
            pg=self._pg,
            _input=input,
            splits=self._splits,
            splits_tensors=list(to_device_tensor(columns, device).unbind()),
            input_splits=sizes,
            input_tensors=input.dist_tensors(),
            labels=input.dist_labels(),
            keys=input.keys()[starts[rank] : starts[rank + 1]],
            device=device,
            stagger=self._stagger,
        )


def _receive_splits(self: SplitsAllToAllAwaitable, receive: Any = SplitsAllToAllAwaitable._wait_impl) -> Any:
    """Return the received sizes; on a GPU, let TorchRec's check of the sent sizes read zeros in host memory instead."""
    sent = self._input_tensor
    if sent.device.type != "cpu":
        self._input_tensor = torch.zeros(len(sent), dtype=torch.int64)
    splits = receive(self)
    del sent  # the exchange has ended
    return splits


# To check sizes before and after their exchange, TorchRec reads the sizes from the device. The host would wait for
# these reads in every step, once per feature and sharding type.
embedding_sharding._safe_tolist = lambda tensor: []
SplitsAllToAllAwaitable._wait_impl = _receive_splits
utils.KJTAllToAllForward = _PinnedSizesForward


class TimedMixin(Pipeline):
    """Mixin that times the parts of a pipeline without changing its behavior.

    Args:
        model: Sharded model.
        optimizer: Optimizer of the model.
        device: Device of this rank.
        phase: Function that maps a part's name (data, copy, input_exchange, forward, backward, optimizer) to
            the context manager in which the part runs.
        before_all_reduce_wait: Function called in backward when only the all-reduce of the dense layers
            remains.
        **options: Further arguments of TorchRec's pipeline.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        device: torch.device,
        phase: Callable[[str], AbstractContextManager],
        before_all_reduce_wait: Callable[[], object],
        **options: Any,
    ):
        self._phase, self._waits = phase, before_all_reduce_wait
        super().__init__(model, optimizer, device, custom_model_fwd=self._timed_forward, **options)

    def _timed_forward(self, batch: Any) -> Any:
        with self._phase("forward"):
            return self._model(batch)

    def _next_batch(self, dataloader_iter: Iterator) -> Any:
        with self._phase("data"):
            return super()._next_batch(dataloader_iter)

    def copy_batch_to_gpu(self, dataloader_iter: Iterator) -> Any:
        """Copy the next batch to the device, timed as "copy"; return (batch, context), with None after the last one."""
        with self._phase("copy"):
            return super().copy_batch_to_gpu(dataloader_iter)

    def start_sparse_data_dist(self, batch: Any, context: Any) -> None:
        """Start the exchange of a batch's ids, timed as "input_exchange"."""
        with self._phase("input_exchange"):
            super().start_sparse_data_dist(batch, context)

    def wait_sparse_data_dist(self, context: Any) -> None:
        """Wait for the exchange of a batch's ids, timed as "input_exchange"."""
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
    """TorchRec's pipeline for tables with a cache on the GPU; for GPUs only, because it requires streams.

    The parts of a step run in the same order as in TorchRec's pipeline. Four things differ:

    - The option enqueue_batch_after_forward is supported, as in TorchRec's other pipeline.
    - Backward and the optimizer's step are separate methods, as in TorchRec's other pipeline.
    - For the current stream, a step ends when the next batch's rows are in the cache. Further rows are loaded
      only after work that is queued on that stream between steps. The cache can therefore be written back
      between steps (for a checkpoint or a check) while no row in it is being replaced.
    - In evaluation, rows are not locked in the cache, because FBGEMM unlocks rows only in backward. Instead, no
      rows are loaded into the cache while a batch is being looked up.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        device: torch.device,
        enqueue_batch_after_forward: bool = False,
        **options: Any,
    ):
        # pipeline_postproc would have no effect, because the tables' input is an attribute of the batch.
        super().__init__(model, optimizer, device, pipeline_postproc=False, **options)
        self._enqueue_batch_after_forward = enqueue_batch_after_forward
        # TorchRec would use a new stream as the default stream, on which no work runs.
        self._default_stream = torch.get_device_module(device).current_stream()
        self._kernels = [k for kernel in iterate_sharded_kernels(model) if (k := find_fused_lookup(kernel)) is not None]

    def progress(self, dataloader_iter: Iterator) -> Any:
        """Run one step on the next batch, and return the second part of the model's output (losses, output).

        The step updates the model only in training mode. All ranks must call this method.

        Raises:
            StopIteration: There are no more batches.
        """
        self._prefetch_stream.wait_stream(self._default_stream)
        for kernel in self._kernels:
            kernel.lock_cache_line = kernel.prefetch_pipeline and self._model.training
        self.fill_pipeline(dataloader_iter)
        if not self.batches:
            for kernel in self._kernels:  # unlock rows of steps that were skipped before backward
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


class TimedPipeline(TimedMixin, TrainPipelineSparseDist):
    """TorchRec's standard pipeline with timed parts."""


class TimedPrefetchPipeline(TimedMixin, PrefetchPipeline):
    """PrefetchPipeline with timed parts, for tables with a cache on the GPU."""

    def _prefetch(self, context: Any) -> None:
        with self._phase("input_exchange"):
            super()._prefetch(context)
