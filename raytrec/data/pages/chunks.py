"""The pages of a column chunk, their headers (Thrift's compact protocol) and their rows. No torch here."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from struct import unpack_from
from threading import Lock
from typing import Any
from zlib import crc32

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

ReadAt = Callable[[int, int], bytes]  # (offset, size) → bytes, fewer only at the end of the file
HEADER_BYTES = 1 << 20  # more than any page's header takes
DATA, DATA_V2 = 0, 3  # PageType of parquet.thrift
TYPE, UNCOMPRESSED, COMPRESSED, CRC, DATA_HEADER, DATA_HEADER_V2 = 1, 2, 3, 4, 5, 8  # fields of PageHeader
DATA_HEADERS = {DATA: DATA_HEADER, DATA_V2: DATA_HEADER_V2}
VALUES, ENCODING, LEVELS_ENCODING = 1, 2, 4  # fields of DataPageHeader, of which V2 has the first
V2_ENCODING, V2_LEVELS_BYTES = 4, 6  # fields of DataPageHeaderV2
RLE, DICTIONARY_CODED = 3, (2, 8)  # of Encoding; PLAIN_DICTIONARY and RLE_DICTIONARY
UNCOUNTED_BYTES = 100  # of a dictionary's header, which Java's first writers left out of the size of chunks


class Damaged(Exception):
    """Pages that contradict the footer: they would give other rows than were written."""


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
            Damaged: they contradict the footer. One of pages.ODD: they are not understood.
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


DEEPEST = 16  # structs within one another; Parquet's own are at most 8 deep
TRUE, FALSE, BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, SET, MAP, STRUCT = range(1, 13)


class Truncated(ValueError):
    """The bytes end within a value."""


def read_struct(data: bytes, at: int = 0, depth: int = 0) -> tuple[dict[int, Any], int]:
    """(field id → value of the struct that begins at byte `at`, the byte after it).

    Raises:
        Truncated: the bytes end before the struct. ValueError: they are not a struct.
    """
    if depth > DEEPEST:
        raise ValueError("structs too deep for a header of Parquet")
    fields: dict[int, Any] = {}
    last = 0
    try:
        while True:
            head, at = data[at], at + 1
            if head == 0:
                return fields, at
            if head >> 4:
                last += head >> 4
            else:
                last, at = _integer(data, at)
            kind = head & 15
            fields[last], at = (kind == TRUE, at) if kind in (TRUE, FALSE) else _value(data, at, kind, depth)
    except IndexError:
        raise Truncated("the bytes end within a header") from None


def _value(data: bytes, at: int, kind: int, depth: int) -> tuple[Any, int]:
    if kind in (I16, I32, I64):
        return _integer(data, at)
    if kind == STRUCT:
        return read_struct(data, at, depth + 1)
    if kind == BINARY:
        size, at = _varint(data, at)
        if at + size > len(data):
            raise IndexError
        return data[at : at + size], at + size
    if kind in (LIST, SET):
        return _list(data, at, depth)
    if kind in (BYTE, TRUE, FALSE):  # in a list, a truth value is a byte
        return data[at], at + 1
    if kind == DOUBLE:
        if at + 8 > len(data):
            raise IndexError
        return unpack_from("<d", data, at)[0], at + 8
    raise ValueError(f"type {kind} in a header of Parquet")


def _list(data: bytes, at: int, depth: int) -> tuple[list, int]:
    head, at = data[at], at + 1
    size = head >> 4
    if size == 15:
        size, at = _varint(data, at)
    values = []
    for _ in range(size):  # each takes at least a byte, so a wrong size ends with the bytes
        value, at = _value(data, at, head & 15, depth)
        values.append(value)
    return values, at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte, at = data[at], at + 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number too long for a header of Parquet")


def _integer(data: bytes, at: int) -> tuple[int, int]:
    """A number, zigzag."""
    value, at = _varint(data, at)
    return (value >> 1) ^ -(value & 1), at
