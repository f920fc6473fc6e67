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
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from raytrec.data.thrift import Truncated, read_struct

Version = tuple[str, int, int | None]  # of a file: path, size, time of its last change
ReadAt = Callable[[int, int], bytes]  # (offset, size) → bytes, fewer only at the end of the file
HEADER_BYTES = 1 << 20  # more than any page's header takes
DATA, DATA_V2 = 0, 3  # PageType of parquet.thrift
TYPE, UNCOMPRESSED, COMPRESSED, CRC, DATA_HEADER, DATA_HEADER_V2 = 1, 2, 3, 4, 5, 8  # fields of PageHeader
DATA_HEADERS = {DATA: DATA_HEADER, DATA_V2: DATA_HEADER_V2}
VALUES, ENCODING, LEVELS_ENCODING = 1, 2, 4  # fields of DataPageHeader, of which V2 has the first
V2_ENCODING, V2_LEVELS_BYTES = 4, 6  # fields of DataPageHeaderV2
RLE, DICTIONARY_CODED = 3, (2, 8)  # of Encoding; PLAIN_DICTIONARY and RLE_DICTIONARY
# What comes of bytes that are not as expected. Errors of the storage are others: those are tried again.
ODD = (ValueError, LookupError, TypeError, OverflowError, pa.ArrowException)

UNCOUNTED_BYTES = 100  # of a dictionary's header, which Java's first writers left out of the size of chunks
STREAMED_BYTES = 64 << 10  # that pyarrow reads at a time
AHEAD_BYTES = 4 << 20  # that a search for pages reads of an object store at a time
BATCH_ROWS = 65_536  # that are decoded at a time where rows before the wanted ones have to be
KNOWN_BYTES = 16 << 20  # that a process keeps of where pages are

_known: dict[tuple[Version, int, int], Pages] = {}  # (file, row group, leaf column) → its pages
_lock = Lock()


class Damaged(Exception):
    """Pages that contradict the footer: they would give other rows than were written."""


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
        Damaged, ValueError, KeyError, OSError, pa.ArrowException: the file is damaged, or the storage fails.
    """
    footer, whole = reader.metadata, set(reader.schema_arrow.names)
    leaves = _leaves(footer)
    # Leaves of structs have pages of their own, with other rows in each.
    single = {name: leaves[name][0] for name in names if name in whole and len(leaves[name]) == 1}
    looked_up = [leaf for name in names for leaf in leaves[name]]
    pieces = _fetch(file, version, footer, group, first, last, looked_up, set(single.values()))
    paged = {name: leaf for name, leaf in single.items() if leaf in pieces}
    try:
        tables = _read_pages(pieces, version, footer, group, first, last, paged)
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


def _read_pages(
    pieces: dict[int, Piece],
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
        One of ODD: the pages are not as expected.
    """
    by_skip = defaultdict(list)
    for name, leaf in columns.items():
        by_skip[first - pieces[leaf].row].append(name)
    rows = min(last, footer.row_group(group).num_rows) - first
    data = {piece.begin: piece.data for piece in pieces.values()}
    try:
        with pa.PythonFile(Excerpts(data, version[1]), mode="r") as excerpts:
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


class Piece(NamedTuple):
    """What is read of a column chunk."""

    begin: int  # of the chunk in the file
    data: bytes
    row: int  # that the pages begin with


def _fetch(
    file: pa.NativeFile,
    version: Version,
    footer: pq.FileMetaData,
    group: int,
    first: int,
    last: int,
    leaves: list[int],
    wanted: set[int],
) -> dict[int, Piece]:
    """Leaf column → the pages with rows [first, last), of those wanted whose pages are understood.

    Args:
        leaves: whose pages are looked up.

    Raises:
        Damaged: the pages of one contradict the footer. OSError: the storage fails.
    """
    remote = "://" in version[0]

    def read_at(at: int, size: int) -> bytes:
        return file.read_at(size, at)

    def fetch(leaf: int) -> Piece | None:
        pages = _pages(version, footer, group, leaf)
        try:
            pages.look_up(Ahead(read_at, AHEAD_BYTES) if remote else read_at)
            return Piece(pages.begin, *pages.read(read_at, first, last)) if leaf in wanted else None
        except ODD:
            return None

    if remote:  # as pyarrow does by itself where it reads whole row groups
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(fetch, leaves))
    else:
        found = list(map(fetch, leaves))
    _forget()
    return {leaf: piece for leaf, piece in zip(leaves, found, strict=True) if piece}


def _pages(version: Version, footer: pq.FileMetaData, group: int, leaf: int) -> Pages:
    key = version, group, leaf
    with _lock:
        if key not in _known:
            about = footer.row_group(group)
            _known[key] = Pages(about.column(leaf), footer.schema.column(leaf), about.num_rows)
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
    """The data pages of one column chunk at which a row begins, all looked up when rows are first read.

    Damage to one page would shift the rows of all later pages. So pages must add up to the footer's rows and
    values, and those whose levels are counted must have their checksums. Several threads may read.
    """

    def __init__(self, chunk: pq.ColumnChunkMetaData, column: pq.ColumnSchema, rows: int):
        self.begin = chunk.data_page_offset
        if chunk.has_dictionary_page and 0 < (chunk.dictionary_page_offset or 0) < self.begin:
            self.begin = chunk.dictionary_page_offset
        self._end = self.begin + chunk.total_compressed_size
        self._codec, self._depth = chunk.compression, column.max_repetition_level
        self._most_bytes, self._left = chunk.total_uncompressed_size, chunk.num_values
        self._all_rows, self._name = rows, chunk.path_in_schema
        self._offsets: list[int] = []
        self._rows: list[int] = []  # that each page begins with
        self._coded: list[bool] = []  # whether the dictionary is needed from there to the next
        self._at, self._row, self._first = self.begin, 0, self.begin
        self._lock = Lock()

    @property
    def nbytes(self) -> int:
        """About what this takes in memory."""
        return 500 + 80 * len(self._rows)

    def look_up(self, read_at: ReadAt) -> None:
        """Finds the pages, and what rows they hold.

        Raises:
            Damaged: they contradict the footer. One of ODD: they are not understood.
        """
        with self._lock:
            while self._left > 0 and self._at < self._end:
                self._walk(read_at)
        if self._left or self._row != self._all_rows:
            raise Damaged(
                f"the pages of column {self._name} hold {self._row:,} rows, the footer has {self._all_rows:,}"
            )

    def read(self, read_at: ReadAt, first: int, last: int) -> tuple[bytes, int]:
        """(the dictionary, then the pages that hold rows [first, last); the row that they begin with). Pages
        must have been looked up.

        Raises:
            ValueError: none hold these rows.
        """
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
        room = self._end - self._at - size
        if not 0 <= body <= room + UNCOUNTED_BYTES:  # pyarrow would take memory for it
            raise Damaged(f"a page of column {self._name} has {body:,} bytes, of {room:,}")
        if body > room:
            raise ValueError("the column chunk ends within a page")
        if about := header.get(DATA_HEADERS.get(kind, 0)):
            values, rows, begins_row = about[VALUES], about[VALUES], True
            if not 0 <= values <= self._left:
                raise Damaged(f"a page of column {self._name} has {values:,} values, of {self._left:,}")
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
            except ValueError as error:  # pyarrow may take it for another page
                raise Damaged(f"a page of column {self._name} has no valid header: {error}") from None

    def _count(self, read_at: ReadAt, at: int, header: dict[int, Any], values: int) -> tuple[int, bool]:
        """(rows that begin in a page of lists, whether one begins with the page)."""
        body = read_at(at, header[COMPRESSED])
        if CRC in header and crc32(body) != header[CRC] % (1 << 32):
            raise ValueError("a page's checksum is wrong")
        if header[TYPE] == DATA_V2:  # not its number of rows, which Arrow has long written as that of values
            packed = body[: max(0, header[DATA_HEADER_V2][V2_LEVELS_BYTES])]
        else:
            packed = self._unpacked(body, header)
        return count_rows(packed, self._depth.bit_length(), values)

    def _unpacked(self, body: bytes, header: dict[int, Any]) -> bytes:
        """The levels of a page of version 1, which are compressed with its values."""
        if header[DATA_HEADER][LEVELS_ENCODING] != RLE:
            raise ValueError("levels in an encoding of long ago")
        if self._codec != "UNCOMPRESSED":
            if not 0 <= header[UNCOMPRESSED] <= self._most_bytes:
                raise ValueError(f"a page of {header[UNCOMPRESSED]} bytes")
            try:
                codec = self._codec.lower().replace("lz4", "lz4_raw")  # or Hadoop's: an error here
                body = pa.decompress(body, header[UNCOMPRESSED], codec, asbytes=True)
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


def count_rows(data: bytes, width: int, count: int) -> tuple[int, bool]:
    """(rows that begin among repetition levels, which are those of 0; whether the first is one), of levels of
    `width` bits (1 to 8) in Parquet's mix of runs and packed groups.

    Raises:
        ValueError: there are fewer than `count`.
    """
    packed, levels = bytearray(), 0  # the groups' bytes, and how many levels; only the last may be cut
    rows, begins_row = 0, False
    at, left = 0, count
    while left > 0:
        head = shift = 0
        byte = 128
        while byte > 127:
            byte, at = data[at] if at < len(data) else 0, at + 1  # 0: a run of nothing
            head, shift = head | (byte & 127) << shift, shift + 7
        level = data[at] if at < len(data) else 0
        if head & 1:  # groups of eight levels
            size = (head >> 1) * width
            groups = data[at : at + size]
            found = min(8 * len(groups) // width, left)
            packed += groups
            levels += found
            level &= (1 << width) - 1
        else:  # one level many times
            size = 1
            found = min(head >> 1, left) if at < len(data) else 0
            rows += 0 if level else found
        if not found:
            raise ValueError("a page's levels end too soon")
        if left == count:
            begins_row = level == 0
        at, left = at + size, left - found
    return rows + int((_unpack(packed, width, levels) == 0).sum()), begins_row


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
