"""Compute which rows each rank reads at each step.

The row groups of an epoch, in file order or a seeded order, form one sequence of rows. The sequence is cut into
contiguous spans, called lanes. Each global batch takes rows from every lane, and each rank reads some lanes. With
`shuffle: none`, batches are consecutive rows instead. The order does not depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Literal

import numpy as np

from raytrec.data.fragments import Dataset, Split

PAGE_ROWS = 20_000  # rows per page in files from Spark and Arrow; reads that start at a page are fastest


@dataclass(frozen=True)
class Part:
    """Rows [first, first + rows) of one row group.

    Attributes:
        path: Path or URI of the file.
        group: Index of the row group in the file.
        first: Index of the first row, counted in the row group or in `split`.
        rows: Number of rows.
        number: Number of rows in all earlier row groups of the dataset, before any split, plus `first`.
        is_cut: True if the row group is large and therefore read in several pieces.
        split: Subset of the row group's rows to which `first` and `rows` refer; None: all rows.
    """

    path: str
    group: int
    first: int
    rows: int
    number: int = 0
    is_cut: bool = False
    split: Split | None = None

    def span(self) -> tuple[int, int]:
        """Return the smallest range [start, stop) of the row group's rows that contains this part."""
        if self.split is None:
            return self.first, self.first + self.rows
        rows = self.split.rows()[self.first : self.first + self.rows]
        return int(rows[0]), int(rows[-1]) + 1


@dataclass(frozen=True)
class LaneItem:
    """Unit of work of a read task: consecutive rows of one lane.

    Attributes:
        lane: Index of the lane to which the rows belong; 0 with `shuffle: none`.
        step: First step that uses some of the rows.
        parts: Row ranges to read, in order.
        seed: Seed of the shuffle of the rows; None: the rows stay in order.
        skip: Number of leading rows that were consumed before the start step; they are dropped after the
            shuffle.
        draw: (run.seed, epoch), the seed from which transforms draw ids (data/transform.py); () in
            evaluations and predictions.
    """

    lane: int
    step: int
    parts: tuple[Part, ...]
    seed: tuple[int, ...] | None
    skip: int = 0
    draw: tuple[int, ...] = ()

    @property
    def rows(self) -> int:
        """Return the number of rows that the item delivers."""
        return sum(part.rows for part in self.parts) - self.skip


@dataclass(frozen=True)
class Order:
    """Order in which an epoch reads the rows of a dataset.

    In the methods, `rows` is the number of rows of the dataset, `step` is counted in the epoch, and `world` is the
    number of ranks.

    Args:
        batch_rows: Number of rows in a global batch (B).
        lanes: Number of contiguous spans of the row order from which every batch is composed (L); at least
            the number of workers.
        shuffle: Shuffle mode: none, groups or window.
        window: Number of row groups of a lane that are shuffled together. A large row group is cut into
            pieces of window × 20,000 rows (at least 40,000), and each piece is shuffled separately.
        seed: Seed of the permutation and the shuffles.
        drop_last: True to skip a smaller last batch.
        permute: False to keep row groups in file order (evaluation).
    """

    batch_rows: int
    lanes: int
    shuffle: Literal["none", "groups", "window"] = "window"
    window: int = 1
    seed: int = 0
    drop_last: bool = False
    permute: bool = True

    @classmethod
    def evaluation(cls, batch_rows: int, lanes: int) -> Order:
        """Return the order of an evaluation: every row once, and the rows of each lane in file order."""
        return cls(batch_rows, lanes, shuffle="groups", permute=False)

    def steps(self, rows: int) -> int:
        """Return the number of steps in an epoch."""
        full, rest = divmod(rows, self.batch_rows)
        return full + (rest > 0 and not self.drop_last)

    def global_rows(self, rows: int, step: int) -> int:
        """Return the number of rows in the global batch of a step."""
        return min(self.batch_rows, rows - step * self.batch_rows)

    def local_rows(self, rows: int, step: int, rank: int, world: int) -> int:
        """Return the number of rows in a rank's part of the global batch of a step, without padding."""
        batch, (low, high) = self.global_rows(rows, step), self.lane_range(rank, world)
        return high * batch // self.lanes - low * batch // self.lanes

    def shares(self, rows: int, step: int, rank: int, world: int) -> list[tuple[int, int]]:
        """Return (lane, number of rows that the step takes from the lane) for each lane of a rank.

        With `shuffle: none`, all rows of the rank are attributed to lane 0.
        """
        if self.shuffle == "none":
            return [(0, self.local_rows(rows, step, rank, world))]
        batch, (low, high) = self.global_rows(rows, step), self.lane_range(rank, world)
        return [(lane, lane_share(batch, lane, self.lanes)) for lane in range(low, high)]

    def padded_rows(self, rows: int, step: int, world: int) -> int:
        """Return the number of rows to which all ranks pad their parts of a batch: the largest part, at least 1."""
        return _largest_part(self.global_rows(rows, step), self.lanes, world)

    def lane_range(self, rank: int, world: int) -> tuple[int, int]:
        """Return the range [low, high) of lanes assigned to a rank."""
        return rank * self.lanes // world, (rank + 1) * self.lanes // world

    def pieces(self, dataset: Dataset) -> list[Part]:
        """Return the dataset's row groups in file order, with large row groups cut into pieces.

        Cutting limits the memory and time of a read. The last piece of a cut row group has 0.5 to 1.5
        times as many rows as the others.
        """
        pieces, number, size = [], 0, max(2, self.window) * PAGE_ROWS
        for group in dataset.groups:
            count = max(1, (group.rows + size // 2) // size)
            for first in range(0, count * size, size):
                rows = size if first + size < count * size else group.rows - first
                numbers = number + first, count > 1, group.split
                pieces.append(Part(group.path, group.index, first, rows, *numbers))
            number += group.split.total if group.split else group.rows
        return pieces

    def items(self, dataset: Dataset, epoch: int, rank: int, world: int, start_step: int = 0) -> list[LaneItem]:
        """Return a rank's items for the steps from `start_step` on, sorted by their first steps."""
        layout = _EpochLayout(dataset, self, epoch)
        low, high = self.lane_range(rank, world)
        if self.shuffle == "none":
            return layout.slices(low, high, start_step)
        items = [item for lane in range(low, high) for item in layout.lane(lane, start_step)]
        return sorted(items, key=lambda item: (item.step, item.lane))


class _EpochLayout:
    """Pieces (Order.pieces) of an epoch in reading order, viewed as one sequence of rows.

    Attributes:
        ends: End of each piece in the sequence, int64 [pieces].
        full: Number of full batches.
        tail: Number of rows in a smaller last batch; 0 if there is no such batch.
    """

    def __init__(self, dataset: Dataset, order: Order, epoch: int):
        self.order, self.epoch = order, epoch
        self.draw = (order.seed, epoch) if order.permute else ()
        pieces = order.pieces(dataset)
        index = np.arange(len(pieces))
        if order.permute and order.shuffle != "none":
            np.random.default_rng((order.seed, epoch)).shuffle(index)
        self.pieces = [pieces[i] for i in index]
        self.ends = np.cumsum([piece.rows for piece in self.pieces])
        self.full, self.tail = divmod(int(self.ends[-1]), order.batch_rows)
        if order.drop_last:
            self.tail = 0

    def parts(self, start: int, stop: int) -> Iterator[tuple[int, Part]]:
        """Yield (index of the piece, part of that piece) for rows [start, stop) of the sequence."""
        for i in range(int(np.searchsorted(self.ends, start, side="right")), len(self.pieces)):
            piece = self.pieces[i]
            begin = int(self.ends[i]) - piece.rows
            if begin >= stop:
                break
            skipped, rows = max(start - begin, 0), min(stop, begin + piece.rows) - max(start, begin)
            first, number = piece.first + skipped, piece.number + skipped
            yield i, replace(piece, first=first, rows=rows, number=number)

    def windows(self, start: int, stop: int) -> Iterator[tuple[Part, ...]]:
        """Yield the parts of rows [start, stop), grouped into units that are read and shuffled together."""
        size = self.order.window if self.order.shuffle == "window" else 1
        window: list[Part] = []
        for _, part in self.parts(start, stop):
            if window and (part.is_cut or window[-1].is_cut or len(window) == size):
                yield tuple(window)
                window = []
            window.append(part)
        if window:
            yield tuple(window)

    def lane(self, lane: int, start_step: int) -> list[LaneItem]:
        """Return the items of one lane from step `start_step` to the end of the epoch."""
        order = self.order
        per_step = lane_share(order.batch_rows, lane, order.lanes)
        start = self.full * lane_offset(order.batch_rows, lane, order.lanes) + lane_offset(self.tail, lane, order.lanes)
        stop = start + self.full * per_step + lane_share(self.tail, lane, order.lanes)
        consumed = start_step * per_step if start_step <= self.full else stop - start
        items, position = [], 0
        for window in self.windows(start, stop):
            rows = sum(part.rows for part in window)
            skip = max(0, consumed - position)
            if skip < rows:
                step = (position + skip) // per_step if per_step else self.full
                seed = (order.seed, self.epoch, lane, start + position) if order.shuffle == "window" else None
                items.append(LaneItem(lane, min(step, self.full), window, seed, skip, self.draw))
            position += rows
        return items

    def slices(self, low: int, high: int, start_step: int) -> list[LaneItem]:
        """Return the items of the rank of lanes [low, high) for `shuffle: none`, one for each piece that it reads."""
        order = self.order
        per_piece: dict[int, tuple[int, list[Part]]] = {}  # index of a piece → (first step that uses the piece, parts)
        for step in range(start_step, self.full + (self.tail > 0)):
            batch = order.batch_rows if step < self.full else self.tail
            begin = step * order.batch_rows
            span = begin + lane_offset(batch, low, order.lanes), begin + lane_offset(batch, high, order.lanes)
            for i, part in self.parts(*span) if span[0] < span[1] else ():
                per_piece.setdefault(i, (step, []))[1].append(part)
        return [LaneItem(0, step, tuple(parts), None, draw=self.draw) for step, parts in per_piece.values()]


@lru_cache(maxsize=64)  # called at every step, with only two batch sizes in an epoch
def _largest_part(batch: int, lanes: int, world: int) -> int:
    """Return the largest number of rows in any rank's part of a batch, at least 1."""
    ends = [lane_offset(batch, rank * lanes // world, lanes) for rank in range(world + 1)]
    return max(1, *(stop - start for start, stop in pairwise(ends)))


def lane_offset(rows: int, lane: int, lanes: int) -> int:
    """Return the index of a lane's first row in a batch of `rows` rows, given the number of lanes."""
    return lane * rows // lanes


def lane_share(rows: int, lane: int, lanes: int) -> int:
    """Return the number of rows that a lane contributes to a batch of `rows` rows, given the number of lanes."""
    return lane_offset(rows, lane + 1, lanes) - lane_offset(rows, lane, lanes)
