"""A table's rows, read from a checkpoint without torch and process groups.

Memory is that of the rows that are asked for; tables may be larger than this machine's.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import numpy as np

from raytrec.checkpoint.index import CheckpointError
from raytrec.checkpoint.rawfile import Source, open_source, read_block
from raytrec.common.errors import RunError, hint
from raytrec.common.storage import join_uri

STORED = {"float64": "<f8", "float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}
TENSOR_KEY = "tables/{}/{}"


class StoredTable:
    """A table as a checkpoint holds it, under whatever plan it was saved.

    Use it as a context manager: it keeps the files open.

    Args:
        folder: of the checkpoint, a local path or a URI.
        index: what `read_index` gives for it.
        name: of the table.
        kind: weight, or an optimizer's state of it; one value a row is a table with one column.
        checked: compare checksums, for which whole blocks are read; False: after all of it has been compared.

    Attributes:
        rows, dim: its shape.

    Raises:
        RunError: there is no such table. CheckpointError: it cannot be read.
    """

    def __init__(
        self, folder: str, index: dict[str, Any], name: str, kind: str = "weight", checked: bool = True
    ):
        entry = index["tensors"].get(TENSOR_KEY.format(name, kind))
        if entry is None:
            names = table_names(index)
            expected = ", ".join(names)
            raise RunError(f"there is no table '{name}'{hint(name, names)}", where=folder, expected=expected)
        if entry["dtype"] not in STORED:
            raise CheckpointError(f"table {name} is of {entry['dtype']}", expected=", ".join(STORED))
        self.rows, self.dim = _two(entry["shape"], 1)
        self._files = ExitStack()
        sources: dict[str, Source] = {}
        for part in entry["chunks"]:
            if part["file"] not in sources:
                source = open_source(folder, part["file"])
                sources[part["file"]] = self._files.enter_context(source)
        self._chunks = [
            _Chunk(
                sources[part["file"]],
                part,
                entry["dtype"],
                index["block_bytes"] if checked else None,
                join_uri(folder, part["file"]),
            )
            for part in entry["chunks"]
        ]

    def __enter__(self) -> StoredTable:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def read(self, first: int, end: int) -> np.ndarray:
        """Rows from `first` to before `end`: float32 [end - first, dim]."""
        band = np.empty((end - first, self.dim), np.float32)
        for chunk in self._chunks:
            chunk.into(band, first)
        return band

    def take(self, rows: Sequence[int]) -> np.ndarray:
        """Some rows: float32 [len(rows), dim].

        Raises:
            RunError: there is no such row.
        """
        for row in rows:
            if not 0 <= row < self.rows:
                raise RunError(f"there is no row {row}", expected=f"0 to {self.rows - 1}")
        wanted, places = np.unique(np.asarray(rows, np.int64), return_inverse=True)
        found = np.empty((len(wanted), self.dim), np.float32)
        ends = [*(np.flatnonzero(np.diff(wanted) != 1) + 1).tolist(), len(wanted)]  # of consecutive rows
        for first, end in pairwise([0, *ends]):
            if first < end:
                found[first:end] = self.read(int(wanted[first]), int(wanted[end - 1]) + 1)
        return found[places]


def table_names(index: dict[str, Any]) -> list[str]:
    """Tables that a checkpoint holds, in the order of their names."""
    head, tail = TENSOR_KEY.format("\0", "weight").split("\0")
    names = [n for n in index["tensors"] if n.startswith(head) and n.endswith(tail)]
    return sorted(name.removeprefix(head).removesuffix(tail) for name in names)


class _Chunk:
    """A shard of a table in a file. It keeps the block read last, in which the next rows may begin.

    Args:
        block_bytes: None: rows alone are read, and no checksums compared.
    """

    def __init__(self, source: Source, part: dict[str, Any], dtype: str, block_bytes: int | None, where: str):
        self._source, self._part, self._bfloat = source, part, dtype == "bfloat16"
        self._dtype, self._block_bytes, self._where = np.dtype(STORED[dtype]), block_bytes, where
        self._first, self._column = _two(part["offsets"], 0)
        self._rows, self._columns = _two(part["sizes"], 1)
        self._number, self._block = -1, memoryview(b"")

    def into(self, band: np.ndarray, first: int) -> None:
        """Copies what a band of rows, which begins with row `first` of the table, has in this shard."""
        low, high = max(first, self._first), min(first + len(band), self._first + self._rows)
        if low < high:
            columns = slice(self._column, self._column + self._columns)
            band[low - first : high - first, columns] = self._read(low - self._first, high - self._first)

    def _read(self, low: int, high: int) -> np.ndarray:
        width = self._columns * self._dtype.itemsize
        raw, place = bytearray((high - low) * width), low * width
        filled = 0
        if self._block_bytes is None:
            read_block(self._source, self._part["start"] + place, memoryview(raw), None, self._where)
            filled = len(raw)
        while filled < len(raw):
            number, within = divmod(place + filled, self._block_bytes)
            piece = self._load(number)[within : within + len(raw) - filled]
            raw[filled : filled + len(piece)] = piece
            filled += len(piece)
        values = np.frombuffer(raw, self._dtype).reshape(high - low, self._columns)
        return (values.astype("<u4") << 16).view("<f4") if self._bfloat else values

    def _load(self, number: int) -> memoryview:
        if number != self._number:
            begin = number * self._block_bytes
            size = min(self._block_bytes, self._rows * self._columns * self._dtype.itemsize - begin)
            start = self._part["start"] + begin
            block = memoryview(bytearray(size))
            where = f"{self._where}, bytes {start} to {start + size - 1}"
            read_block(self._source, start, block, self._part["crc32"][number], where)
            self._number, self._block = number, block
        return self._block


def _two(numbers: list[int], second: int) -> tuple[int, int]:
    """Of rows and columns; of rows alone, with this in the place of the other."""
    return numbers[0], numbers[1] if len(numbers) > 1 else second
