"""Rows in the middle of a large row group. No torch here.

pyarrow reads row groups from their beginning. But columns are written as pages of some ten thousand rows, and
each can be decoded by itself, with its column's dictionary if it has one. So the pages that hold the rows are
looked up, by going from one page's header to the next, and pyarrow is given a file in which they come first.
"""

from __future__ import annotations

import io
from bisect import bisect_right
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from raytrec.data.pages.chunks import Pages, ReadAt

Version = tuple[str, int, int | None]  # of a file: path, size, time of its last change
# What comes of bytes that are not as expected. Errors of the storage are others: those are tried again.
ODD = (ValueError, LookupError, TypeError, OverflowError, pa.ArrowException)

STREAMED_BYTES = 64 << 10  # that pyarrow reads at a time
AHEAD_BYTES = 4 << 20  # that a search for pages reads of an object store at a time
BATCH_ROWS = 65_536  # that are decoded at a time where rows before the wanted ones have to be
KNOWN_BYTES = 16 << 20  # that a process keeps of where pages are

_known: dict[tuple[Version, int, int], Pages] = {}  # (file, row group, leaf column) → its pages
_lock = Lock()


def read_rows(
    file: pa.NativeFile,
    version: Version,
    reader: pq.ParquetFile,
    group: int,
    first: int,
    last: int,
    names: list[str],
) -> pa.Table:
    """Columns of rows [first, last) of a row group, fewer where it has fewer.

    Where its pages are not understood, the row group is decoded from its first row on, some rows at a time:
    slower, but pyarrow may be able to read them, and reports what is wrong with the file if not.

    Args:
        version: of the file; where its pages are is kept for the next time.
        reader: of the file.
        names: of columns, or of fields of structs.

    Raises:
        Damaged, ValueError, KeyError, OSError, pa.ArrowException: the file is damaged, or the storage fails.
    """
    footer, whole = reader.metadata, set(reader.schema_arrow.names)
    leaves = _leaves(footer)
    # Leaves of structs have separate pages, with other rows in each.
    single = {name: leaves[name][0] for name in names if name in whole and len(leaves[name]) == 1}
    looked_up = [leaf for name in names for leaf in leaves[name]]
    cut = _Cut(version, footer, group, first, last)
    pieces = _fetch(file, cut, looked_up, set(single.values()))
    paged = {name: leaf for name, leaf in single.items() if leaf in pieces}
    try:
        tables = _read_pages(pieces, cut, paged)
    except ODD:
        paged, tables = {}, []
    if others := [name for name in names if name not in paged]:
        tables.append(_stream(_reader(file, footer), group, first, last - first, others))
    rows = min(table.num_rows for table in tables)
    found = {name: table[name].slice(0, rows) for table in tables for name in table.column_names}
    return pa.table({name: found[name] for name in names if name in found} | found)


def _reader(file: pa.NativeFile, footer: pq.FileMetaData) -> pq.ParquetFile:
    """Reads no more of a file than the rows that it is asked for take."""
    how = {"metadata": footer, "pre_buffer": False, "buffer_size": STREAMED_BYTES}
    return pq.ParquetFile(file, page_checksum_verification=True, **how)


class _Cut(NamedTuple):
    """Rows [first, last) of a row group of a file."""

    version: Version
    footer: pq.FileMetaData
    group: int
    first: int
    last: int


def _read_pages(pieces: dict[int, Piece], cut: _Cut, columns: dict[str, int]) -> list[pa.Table]:
    """Columns of rows [first, last), out of their pages.

    Args:
        columns: name → leaf column.

    Raises:
        One of ODD: the pages are not as expected.
    """
    by_skip = defaultdict(list)
    for name, leaf in columns.items():
        by_skip[cut.first - pieces[leaf].row].append(name)
    rows = min(cut.last, cut.footer.row_group(cut.group).num_rows) - cut.first
    data = {piece.begin: piece.data for piece in pieces.values()}
    try:
        with pa.PythonFile(Excerpts(data, cut.version[1]), mode="r") as excerpts:
            reader = _reader(excerpts, cut.footer)
            tables = [_stream(reader, cut.group, skip, rows, alike) for skip, alike in by_skip.items()]
    except OSError as error:  # of bytes in memory
        raise ValueError(str(error)) from None
    if any(table.num_rows < rows for table in tables):
        raise ValueError("the pages hold fewer rows")
    return tables


def _leaves(footer: pq.FileMetaData) -> dict[str, list[int]]:
    """The leaf columns of each column, by its whole name."""
    found = defaultdict(list)
    for i in range(footer.num_columns):
        path = footer.schema.column(i).path
        while path:
            found[path].append(i)
            path = path.rpartition(".")[0]
    return found


class Piece(NamedTuple):
    """What is read of a column chunk."""

    begin: int  # of the chunk in the file
    data: bytes
    row: int  # that the pages begin with


def _fetch(file: pa.NativeFile, cut: _Cut, leaves: list[int], wanted: set[int]) -> dict[int, Piece]:
    """Leaf column → the pages with rows [first, last), of those wanted whose pages are understood.

    Args:
        leaves: whose pages are looked up.

    Raises:
        Damaged: the pages of one contradict the footer. OSError: the storage fails.
    """
    remote = "://" in cut.version[0]

    def read_at(at: int, size: int) -> bytes:
        return file.read_at(size, at)

    def fetch(leaf: int) -> Piece | None:
        pages = _pages(cut, leaf)
        try:
            pages.look_up(Ahead(read_at, AHEAD_BYTES) if remote else read_at)
            return Piece(pages.begin, *pages.read(read_at, cut.first, cut.last)) if leaf in wanted else None
        except ODD:
            return None

    if remote:  # as pyarrow does by itself where it reads whole row groups
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(fetch, leaves))
    else:
        found = list(map(fetch, leaves))
    _forget()
    return {leaf: piece for leaf, piece in zip(leaves, found, strict=True) if piece}


def _pages(cut: _Cut, leaf: int) -> Pages:
    key = cut.version, cut.group, leaf
    with _lock:
        if key not in _known:
            about = cut.footer.row_group(cut.group)
            _known[key] = Pages(about.column(leaf), cut.footer.schema.column(leaf), about.num_rows)
        return _known[key]


def _forget() -> None:
    """Lets the oldest go where they take too much memory."""
    with _lock:
        taken = sum(pages.nbytes for pages in _known.values())
        for key in list(_known):
            if taken <= KNOWN_BYTES:
                break
            taken -= _known.pop(key).nbytes


def _stream(reader: pq.ParquetFile, group: int, skip: int, rows: int, columns: list[str]) -> pa.Table:
    """Columns of `rows` rows after `skip` of those that a reader finds in a row group."""
    size = skip + rows if skip + rows <= 2 * BATCH_ROWS else BATCH_ROWS
    kept, left = [], rows
    for batch in reader.iter_batches(size, row_groups=[group], columns=columns, use_threads=False):
        part = batch.slice(min(skip, batch.num_rows), left)
        skip, left = max(0, skip - batch.num_rows), left - part.num_rows
        kept.append(part)
        if not left:
            break
    return pa.Table.from_batches([part for part in kept if part.num_rows] or kept)


class Ahead:
    """Reads at least `size` bytes at a time: what is asked for next is there already."""

    def __init__(self, read_at: ReadAt, size: int):
        self._read_at, self._size = read_at, size
        self._begin, self._data = 0, b""

    def __call__(self, at: int, size: int) -> bytes:
        if not self._begin <= at <= at + size <= self._begin + len(self._data):
            self._begin, self._data = at, self._read_at(at, max(size, self._size))
        return self._data[at - self._begin : at - self._begin + size]


class Excerpts(io.RawIOBase):
    """A file of which only some pieces are there: where they begin → their bytes."""

    def __init__(self, pieces: dict[int, bytes], size: int):
        super().__init__()
        self._starts, self._pieces = sorted(pieces), pieces
        self._size, self._at = size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        """Bytes of the piece that the position is in; none where it has ended."""
        place = bisect_right(self._starts, self._at) - 1
        if place < 0:
            return b""
        start = self._at - self._starts[place]
        data = self._pieces[self._starts[place]][start : start + size if size >= 0 else None]
        self._at += len(data)
        return data
