"""Stream of one rank's batches from a dataset that Ray Data reads."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache, partial
from queue import Full, Queue
from threading import Event, Thread
from time import monotonic
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from raytrec.common.errors import get_root_cause
from raytrec.common.memory import retain_freed_memory, trim_memory
from raytrec.compat.ray_core import find_nodes_without_gpus
from raytrec.compat.ray_data import disable_autoscaling_requests, disable_statistics, prefer_node, throttle_executors
from raytrec.config.features import Features
from raytrec.data.batch import Batch, Collator
from raytrec.data.fragments import Dataset
from raytrec.data.item_reader import read_items
from raytrec.data.order import LaneItem
from raytrec.data.pages.decode import ReadErrorPolicy
from raytrec.data.row_exchange import RowExchange
from raytrec.data.row_slices import LaneQueues

NODE_POLL_INTERVAL_S = 10.0  # the list of nodes is refreshed at this interval
MIN_TASK_ROWS = 65_536  # rows per task, at least; starting a task costs as much as decoding about 40,000 rows
BLOCK_BYTES = 16 << 20  # target size of the blocks that a task yields


@dataclass(eq=False)
class Stream:
    """Source of one rank's batches from a dataset, in the order given by `order`.

    Ray Data tasks, which request no CPUs from Ray, read, check and shuffle the rows. A thread of this process
    slices and concatenates the rows, up to `prefetch` batches ahead of the training step.

    Args:
        dataset: Dataset to read.
        order: Order of the rows; an Order or an object with the same methods.
        rank: Rank that receives the batches.
        world: Number of ranks.
        readers: Maximum number of concurrent read tasks of this rank.
        read_on: Choice of nodes for the read tasks (data.read_on); see `choose_read_options`.
        prefetch: Maximum number of batches prepared ahead.
        faults: Treatment of unreadable or invalid rows. None: a DataError is raised.
        buffer_bytes: Maximum number of bytes in Ray's object store for rows that are read but not yet
            received.
        pin_memory: True to put batches in page-locked memory, which allows copies to the GPU during
            computation.
        features: Features of the run; see Collator.
        train: True if batches are used for training. Otherwise, features that contain all ids of their table in
            training (ResolvedReadPlan.full_vocabulary_features) are empty.
        exchange: Exchange of each batch's rows between ranks (data.balance); None: ranks train on the rows that
            they read.
    """

    dataset: Dataset
    order: Any
    _: KW_ONLY
    rank: int
    world: int
    readers: int = 1
    read_on: str = "auto"
    prefetch: int = 4
    faults: ReadErrorPolicy | None = None
    buffer_bytes: int = 1 << 29
    pin_memory: bool = False
    features: Features | None = None
    train: bool = False
    exchange: RowExchange | None = None

    @property
    def may_skip(self) -> bool:
        """Return True if unreadable or invalid rows are skipped."""
        return bool(self.faults and self.faults.skip)

    def batches(self, epoch: int = 0, start_step: int = 0) -> PrefetchIterator:
        """Return an iterator over the batches of an epoch from step `start_step` on, one Batch per step.

        Every rank gets the same number of batches. Reading starts immediately, before the first batch is
        requested.

        Raises:
            DataError: Rows cannot be read or violate the schema, and are not skipped; raised by the iterator.
            RuntimeError: An exchange of rows failed (`RowExchange.exchange`); raised by the iterator.
        """
        device = torch.cuda.current_device() if self.pin_memory else None
        return PrefetchIterator(lambda reading: self._assemble(reading, epoch, start_step), self.prefetch, device)

    def epochs(self, count: int, first_step: int = 0) -> Iterator[Batch]:
        """Return an iterator over the batches of epochs 0 to count - 1, from step `first_step` on.

        The epoch of this step is read immediately, and each later epoch once all rows of its predecessor are read.

        Args:
            count: Number of epochs.
            first_step: Number of steps already completed, counted over all epochs; their batches are skipped.

        Raises:
            DataError, RuntimeError: As for `batches`; raised by the iterator.
        """
        epoch, start_step = divmod(first_step, self.order.steps(self.dataset.rows))
        return self._chain(self.batches(epoch, start_step) if epoch < count else None, epoch, count)

    def _chain(self, current: PrefetchIterator | None, epoch: int, count: int) -> Iterator[Batch]:
        next_epoch = None
        try:
            while current is not None:
                epoch += 1
                for batch in current:
                    if next_epoch is None and epoch < count and current.is_read_event.is_set():
                        next_epoch = self.batches(epoch)
                    yield batch
                current, next_epoch = next_epoch or (self.batches(epoch) if epoch < count else None), None
        finally:
            for reading in (current, next_epoch):
                if reading is not None:
                    reading.close()

    def _assemble(self, reading: PrefetchIterator, epoch: int, start_step: int) -> Iterator[Batch]:
        rows = self.dataset.rows
        items = self.order.items(self.dataset, epoch, self.rank, self.world, start_step)
        queues = LaneQueues(items, self._tables(items))
        part = (self.rank, self.world) if self.train else None
        collate = Collator(self.dataset.form, self.features, self.pin_memory, part)
        fill = self.train and bool(self.dataset.form.full_vocabulary_features)
        for step in range(start_step, self.order.steps(rows)):
            pieces = [
                piece
                for lane, count in self.order.shares(rows, step, self.rank, self.world)
                for piece in queues.take(lane, count)
            ]
            if not queues.due:
                reading.is_read_event.set()
            # If each batch contains every id, the last batch is padded to the size of a full batch, because
            # it must hold all ids as well.
            padded = self.order.padded_rows(rows, 0 if fill else step, self.world)
            if self.exchange:
                pieces = self.exchange.exchange(pieces, padded, epoch, reading.is_closed)
            yield collate(pieces, padded, self.order.global_rows(rows, step), epoch * self.order.steps(rows) + step)

    def _tables(self, items: list[LaneItem]) -> Iterator[pa.Table]:
        """Yield the items' rows in canonical form, in order; a table may contain several items or part of an item."""
        import ray.data

        if not items:
            return
        disable_autoscaling_requests()
        disable_statistics()
        throttle_executors()
        read = partial(read_items, ray.put(items), self.dataset.form, self.faults)
        rows = sum(item.rows for item in items)
        # Tasks are consumed in order, so the output of later tasks must fit into the buffer until the first
        # task has ended.
        task_rows = max(MIN_TASK_ROWS, self.buffer_bytes // (2 * self.readers * self.dataset.form.row_bytes))
        blocks = min(len(items), max(-(-rows // task_rows), 4 * self.readers))
        # ray.data.range and from_arrow start tasks that request a CPU, but all CPUs may be in use.
        parts = np.array_split(np.arange(len(items)), blocks)
        dataset = ray.data.from_blocks([pa.table({"id": part}) for part in parts]).map_batches(
            read,
            batch_size=None,
            batch_format="pyarrow",
            # The worker's request includes the CPUs of its readers (driver/launch.py). If tasks requested
            # CPUs, a paused stream's tasks would keep them, and tasks of other streams would wait forever.
            num_cpus=0,
            compute=ray.data.TaskPoolStrategy(size=self.readers),
            ray_remote_args_fn=partial(choose_read_options, self.readers * self.world, self.read_on),
        )
        store_bytes = int(ray.cluster_resources().get("object_store_memory", 0)) // (2 * self.world)
        buffer_bytes = min(self.buffer_bytes, store_bytes or self.buffer_bytes)  # less if the store is small
        context, limits = dataset.context, ray.data.ExecutionResources.for_limits
        context.execution_options.preserve_order = True
        context.execution_options.resource_limits = limits(object_store_memory=buffer_bytes)
        context.target_max_block_size = BLOCK_BYTES
        context.raise_original_map_exception = True  # otherwise Ray wraps a DataError and loses its attributes
        context.enable_progress_bars = False
        context.memory_usage_poll_interval_s = None  # polling uses a thread per reader; nothing reads the result
        yield from dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=1)


class PrefetchIterator:
    """Iterator over batches that a background thread produces, at most `prefetch` batches ahead.

    An exception of the thread is raised by `next` after the batches before it, without Ray's wrappers. Close the
    iterator to stop the thread early.

    Args:
        make: Function that yields the batches, called in the thread with this iterator.
        prefetch: Maximum number of batches prepared ahead.
        device: GPU index; page-locked buffers are allocated in its context. By default, a thread uses GPU 0,
            where each rank would otherwise open a context. None: no GPU.

    Attributes:
        is_read_event: Event that `make` sets once all rows of its batches have been read.
    """

    def __init__(self, make: Callable[[PrefetchIterator], Iterator[Batch]], prefetch: int, device: int | None = None):
        self.is_read_event, self._device = Event(), device
        self._ready: Queue = Queue(prefetch)
        self._stop = Event()
        self._thread = Thread(target=self._fill, args=(make,), name="stream", daemon=True)
        self._thread.start()

    def __iter__(self) -> PrefetchIterator:
        return self

    def __next__(self) -> Batch:
        batch = None if self._stop.is_set() else self._ready.get()
        if batch is None or isinstance(batch, BaseException):
            self.close()
            raise StopIteration if batch is None else get_root_cause(batch)
        return batch

    def is_closed(self) -> bool:
        """Return True if the iterator has been closed."""
        return self._stop.is_set()

    def close(self) -> None:
        """Stop the thread and wait for its end; the iterator then returns no more batches."""
        self._stop.set()
        while self._thread.is_alive():
            self._thread.join(0.05)

    def _fill(self, make: Callable[[PrefetchIterator], Iterator[Batch]]) -> None:
        """Put all batches and then None into the queue; an exception replaces the remaining batches."""
        retain_freed_memory()
        try:
            if self._device is not None:
                torch.cuda.set_device(self._device)
            for batch in make(self):
                if not self._put(batch):
                    return
            self._put(None)
        except BaseException as error:
            self._put(error)
        trim_memory()

    def _put(self, value: object) -> bool:
        """Put a value into the queue as soon as there is room; return False if the iterator was closed."""
        while not self._stop.is_set():
            with suppress(Full):
                self._ready.put(value, timeout=0.1)
                return True
        return False


def choose_read_options(readers: int, read_on: str = "auto") -> dict[str, Any]:
    """Return the remote options of Ray for one read task, which contain its scheduling strategy.

    If a cluster has nodes with and without GPUs, the CPUs of GPU nodes are primarily reserved for training.
    The task is assigned to a node without GPUs, drawn at random. The nodes are weighted by their number of
    CPUs, because tasks request none. If the node is lost or full, Ray chooses another node. If there are more
    readers than CPUs on these nodes, Ray places the excess tasks itself, preferably on the worker's node. On
    clusters of one kind of nodes, Ray places all tasks in this way.

    Args:
        readers: Total number of readers over all ranks.
        read_on: Value of data.read_on. auto: as described above. gpu_nodes: Ray places all tasks. cpu_nodes: all
            tasks are assigned to nodes without GPUs, if there are any, even if there are more readers than CPUs.
    """
    nodes = {} if read_on == "gpu_nodes" else _count_nodes(int(monotonic() / NODE_POLL_INTERVAL_S))
    share = 1.0 if read_on == "cpu_nodes" else sum(nodes.values()) / readers
    if not nodes or random.random() >= share:
        return {"scheduling_strategy": "DEFAULT"}
    (node,) = random.choices(list(nodes), weights=list(nodes.values()))
    return {"scheduling_strategy": prefer_node(node)}


@lru_cache(maxsize=1)  # the argument changes every NODE_POLL_INTERVAL_S, and the nodes are then listed again
def _count_nodes(_: int) -> dict[str, float]:
    return find_nodes_without_gpus()
