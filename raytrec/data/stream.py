"""One rank's batches of a dataset: a Ray Data pipeline over its items, put together in a thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from queue import Empty, Full, Queue
from threading import Event, Thread

import pyarrow as pa

from raytrec.data.batch import Batch
from raytrec.data.collate import Collator, Rows
from raytrec.data.faults import Faults
from raytrec.data.fragments import Dataset
from raytrec.data.memory import keep_memory
from raytrec.data.order import Item, Order
from raytrec.data.rows import read_item
from raytrec.errors import root_cause

TASK_ROWS = 524_288  # of a Ray task, about: starting one costs as much as decoding some 40,000 rows
BLOCK_BYTES = 32 << 20  # of what a task hands over at a time


class Stream:
    """The batches that one rank reads of a dataset, in an order that only the Order decides.

    Reading, checking and shuffling run as Ray Data tasks on spare CPUs; this process slices and concatenates
    in a thread, `prefetch` batches ahead of the step.

    Args:
        rank, world: this rank and their number.
        readers: read tasks at the same time.
        prefetch: batches made ready ahead.
        faults: what becomes of rows that cannot be read; default: a DataError.
    """

    def __init__(
        self,
        dataset: Dataset,
        order: Order,
        *,
        rank: int,
        world: int,
        readers: int = 1,
        prefetch: int = 4,
        faults: Faults | None = None,
    ):
        self.dataset, self.order = dataset, order
        self._rank, self._world = rank, world
        self._readers, self._prefetch, self._faults = readers, prefetch, faults

    @property
    def may_skip(self) -> bool:
        """Whether rows that cannot be read are left out."""
        return bool(self._faults and self._faults.skip)

    def batches(self, epoch: int = 0, start_step: int = 0) -> Iterator[Batch]:
        """The rest of an epoch: one Batch for each step from start_step on, the same number on every rank.

        Reading begins now, not with the first batch that is asked for.

        Raises:
            DataError: what a read task found wrong.
        """
        ready: Queue = Queue(self._prefetch)
        stop = Event()
        thread = Thread(target=self._fill, args=(ready, stop, epoch, start_step), name="stream", daemon=True)
        thread.start()
        return self._deliver(ready, stop, thread)

    def epochs(self, count: int) -> Iterator[Batch]:
        """The batches of epochs 0 to count - 1, one after the other; reading begins now."""
        return self._chain(self.batches(0), count)

    def _chain(self, first: Iterator[Batch], count: int) -> Iterator[Batch]:
        yield from first
        for epoch in range(1, count):
            yield from self.batches(epoch)

    def _deliver(self, ready: Queue, stop: Event, thread: Thread) -> Iterator[Batch]:
        try:
            while (batch := ready.get()) is not None:
                if isinstance(batch, BaseException):
                    raise root_cause(batch)
                yield batch
        finally:
            stop.set()
            while thread.is_alive():
                with_room(ready)
                thread.join(0.05)

    def _fill(self, ready: Queue, stop: Event, epoch: int, start_step: int) -> None:
        """The thread: batches, then None, or the error."""
        keep_memory()
        try:
            for batch in self._assemble(epoch, start_step):
                if not put(ready, batch, stop):
                    return
            put(ready, None, stop)
        except BaseException as error:
            put(ready, error, stop)

    def _assemble(self, epoch: int, start_step: int) -> Iterator[Batch]:
        rows = self.dataset.rows
        items = self.order.items(self.dataset, epoch, self._rank, self._world, start_step)
        supply, collate = Supply(items, self._tables(items)), Collator(self.dataset.form)
        for step in range(start_step, self.order.steps(rows)):
            pieces = [
                piece
                for lane, count in self.order.shares(rows, step, self._rank, self._world)
                for piece in supply.take(lane, count)
            ]
            yield collate(
                pieces, self.order.padded_rows(rows, step, self._world), self.order.global_rows(rows, step)
            )

    def _tables(self, items: list[Item]) -> Iterator[pa.Table]:
        """The items' rows in their order; a table may hold several items, or a part of one."""
        import ray.data

        if not items:
            return
        form, faults, tasks = self.dataset.form, self._faults, ray.put(items)

        def read(index: pa.Table) -> Iterator[pa.Table]:
            import ray

            whole = ray.get(tasks)
            yield from (read_item(whole[i], form, faults) for i in index["id"].to_pylist())

        rows = sum(item.rows for item in items)
        blocks = min(len(items), max(-(-rows // TASK_ROWS), 4 * self._readers))
        dataset = ray.data.range(len(items), override_num_blocks=blocks).map_batches(
            read,
            batch_size=None,
            batch_format="pyarrow",
            num_cpus=1,
            compute=ray.data.TaskPoolStrategy(size=self._readers),
        )
        dataset.context.execution_options.preserve_order = True
        dataset.context.enable_progress_bars = False
        dataset.context.raise_original_map_exception = True  # else Ray wraps a DataError and loses it
        dataset.context.memory_usage_poll_interval_s = (
            None  # a thread in each reader, for figures nobody reads
        )
        dataset.context.target_max_block_size = BLOCK_BYTES
        yield from dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=1)


class Supply:
    """What has been read of each lane and not yet been taken."""

    def __init__(self, items: list[Item], tables: Iterator[pa.Table]):
        self._items, self._tables = iter(items), tables
        self._lanes: dict[int, deque[Rows]] = {}
        self._lane, self._due = 0, 0  # the item that is arriving: its lane, and its rows still to come

    def take(self, lane: int, count: int) -> Iterator[Rows]:
        """The lane's next `count` rows."""
        queue = self._lanes.setdefault(lane, deque())
        while count:
            while not queue:
                self._receive()
            rows = queue.popleft()
            if len(rows) > count:
                queue.appendleft(rows[count:])
                rows = rows[:count]
            count -= len(rows)
            yield rows

    def _receive(self) -> None:
        for chunk in next(self._tables).to_batches():
            rows = Rows.of(chunk)
            while rows:
                if self._due == 0:
                    item = next(self._items)
                    self._lane, self._due = item.lane, item.rows
                self._lanes.setdefault(self._lane, deque()).append(rows[: self._due])
                rest = rows[self._due :]
                self._due -= len(rows) - len(rest)
                rows = rest


def put(queue: Queue, value: object, stop: Event) -> bool:
    """Puts a value when there is room; False when the reader has gone."""
    while not stop.is_set():
        try:
            queue.put(value, timeout=0.1)
            return True
        except Full:
            continue
    return False


def with_room(queue: Queue) -> None:
    """Empties the queue, so that who waits to put sees that it is over."""
    try:
        while True:
            queue.get_nowait()
    except Empty:
        return
