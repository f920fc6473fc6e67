"""One rank's batches of a dataset, read by Ray Data."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache, partial
from queue import Full, Queue
from threading import Event, Thread
from time import monotonic
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from raytrec.common.errors import root_cause
from raytrec.common.memory import give_back, keep_memory
from raytrec.compat.ray_core import nodes_without_gpus
from raytrec.compat.ray_data import ask_for_no_nodes, keep_no_statistics, pace_executors, prefer_node
from raytrec.config.features import Features
from raytrec.data.batch import Batch, Collator
from raytrec.data.fragments import Dataset
from raytrec.data.order import Item
from raytrec.data.pages.decode import Faults
from raytrec.data.pieces import Supply
from raytrec.data.rows import read_items

NODES_EVERY_S = 10.0  # nodes come and go
LEAST_TASK_ROWS = 65_536  # starting a task costs as much as decoding some 40,000 rows
BLOCK_BYTES = 16 << 20  # of what a task hands over at a time


@dataclass(eq=False)
class Stream:
    """The batches that one rank reads of a dataset, in an order that only the Order decides.

    Reading, checking and shuffling run as Ray Data tasks, which ask Ray for no CPU; this process slices and
    concatenates in a thread, `prefetch` batches ahead of the step.

    Args:
        dataset: what is read.
        order: an Order, or another with its methods.
        rank, world: this rank and their number.
        readers: read tasks at the same time. read_on: see `place`.
        prefetch: batches made ready ahead.
        faults: what becomes of rows that cannot be read; default: a DataError.
        buffer_bytes: what Ray's object store may hold of rows that have been read and not yet taken over.
        pin_memory: batches in page-locked memory, from which a GPU copies while it computes.
        features: of the run; see Collator.
        train: whether batches are trained, which is where features have every id (Form.every_id).
    """

    dataset: Dataset
    order: Any
    _: KW_ONLY
    rank: int
    world: int
    readers: int = 1
    read_on: str = "auto"
    prefetch: int = 4
    faults: Faults | None = None
    buffer_bytes: int = 1 << 29
    pin_memory: bool = False
    features: Features | None = None
    train: bool = False

    @property
    def may_skip(self) -> bool:
        """Whether rows that cannot be read are skipped."""
        return bool(self.faults and self.faults.skip)

    def batches(self, epoch: int = 0, start_step: int = 0) -> Reading:
        """The rest of an epoch: one Batch for each step from start_step on, the same number on every rank.

        Reading begins now, not with the first batch that is asked for.

        Raises:
            DataError: what a read task found wrong.
        """
        device = torch.cuda.current_device() if self.pin_memory else None
        return Reading(lambda reading: self._assemble(reading, epoch, start_step), self.prefetch, device)

    def epochs(self, count: int, first_step: int = 0) -> Iterator[Batch]:
        """The batches of epochs 0 to count - 1, one after the other; reading begins now.

        Args:
            first_step: steps over all epochs that are skipped, because they have been trained.
        """
        epoch, start_step = divmod(first_step, self.order.steps(self.dataset.rows))
        return self._chain(self.batches(epoch, start_step) if epoch < count else None, epoch, count)

    def _chain(self, current: Reading | None, epoch: int, count: int) -> Iterator[Batch]:
        """Begins to read an epoch when the one before has been read, which is long before it is trained."""
        following = None
        try:
            while current is not None:
                epoch += 1
                for batch in current:
                    if following is None and epoch < count and current.all_read.is_set():
                        following = self.batches(epoch)
                    yield batch
                current, following = following or (self.batches(epoch) if epoch < count else None), None
        finally:
            for reading in (current, following):
                if reading is not None:
                    reading.close()

    def _assemble(self, reading: Reading, epoch: int, start_step: int) -> Iterator[Batch]:
        rows = self.dataset.rows
        items = self.order.items(self.dataset, epoch, self.rank, self.world, start_step)
        supply = Supply(items, self._tables(items))
        part = (self.rank, self.world) if self.train else None
        collate = Collator(self.dataset.form, self.features, self.pin_memory, part)
        fill = self.train and bool(self.dataset.form.every_id)
        for step in range(start_step, self.order.steps(rows)):
            pieces = [
                piece
                for lane, count in self.order.shares(rows, step, self.rank, self.world)
                for piece in supply.take(lane, count)
            ]
            if not supply.due:
                reading.all_read.set()
            # The last batch has few rows: every id is shared out among as many as before.
            padded = self.order.padded_rows(rows, 0 if fill else step, self.world)
            whole = self.order.global_rows(rows, step)
            yield collate(pieces, padded, whole, epoch * self.order.steps(rows) + step)

    def _tables(self, items: list[Item]) -> Iterator[pa.Table]:
        """The items' rows in their order; a table may hold several items, or a part of one."""
        import ray.data

        if not items:
            return
        ask_for_no_nodes()
        keep_no_statistics()
        pace_executors()
        read = partial(read_items, ray.put(items), self.dataset.form, self.faults)
        rows = sum(item.rows for item in items)
        # Tasks in turn: what the others bring must find room until the first has ended.
        task_rows = max(
            LEAST_TASK_ROWS, self.buffer_bytes // (2 * self.readers * self.dataset.form.row_bytes)
        )
        blocks = min(len(items), max(-(-rows // task_rows), 4 * self.readers))
        # Not ray.data.range or from_arrow, whose own tasks would ask for a CPU where there may be none left.
        parts = np.array_split(np.arange(len(items)), blocks)
        dataset = ray.data.from_blocks([pa.table({"id": part}) for part in parts]).map_batches(
            read,
            batch_size=None,
            batch_format="pyarrow",
            # Their CPUs are set aside with the worker's (driver/launch.py). Tasks of a paused stream keep
            # what they had asked for, and those of another would wait for it for ever.
            num_cpus=0,
            compute=ray.data.TaskPoolStrategy(size=self.readers),
            ray_remote_args_fn=partial(place, self.readers * self.world, self.read_on),
        )
        context, limits = dataset.context, ray.data.ExecutionResources.for_limits
        context.execution_options.preserve_order = True
        context.execution_options.resource_limits = limits(object_store_memory=self._held_bytes())
        context.target_max_block_size = BLOCK_BYTES
        context.raise_original_map_exception = True  # else Ray wraps a DataError and loses it
        context.enable_progress_bars = False
        context.memory_usage_poll_interval_s = None  # a thread in each reader, for figures that are not read
        yield from dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=1)

    def _held_bytes(self) -> int:
        """What the object store may hold for this rank: its buffer, or less where the store is small."""
        import ray

        store = ray.cluster_resources().get("object_store_memory", 0)
        return min(self.buffer_bytes, int(store) // (2 * self.world) or self.buffer_bytes)


class Reading:
    """An iterator over batches that a thread makes, `prefetch` of them ahead.

    Args:
        device: index of the GPU that they are for. CUDA begins every thread on GPU 0, where page-locked
            memory would open a context for each rank.

    Attributes:
        all_read: set when nothing more is to be read for the batches that are still to come.
    """

    def __init__(self, make: Callable[[Reading], Iterator[Batch]], prefetch: int, device: int | None = None):
        self.all_read, self._device = Event(), device
        self._ready: Queue = Queue(prefetch)
        self._stop = Event()
        self._thread = Thread(target=self._fill, args=(make,), name="stream", daemon=True)
        self._thread.start()

    def __iter__(self) -> Reading:
        return self

    def __next__(self) -> Batch:
        batch = None if self._stop.is_set() else self._ready.get()
        if batch is None or isinstance(batch, BaseException):
            self.close()
            raise StopIteration if batch is None else root_cause(batch)
        return batch

    def close(self) -> None:
        """Ends the thread; what it has made is dropped."""
        self._stop.set()
        while self._thread.is_alive():
            self._thread.join(0.05)

    def _fill(self, make: Callable[[Reading], Iterator[Batch]]) -> None:
        """The thread: batches, then None, or the error."""
        keep_memory()
        try:
            if self._device is not None:
                torch.cuda.set_device(self._device)
            for batch in make(self):
                if not self._put(batch):
                    return
            self._put(None)
        except BaseException as error:
            self._put(error)
        give_back()

    def _put(self, value: object) -> bool:
        """Puts a value when there is room; False when the reader has gone."""
        while not self._stop.is_set():
            try:
                self._ready.put(value, timeout=0.1)
                return True
            except Full:
                continue
        return False


def place(readers: int, read_on: str = "auto") -> dict[str, Any]:
    """Ray options for one read task.

    On a cluster of both kinds, the CPUs of nodes with GPUs are for training first: a node without GPUs is
    chosen at random, those with more CPUs more often, because tasks ask for none; Ray chooses another if it
    is gone. What those nodes have too few CPUs for, and all else, is read where Ray chooses, this node first.

    Args:
        readers: of all ranks. read_on: data.read_on.
    """
    nodes = {} if read_on == "gpu_nodes" else _nodes(int(monotonic() / NODES_EVERY_S))
    share = 1.0 if read_on == "cpu_nodes" else sum(nodes.values()) / readers
    if not nodes or random.random() >= share:
        return {"scheduling_strategy": "DEFAULT"}
    (chosen,) = random.choices(list(nodes), weights=list(nodes.values()))
    return {"scheduling_strategy": prefer_node(chosen)}


@lru_cache(maxsize=1)
def _nodes(_: int) -> dict[str, float]:
    return nodes_without_gpus()
