"""Slices of canonical tables, concatenations of slices, and a queue of slices for each lane.

This module does not import torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from raytrec.data.canonical import RESERVED_PREFIX
from raytrec.data.order import LaneItem


@dataclass(frozen=True)
class Chunk:
    """Rows in canonical form (canonical.py) as NumPy views of Arrow's buffers.

    Attributes:
        matrices: Name → array [n, columns]: labels, dense, ids, task_weights, keys, and lengths, int32 [n,
            list columns].
        lists: Name of a list column (ids.NAME, weights.NAME, candidates, changed, …) → its index in `values` and
            among the columns of `lengths` and `offsets`.
        values: Flat values of each list column.
        offsets: Offsets of the rows' lists in `values`, int32 [n + 1, list columns]. The offsets of a row are
            adjacent in memory, which speeds up small slices.
        present: True for rows that are not skipped, bool [n]; None: no row is skipped.
        reserved: Reserved columns, with the prefix removed from their names; None: there are no reserved
            columns.
        batch: Record batch in canonical form that the arrays view; None: there is no record batch.
    """

    matrices: dict[str, np.ndarray]
    lists: dict[str, int]
    values: list[np.ndarray]
    offsets: np.ndarray
    present: np.ndarray | None
    reserved: pa.RecordBatch | None = None
    batch: pa.RecordBatch | None = None


@dataclass(slots=True)
class Rows:
    """Rows [first, last) of a chunk. Slicing copies no data."""

    chunk: Chunk
    first: int
    last: int

    @classmethod
    def of(cls, batch: pa.RecordBatch) -> Rows:
        """Return a slice of all rows of a record batch in canonical form, without copying matrices and values."""
        matrices, arrays, present, reserved = {}, {}, None, {}
        for name, array in zip(batch.schema.names, batch.columns, strict=True):
            if name == "present":
                present = array.to_numpy(zero_copy_only=False)
            elif name.startswith(RESERVED_PREFIX):
                reserved[name.removeprefix(RESERVED_PREFIX)] = array
            elif pa.types.is_fixed_size_list(array.type):
                matrices[name] = array.flatten().to_numpy().reshape(-1, array.type.list_size)
            else:
                arrays[name] = array
        offsets = np.empty((batch.num_rows + 1, len(arrays)), np.int32)
        for i, array in enumerate(arrays.values()):
            offsets[:, i] = array.offsets.to_numpy()
        matrices["lengths"] = offsets[1:] - offsets[:-1]
        lists = {name: i for i, name in enumerate(arrays)}
        values = [array.values.to_numpy() for array in arrays.values()]
        reserved_batch = pa.RecordBatch.from_pydict(reserved) if reserved else None
        chunk = Chunk(matrices, lists, values, offsets, present, reserved_batch, batch)
        return cls(chunk, 0, batch.num_rows)

    def __len__(self) -> int:
        return self.last - self.first

    def __getitem__(self, rows: slice) -> Rows:
        start, stop, _ = rows.indices(self.last - self.first)
        return Rows(self.chunk, self.first + start, self.first + stop)

    def matrix(self, name: str) -> np.ndarray:
        """Return the slice's rows of a matrix (Chunk.matrices), [rows, columns]."""
        return self.chunk.matrices[name][self.first : self.last]

    def to_batch(self) -> pa.RecordBatch:
        """Return the slice's rows of the chunk's record batch, which must exist, without copying."""
        return self.chunk.batch.slice(self.first, self.last - self.first)

    def reserved(self) -> pa.RecordBatch:
        """Return the slice's rows of the chunk's reserved columns, which must exist, without copying."""
        return self.chunk.reserved.slice(self.first, self.last - self.first)

    def values(self) -> list[np.ndarray]:
        """Return, for each list column of the chunk, the flat values of the slice's rows."""
        chunk = self.chunk
        bounds = zip(chunk.offsets[self.first].tolist(), chunk.offsets[self.last].tolist(), strict=True)
        return [values[begin:end] for values, (begin, end) in zip(chunk.values, bounds, strict=True)]


class JoinedRows:
    """Concatenation of several slices of chunks that have the same columns.

    Args:
        pieces: Slices, in order. Without slices, `matrix` and `lengths` must not be called.

    Attributes:
        rows: Total number of rows.
    """

    def __init__(self, pieces: list[Rows]):
        self._pieces, self.rows = pieces, sum(map(len, pieces))
        self._places = pieces[0].chunk.lists if pieces else {}
        self._values = [piece.values() for piece in pieces]
        self._lengths = self.matrix("lengths") if pieces else None

    def has(self, name: str) -> bool:
        """Return True if there are rows and they include a matrix of this name."""
        return self.rows > 0 and name in self._pieces[0].chunk.matrices

    def matrix(self, name: str, out: np.ndarray | None = None) -> np.ndarray:
        """Return a matrix of all rows, [rows, columns]; the result is written to `out` if given."""
        return np.concatenate([piece.matrix(name) for piece in self._pieces], out=out)

    def present(self) -> np.ndarray | None:
        """Return a mask, bool [rows], that is True for rows that are not skipped; None: no row is skipped."""
        if not self.rows or self._pieces[0].chunk.present is None:
            return None
        return np.concatenate([p.chunk.present[p.first : p.last] for p in self._pieces])

    def values(self, name: str) -> list[np.ndarray]:
        """Return the flat values of a list column (a key of Chunk.lists), one array per slice."""
        return [values[self._places[name]] for values in self._values]

    def lengths(self, name: str) -> np.ndarray:
        """Return the number of values in each row of a list column, int32 [rows]."""
        return self._lengths[:, self._places[name]]


class LaneQueues:
    """Queues of rows that have been read but not yet taken, one for each lane (order.py).

    Args:
        items: Items in the order in which they are read.
        tables: Rows of the items in this order, in canonical form; tables and items may begin at different rows.

    Attributes:
        due: Number of rows not yet received from `tables`.
    """

    def __init__(self, items: list[LaneItem], tables: Iterator[pa.Table]):
        self.due = sum(item.rows for item in items)
        self._items, self._tables = iter(items), tables
        self._lanes: dict[int, deque[Rows]] = {}
        self._lane, self._left = 0, 0  # lane of the item that is being received, and number of its rows still to come

    def take(self, lane: int, count: int) -> Iterator[Rows]:
        """Yield slices that together contain the next `count` rows of a lane; read tables until all are available.

        Errors of `tables`, such as a DataError, are raised unchanged.
        """
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
                if self._left == 0:
                    item = next(self._items)
                    self._lane, self._left = item.lane, item.rows
                part, rows = rows[: self._left], rows[self._left :]
                self._lanes.setdefault(self._lane, deque()).append(part)
                self._left -= len(part)
                self.due -= len(part)
