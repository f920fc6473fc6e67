"""Rows in the middle of a large row group, without decoding what precedes them. No torch here.

pyarrow reads row groups from their beginning. But columns are written as pages of some ten thousand rows, and
each can be decoded by itself, with its column's dictionary if it has one. So the pages that hold the rows are
looked up, by going from one page's header to the next, and pyarrow is given a file in which they come first.
"""

from __future__ import annotations

import io
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from raytrec.data.thrift import Truncated, read_struct

Version = tuple[str, int, int | None]  # of a file: path, size, time of its last change
ReadAt = Callable[[int, int], bytes]  # (offset, size) → bytes, fewer only at the end of the file
HEADER_BYTES = 1 << 20  # more than any page's header takes
DATA, DATA_V2 = 0, 3  # PageType of parquet.thrift
TYPE, UNCOMPRESSED, COMPRESSED, DATA_HEADER, DATA_HEADER_V2 = 1, 2, 3, 5, 8  # fields of PageHeader
VALUES, ENCODING, LEVELS_ENCODING = 1, 2, 4  # fields of DataPageHeader, of which V2 has the first
V2_ENCODING, V2_LEVELS_BYTES = 4, 6  # fields of DataPageHeaderV2
RLE, DICTIONARY_CODED = 3, (2, 8)  # of Encoding; PLAIN_DICTIONARY and RLE_DICTIONARY
# What comes of bytes that are not as expected. Errors of the storage are others: those are tried again.
ODD = (ValueError, LookupError, TypeError, OverflowError, pa.ArrowException)

STREAMED_BYTES = 64 << 10  # that pyarrow reads at a time
AHEAD_BYTES = 4 << 20  # that a search for pages reads of an object store at a time
CODECS = {"UNCOMPRESSED", "SNAPPY", "GZIP", "ZSTD", "BROTLI"}  # with "LZ4", pyarrow means two
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
    slower, but pyarrow may know what to make of them, and it says what is wrong with the file if not.

    Args:
        version: of the file; where its pages are is kept for the next time.
        reader: of the file.
        names: of columns, or of fields of structs.

    Raises:
        ValueError, KeyError, OSError, pa.ArrowException: the file is damaged, or the storage fails.
    """
    columns, leaves = set(reader.schema_arrow.names), _leaves(reader.metadata)
    paged = {
        name: leaves[name][0]
        for name in names
        if name in columns and _countable(reader.metadata, group, leaves[name])
    }
    try:
        tables = _read_pages(file, version, reader.metadata, group, first, last, paged)
    except ODD:
        paged, tables = {}, []
    if others := [name for name in names if name not in paged]:
        tables.append(_stream(_reader(file, reader.metadata), group, first, last - first, others))
    rows = min(table.num_rows for table in tables)
    found = {name: table[name].slice(0, rows) for table in tables for name in table.column_names}
    return pa.table({name: found[name] for name in names if name in found} | found)


def _reader(file: pa.NativeFile, footer: pq.FileMetaData) -> pq.ParquetFile:
    """Reads no more of a file than the rows that it is asked for take."""
    how = {"metadata": footer, "pre_buffer": False, "buffer_size": STREAMED_BYTES}
    return pq.ParquetFile(file, page_checksum_verification=True, **how)


def _read_pages(
    file: pa.NativeFile,
    version: Version,
    footer: pq.FileMetaData,
    group: int,
    first: int,
    last: int,
    columns: dict[str, int],
) -> list[pa.Table]:
    """Columns of rows [first, last), out of their pages.

    Args:
        columns: name → leaf column.

    Raises:
        OSError: the storage fails. One of ODD: the pages are not as expected.
    """
    pieces, begins = _fetch(file, version, footer, group, first, last, list(columns.values()))
    by_skip = defaultdict(list)
    for name, leaf in columns.items():
        by_skip[first - begins[leaf]].append(name)
    rows = min(last, footer.row_group(group).num_rows) - first
    try:
        with pa.PythonFile(Excerpts(pieces, version[1]), mode="r") as excerpts:
            reader = _reader(excerpts, footer)
            tables = [_stream(reader, group, skip, rows, alike) for skip, alike in by_skip.items()]
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


def _countable(footer: pq.FileMetaData, group: int, leaves: list[int]) -> bool:
    """Whether pages tell which rows of a column they hold: not of structs, whose leaves have pages of their
    own, and not of lists in a compression that cannot be undone here."""
    if len(leaves) != 1:
        return False
    codec = footer.row_group(group).column(leaves[0]).compression
    return not footer.schema.column(leaves[0]).max_repetition_level or codec in CODECS


def _fetch(
    file: pa.NativeFile,
    version: Version,
    footer: pq.FileMetaData,
    group: int,
    first: int,
    last: int,
    leaves: list[int],
) -> tuple[dict[int, bytes], dict[int, int]]:
    """(where chunks begin in the file → what is read of them, leaf column → the row that begins there)."""
    remote = "://" in version[0]

    def fetch(leaf: int) -> tuple[int, bytes, int]:
        pages = _pages(version, footer, group, leaf)
        data, row = pages.read(
            lambda at, size: file.read_at(size, at), first, last, AHEAD_BYTES if remote else 0
        )
        return pages.begin, data, row

    if remote:  # as pyarrow does by itself where it reads whole row groups
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(fetch, leaves))
    else:
        found = list(map(fetch, leaves))
    _forget()
    pieces = {begin: data for begin, data, _ in found}
    return pieces, {leaf: row for leaf, (_, _, row) in zip(leaves, found, strict=True)}


def _pages(version: Version, footer: pq.FileMetaData, group: int, leaf: int) -> Pages:
    key = version, group, leaf
    with _lock:
        if key not in _known:
            _known[key] = Pages(footer.row_group(group).column(leaf), footer.schema.column(leaf))
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


class Pages:
    """The data pages of one column chunk at which a row begins, looked up as far as they are asked for.

    Several threads may read.
    """

    def __init__(self, chunk: pq.ColumnChunkMetaData, column: pq.ColumnSchema):
        self.begin = chunk.data_page_offset
        if chunk.has_dictionary_page and 0 < (chunk.dictionary_page_offset or 0) < self.begin:
            self.begin = chunk.dictionary_page_offset
        self._end = self.begin + chunk.total_compressed_size
        self._codec, self._depth = chunk.compression, column.max_repetition_level
        self._most_bytes, self._left = chunk.total_uncompressed_size, chunk.num_values
        self._offsets: list[int] = []
        self._rows: list[int] = []  # that each page begins with
        self._coded: list[bool] = []  # whether the dictionary is needed from there to the next
        self._at, self._row, self._first = self.begin, 0, self.begin
        self._lock = Lock()

    @property
    def nbytes(self) -> int:
        """About what this takes in memory."""
        return 500 + 80 * len(self._rows)

    def read(self, read_at: ReadAt, first: int, last: int, ahead: int = 0) -> tuple[bytes, int]:
        """(the dictionary, then the pages that hold rows [first, last); the row that they begin with).

        Args:
            ahead: bytes that are read at a time while pages are looked up.

        Raises:
            ValueError, pa.ArrowException: bytes that are no pages, or none that hold these rows.
        """
        look = Ahead(read_at, ahead) if ahead else read_at
        with self._lock:
            while self._left > 0 and self._at < self._end and not (self._rows and self._rows[-1] >= last):
                self._walk(look)
            if self._left and self._at == self._end:
                raise ValueError("the pages end before the column")
            start, stop = bisect_right(self._rows, first) - 1, bisect_left(self._rows, last)
            if start < 0:
                raise ValueError(f"no page holds row {first:,}")
            begin, end = self._offsets[start], self._offsets[stop] if stop < len(self._rows) else self._end
            coded, row = any(self._coded[start:stop]), self._rows[start]
        data = read_at(begin, end - begin)
        if coded:
            data = read_at(self.begin, self._first - self.begin) + data
        return data, row

    def _walk(self, read_at: ReadAt) -> None:
        """Takes one more page."""
        header, size = self._header(read_at)
        kind, body = header[TYPE], header[COMPRESSED]
        if not 0 <= body <= self._end - self._at - size:
            raise ValueError(f"a page of {body} bytes")
        if kind in (DATA, DATA_V2):
            about = header[DATA_HEADER if kind == DATA else DATA_HEADER_V2]
            values, rows, begins_row = about[VALUES], about[VALUES], True
            if not 0 <= values <= self._left:
                raise ValueError(f"a page of {values} values")
            if self._depth:
                rows, begins_row = self._count(read_at, self._at + size, header, values)
            if begins_row:
                self._first = self._offsets[0] if self._offsets else self._at
                self._offsets.append(self._at)
                self._rows.append(self._row)
                self._coded.append(False)
            self._coded[-1] |= about[ENCODING if kind == DATA else V2_ENCODING] in DICTIONARY_CODED
            self._row, self._left = self._row + rows, self._left - values
        self._at += size + body

    def _header(self, read_at: ReadAt) -> tuple[dict[int, Any], int]:
        """(fields of the next page's header, its bytes)."""
        size, room = 128, min(HEADER_BYTES, self._end - self._at)
        while True:
            try:
                return read_struct(read_at(self._at, min(size, room)))
            except Truncated:
                if size >= room:
                    raise
                size *= 16

    def _count(self, read_at: ReadAt, at: int, header: dict[int, Any], values: int) -> tuple[int, bool]:
        """(rows that begin in a page of lists, whether one begins with the page)."""
        if header[TYPE] == DATA_V2:  # not its number of rows, which Arrow has long written as that of values
            packed = read_at(at, max(0, min(header[DATA_HEADER_V2][V2_LEVELS_BYTES], header[COMPRESSED])))
        else:
            packed = self._unpacked(read_at(at, header[COMPRESSED]), header)
        levels = unpack_levels(packed, self._depth.bit_length(), values)
        return int((levels == 0).sum()), bool(len(levels)) and levels[0] == 0

    def _unpacked(self, body: bytes, header: dict[int, Any]) -> bytes:
        """The levels of a page of version 1, which are compressed with its values."""
        if header[DATA_HEADER][LEVELS_ENCODING] != RLE:
            raise ValueError("levels in an encoding of long ago")
        if self._codec != "UNCOMPRESSED":
            if not 0 <= header[UNCOMPRESSED] <= self._most_bytes:
                raise ValueError(f"a page of {header[UNCOMPRESSED]} bytes")
            try:
                body = pa.decompress(body, header[UNCOMPRESSED], self._codec.lower(), asbytes=True)
            except OSError as error:
                raise ValueError(str(error)) from None
        return body[4 : 4 + int.from_bytes(body[:4], "little")]


class Ahead:
    """Reads at least `size` bytes at a time: what is asked for next is there already."""

    def __init__(self, read_at: ReadAt, size: int):
        self._read_at, self._size = read_at, size
        self._begin, self._data = 0, b""

    def __call__(self, at: int, size: int) -> bytes:
        if not self._begin <= at <= at + size <= self._begin + len(self._data):
            self._begin, self._data = at, self._read_at(at, max(size, self._size))
        return self._data[at - self._begin : at - self._begin + size]


def unpack_levels(data: bytes, width: int, count: int) -> np.ndarray:
    """Levels of `width` bits (1 to 8) out of Parquet's mix of runs and packed groups: uint8 [count].

    Raises:
        ValueError: there are fewer.
    """
    parts: list[np.ndarray] = []
    packed, levels = bytearray(), 0  # of groups that follow one another: their bytes, and how many levels
    at, left = 0, count
    while left > 0:
        head = shift = 0
        byte = 128
        while byte > 127:
            byte, at = data[at] if at < len(data) else 0, at + 1  # 0: a run of nothing
            head, shift = head | (byte & 127) << shift, shift + 7
        if head & 1:  # groups of eight levels
            size = (head >> 1) * width
            groups = data[at : at + size]
            found = min(8 * len(groups) // width, left)
            packed += groups
            levels += found
        else:  # one level many times
            size = 1
            found = min(head >> 1, left) if at < len(data) else 0
            parts += [_unpack(packed, width, levels), np.full(found, data[at] if found else 0, np.uint8)]
            packed, levels = bytearray(), 0
        if not found:
            raise ValueError("a page's levels end too soon")
        at, left = at + size, left - found
    return np.concatenate([*parts, _unpack(packed, width, levels)])


def _unpack(packed: bytearray, width: int, count: int) -> np.ndarray:
    """The first levels of `width` bits: uint8 [count]."""
    bits = np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little")
    if width == 1:
        return bits[:count]
    each = bits[: count * width].reshape(-1, width)
    return np.packbits(each, axis=1, bitorder="little").reshape(-1)


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
