"""Which rows a rank reads at which step.

Everything follows from (row-group sizes, seed, epoch, batch_rows, lanes, shuffle, window) by arithmetic; the
number of workers only decides which lanes are whose.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Literal

import numpy as np

from raytrec.data.fragments import Dataset, Split

PAGE_ROWS = 20_000  # of a page, as Spark and Arrow write them: rows from its first on are read fastest


@dataclass(frozen=True)
class Part:
    """Rows [first, first + rows) of one row group.

    Attributes:
        number: of the first of them among all rows of the dataset, in file order.
        is_cut: whether the row group is large, and taken in pieces.
        split: Subset of the row group's rows in which `first` and `rows` count; None: all rows.
    """

    path: str
    group: int
    first: int
    rows: int
    number: int = 0
    is_cut: bool = False
    split: Split | None = None

    def span(self) -> tuple[int, int]:
        """Return the range [start, stop) of the row group's rows that holds this part."""
        if self.split is None:
            return self.first, self.first + self.rows
        rows = self.split.rows()[self.first : self.first + self.rows]
        return int(rows[0]), int(rows[-1]) + 1


@dataclass(frozen=True)
class Item:
    """What one read task brings: rows of one lane, in order, or shuffled by `seed`.

    `skip` rows at its front have been consumed before the start step (they are dropped after the shuffle).
    What is drawn for rows (data/transform.py) follows from `draw`, run.seed, epoch and their numbers;
    `draw` is () in evaluations and predictions.
    """

    lane: int
    step: int
    parts: tuple[Part, ...]
    seed: tuple[int, ...] | None
    skip: int = 0
    draw: tuple[int, ...] = ()

    @property
    def rows(self) -> int:
        """Rows that it delivers."""
        return sum(part.rows for part in self.parts) - self.skip


@dataclass(frozen=True)
class Order:
    """The order of an epoch.

    Args:
        batch_rows: rows of a global batch (B).
        lanes: spans of the order that every batch draws from (L); at least the number of workers.
        shuffle: none, groups or window.
        window: row groups of a lane that are shuffled together. A large one is cut into pieces of
            window × 20,000 rows (at least 40,000), each shuffled by itself.
        seed: of the permutation and the shuffles.
        drop_last: skip the last, smaller batch.
        permute: False keeps row groups in file order (evaluation).
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
        """Every row once, lane by lane in file order."""
        return cls(batch_rows, lanes, shuffle="groups", permute=False)

    def steps(self, rows: int) -> int:
        """Steps of an epoch over `rows` rows."""
        full, rest = divmod(rows, self.batch_rows)
        return full + (rest > 0 and not self.drop_last)

    def global_rows(self, rows: int, step: int) -> int:
        """Rows of the global batch at a step of the epoch."""
        return min(self.batch_rows, rows - step * self.batch_rows)

    def local_rows(self, rows: int, step: int, rank: int, world: int) -> int:
        """Rows of a rank's part of that batch."""
        batch, (low, high) = self.global_rows(rows, step), self.lanes_of(rank, world)
        return high * batch // self.lanes - low * batch // self.lanes

    def shares(self, rows: int, step: int, rank: int, world: int) -> list[tuple[int, int]]:
        """(lane, rows that the rank takes of it) at a step; file order has one lane, 0."""
        if self.shuffle == "none":
            return [(0, self.local_rows(rows, step, rank, world))]
        batch, (low, high) = self.global_rows(rows, step), self.lanes_of(rank, world)
        return [(lane, share(batch, lane, self.lanes)) for lane in range(low, high)]

    def padded_rows(self, rows: int, step: int, world: int) -> int:
        """Rows that every rank pads its part to: those of the largest, and at least 1."""
        return _largest_part(self.global_rows(rows, step), self.lanes, world)

    def lanes_of(self, rank: int, world: int) -> tuple[int, int]:
        """The lanes [low, high) of a rank."""
        return rank * self.lanes // world, (rank + 1) * self.lanes // world

    @property
    def piece_rows(self) -> int:
        """Rows of the pieces that large row groups are cut into."""
        return max(2, self.window) * PAGE_ROWS

    def pieces(self, dataset: Dataset) -> list[Part]:
        """The dataset's row groups, large ones in pieces, so that those need no more memory and time.

        A row group's last piece has half as many to one and a half times as many rows as its others.
        """
        pieces, number, size = [], 0, self.piece_rows
        for group in dataset.groups:
            count = max(1, (group.rows + size // 2) // size)
            for first in range(0, count * size, size):
                rows = size if first + size < count * size else group.rows - first
                numbers = number + first, count > 1, group.split
                pieces.append(Part(group.path, group.index, first, rows, *numbers))
            number += group.split.total if group.split else group.rows
        return pieces

    def items(self, dataset: Dataset, epoch: int, rank: int, world: int, start_step: int = 0) -> list[Item]:
        """A rank's work for the rest of an epoch, in the order of the first step that needs it."""
        layout = _Layout(dataset, self, epoch)
        low, high = self.lanes_of(rank, world)
        if self.shuffle == "none":
            return layout.slices(low, high, start_step)
        items = [item for lane in range(low, high) for item in layout.lane(lane, start_step)]
        return sorted(items, key=lambda item: (item.step, item.lane))


class _Layout:
    """An epoch's permuted pieces as one long sequence of rows."""

    def __init__(self, dataset: Dataset, order: Order, epoch: int):
        self.order, self.epoch = order, epoch
        self.draw = (order.seed, epoch) if order.permute else ()
        pieces = order.pieces(dataset)
        index = np.arange(len(pieces))
        if order.permute and order.shuffle != "none":
            np.random.default_rng((order.seed, epoch)).shuffle(index)
        self.pieces = [pieces[i] for i in index]
        self.ends = np.cumsum([piece.rows for piece in self.pieces])
        self.rows = int(self.ends[-1])
        self.full, self.rest = divmod(self.rows, order.batch_rows)
        if order.drop_last:
            self.rest = 0

    def parts(self, start: int, stop: int) -> Iterator[tuple[int, Part]]:
        """Rows [start, stop) of the sequence: (which piece, the part of it)."""
        for i in range(int(np.searchsorted(self.ends, start, side="right")), len(self.pieces)):
            piece = self.pieces[i]
            begin = int(self.ends[i]) - piece.rows
            if begin >= stop:
                break
            skipped, rows = max(start - begin, 0), min(stop, begin + piece.rows) - max(start, begin)
            first, number = piece.first + skipped, piece.number + skipped
            yield i, replace(piece, first=first, rows=rows, number=number)

    def windows(self, start: int, stop: int) -> Iterator[tuple[Part, ...]]:
        """Rows [start, stop) of the sequence, as far as they are read and shuffled together."""
        size = self.order.window if self.order.shuffle == "window" else 1
        window: list[Part] = []
        for _, part in self.parts(start, stop):
            if window and (part.is_cut or window[-1].is_cut or len(window) == size):
                yield tuple(window)
                window = []
            window.append(part)
        if window:
            yield tuple(window)

    def lane(self, lane: int, start_step: int) -> list[Item]:
        """The items of one lane from a step on."""
        order = self.order
        per_step = share(order.batch_rows, lane, order.lanes)
        start = self.full * offset(order.batch_rows, lane, order.lanes) + offset(self.rest, lane, order.lanes)
        stop = start + self.full * per_step + share(self.rest, lane, order.lanes)
        consumed = min(start_step, self.full) * per_step
        if start_step > self.full:
            consumed = stop - start
        items, position = [], 0
        for window in self.windows(start, stop):
            rows = sum(part.rows for part in window)
            skip = max(0, consumed - position)
            if skip < rows:
                step = (position + skip) // per_step if per_step else self.full
                seed = (order.seed, self.epoch, lane, start + position) if order.shuffle == "window" else None
                items.append(Item(lane, min(step, self.full), window, seed, skip, self.draw))
            position += rows
        return items

    def slices(self, low: int, high: int, start_step: int) -> list[Item]:
        """File order: a rank's slice of every batch, one item for each piece that it touches."""
        order = self.order
        per_piece: dict[int, tuple[int, list[Part]]] = {}  # the first step that needs it, and its parts
        for step in range(start_step, self.full + (self.rest > 0)):
            batch = order.batch_rows if step < self.full else self.rest
            begin = step * order.batch_rows
            span = begin + offset(batch, low, order.lanes), begin + offset(batch, high, order.lanes)
            for i, part in self.parts(*span) if span[0] < span[1] else ():
                per_piece.setdefault(i, (step, []))[1].append(part)
        return [Item(0, step, tuple(parts), None, draw=self.draw) for step, parts in per_piece.values()]


@lru_cache(maxsize=64)  # an epoch has two sizes of batches: it is asked for at every step
def _largest_part(batch: int, lanes: int, world: int) -> int:
    """Rows of the largest part of a batch, and at least 1."""
    ends = [offset(batch, rank * lanes // world, lanes) for rank in range(world + 1)]
    return max(1, *(stop - start for start, stop in pairwise(ends)))


def offset(rows: int, lane: int, lanes: int) -> int:
    """Rows of a batch before a lane's share."""
    return lane * rows // lanes


def share(rows: int, lane: int, lanes: int) -> int:
    """A lane's share of a batch."""
    return offset(rows, lane + 1, lanes) - offset(rows, lane, lanes)
