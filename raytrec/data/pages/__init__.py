"""Read rows from the middle of a large row group of a Parquet file. Does not import torch.

pyarrow always reads a row group from its first row. However, columns are stored as pages (of about 20,000 rows
in files from Spark and Arrow), and each page can be decoded separately, with the column's dictionary if it has one.
This module walks the page headers to find the pages with the requested rows. It passes pyarrow a file in which
these pages come first.
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

from raytrec.data.pages.chunks import PageIndex, ReadAt

FileVersion = tuple[str, int, int | None]  # version of a file: path, size in bytes, modification time in nanoseconds
# Errors raised for unexpected bytes. Storage errors (OSError) are not included, because reads are retried.
DECODING_ERRORS = (ValueError, LookupError, TypeError, OverflowError, pa.ArrowException)

STREAM_BUFFER_BYTES = 64 << 10  # buffer size of pyarrow's reads
READ_AHEAD_BYTES = 4 << 20  # bytes per read from an object store during a search for pages
BATCH_ROWS = 65_536  # rows per decoded batch, unless all rows that must be decoded fit into twice as many
MAX_PAGE_CACHE_BYTES = 16 << 20  # memory limit for page positions in each process

_page_cache: dict[tuple[FileVersion, int, int], PageIndex] = {}  # (file, row group, leaf column) → page positions
_lock = Lock()


def read_rows(
    file: pa.NativeFile,
    version: FileVersion,
    reader: pq.ParquetFile,
    group: int,
    first: int,
    last: int,
    names: list[str],
) -> pa.Table:
    """Return columns for rows [first, last) of a row group, or for fewer rows if the row group ends earlier.

    Columns whose pages have an unexpected format are decoded in batches from the row group's first row. Decoding is
    then slower, but pyarrow either reads the pages or reports an error in the file.

    Args:
        file: Open file.
        version: Version of the file; page positions are cached by version for later calls.
        reader: Reader of the file.
        group: Index of the row group.
        first: Index of the first row in the row group.
        last: Index after the last row.
        names: Names of columns or struct fields, as in `user.age`.

    Raises:
        DamagedPageError, ValueError, KeyError, OSError, pa.ArrowException: The file is damaged, the storage fails,
            or a column does not exist.
    """
    footer, columns = reader.metadata, set(reader.schema_arrow.names)
    leaves = _leaves(footer)
    # The leaf columns of a struct have different page boundaries.
    single = {name: leaves[name][0] for name in names if name in columns and len(leaves[name]) == 1}
    looked_up = [leaf for name in names for leaf in leaves[name]]
    span = _RowSpan(version, footer, group, first, last)
    pieces = _fetch(file, span, looked_up, set(single.values()))
    paged = {name: leaf for name, leaf in single.items() if leaf in pieces}
    try:
        tables = _read_pages(pieces, span, paged)
    except DECODING_ERRORS:
        paged, tables = {}, []
    if other_names := [name for name in names if name not in paged]:
        tables.append(_stream(_reader(file, footer), group, first, last - first, other_names))
    rows = min(table.num_rows for table in tables)
    decoded = {name: table[name].slice(0, rows) for table in tables for name in table.column_names}
    return pa.table({name: decoded[name] for name in names if name in decoded} | decoded)


def _reader(file: pa.NativeFile, footer: pq.FileMetaData) -> pq.ParquetFile:
    """Return a Parquet reader that reads column chunks in small buffers instead of as a whole."""
    options = {"metadata": footer, "pre_buffer": False, "buffer_size": STREAM_BUFFER_BYTES}
    return pq.ParquetFile(file, page_checksum_verification=True, **options)


class _RowSpan(NamedTuple):
    """Rows [first, last) of row group `group` of a file with the given version and footer."""

    version: FileVersion
    footer: pq.FileMetaData
    group: int
    first: int
    last: int


def _read_pages(pieces: dict[int, ChunkBytes], span: _RowSpan, columns: dict[str, int]) -> list[pa.Table]:
    """Return tables decoded from pages; columns whose pages start at the same row share a table.

    Args:
        pieces: Index of a leaf column → its fetched pages.
        span: Rows to return.
        columns: Column name → index of its leaf column.

    Raises:
        One of DECODING_ERRORS: The pages cannot be decoded, or contain too few rows.
    """
    by_skip = defaultdict(list)
    for name, leaf in columns.items():
        by_skip[span.first - pieces[leaf].row].append(name)
    rows = min(span.last, span.footer.row_group(span.group).num_rows) - span.first
    data = {piece.begin: piece.data for piece in pieces.values()}
    try:
        with pa.PythonFile(SparseFile(data, span.version[1]), mode="r") as excerpts:
            reader = _reader(excerpts, span.footer)
            tables = [_stream(reader, span.group, skip, rows, names) for skip, names in by_skip.items()]
    except OSError as error:  # all bytes are in memory, so the error does not come from the storage
        raise ValueError(str(error)) from None
    if any(table.num_rows < rows for table in tables):
        raise ValueError("the pages contain fewer rows than requested")
    return tables


def _leaves(footer: pq.FileMetaData) -> dict[str, list[int]]:
    """Return a mapping from each column or field, named as in `user.age`, to the indexes of its leaf columns."""
    leaves = defaultdict(list)
    for i in range(footer.num_columns):
        path = footer.schema.column(i).path
        while path:
            leaves[path].append(i)
            path = path.rpartition(".")[0]
    return leaves


class ChunkBytes(NamedTuple):
    """Bytes of the pages of a column chunk that contain requested rows.

    Attributes:
        begin: Offset of the column chunk in the file.
        data: Bytes of the dictionary page (if the pages need it) and of the data pages.
        row: Index of the first row in the data pages, within the row group.
    """

    begin: int
    data: bytes
    row: int


def _fetch(file: pa.NativeFile, span: _RowSpan, leaves: list[int], used: set[int]) -> dict[int, ChunkBytes]:
    """Return a mapping from leaf column to its pages with the rows of `span`.

    The mapping contains the columns in `used` whose page formats are supported.

    Args:
        file: Open file.
        span: Rows to read.
        leaves: Indexes of leaf columns whose pages are looked up and checked.
        used: Indexes of leaf columns whose pages are read.

    Raises:
        DamagedPageError: The pages of a column contradict the footer.
        OSError: The storage fails.
    """
    remote = "://" in span.version[0]

    def read_at(at: int, size: int) -> bytes:
        return file.read_at(size, at)

    def fetch(leaf: int) -> ChunkBytes | None:
        pages = _pages(span, leaf)
        try:
            pages.look_up(_read_ahead(read_at) if remote else read_at)
            return ChunkBytes(pages.begin, *pages.read(read_at, span.first, span.last)) if leaf in used else None
        except DECODING_ERRORS:
            return None

    if remote:
        with ThreadPoolExecutor(8) as pool:  # reads are concurrent, as pyarrow's reads of whole row groups
            pieces = list(pool.map(fetch, leaves))
    else:
        pieces = [fetch(leaf) for leaf in leaves]
    with _lock:
        while sum(pages.nbytes for pages in _page_cache.values()) > MAX_PAGE_CACHE_BYTES:
            del _page_cache[next(iter(_page_cache))]  # the oldest
    return {leaf: piece for leaf, piece in zip(leaves, pieces, strict=True) if piece}


def _pages(span: _RowSpan, leaf: int) -> PageIndex:
    key = span.version, span.group, leaf
    with _lock:
        if key not in _page_cache:
            group = span.footer.row_group(span.group)
            _page_cache[key] = PageIndex(group.column(leaf), span.footer.schema.column(leaf), group.num_rows)
        return _page_cache[key]


def _stream(reader: pq.ParquetFile, group: int, skip: int, rows: int, columns: list[str]) -> pa.Table:
    """Return columns for at most `rows` rows of a row group, after skipping the `skip` first rows of the reader."""
    size = skip + rows if skip + rows <= 2 * BATCH_ROWS else BATCH_ROWS
    batches, remaining = [], rows
    for batch in reader.iter_batches(size, row_groups=[group], columns=columns, use_threads=False):
        part = batch.slice(min(skip, batch.num_rows), remaining)
        skip, remaining = max(0, skip - batch.num_rows), remaining - part.num_rows
        batches.append(part)
        if not remaining:
            break
    return pa.Table.from_batches([part for part in batches if part.num_rows] or batches)


def _read_ahead(read_at: ReadAt) -> ReadAt:
    """Return a function that reads at least READ_AHEAD_BYTES at once, and serves later requests from these bytes."""
    begin, data = 0, b""

    def read(at: int, size: int) -> bytes:
        nonlocal begin, data
        if not begin <= at <= at + size <= begin + len(data):
            begin, data = at, read_at(at, max(size, READ_AHEAD_BYTES))
        return data[at - begin : at - begin + size]

    return read


class SparseFile(io.RawIOBase):
    """Read-only file of `size` bytes, of which only the bytes in `pieces` (offset → bytes) are available."""

    def __init__(self, pieces: dict[int, bytes], size: int):
        super().__init__()
        self._starts, self._pieces = sorted(pieces), pieces
        self._size, self._at = size, 0

    def readable(self) -> bool:
        """Return True: the file can be read."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the position in the file and return the new position; see io.IOBase.seek."""
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        """Return at most `size` bytes, up to the end of the piece at the current position; b"" outside of all pieces.

        If `size` is negative, all bytes up to the end of the piece are returned.
        """
        place = bisect_right(self._starts, self._at) - 1
        if place < 0:
            return b""
        start = self._at - self._starts[place]
        data = self._pieces[self._starts[place]][start : start + size if size >= 0 else None]
        self._at += len(data)
        return data
