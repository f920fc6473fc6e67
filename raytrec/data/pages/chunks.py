"""Find pages of column chunks, parse their headers (Thrift compact protocol), and count rows. Does not import torch."""

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

from raytrec.common.formatting import format_count

ReadAt = Callable[[int, int], bytes]  # (offset, size) → bytes; fewer than `size` only at the end of the file
MAX_HEADER_BYTES = 1 << 20  # maximum size of a page header
DATA, DATA_PAGE_V2 = 0, 3  # PageType of parquet.thrift
TYPE, UNCOMPRESSED, COMPRESSED, CRC, DATA_HEADER, DATA_HEADER_V2 = 1, 2, 3, 4, 5, 8  # field ids of PageHeader
DATA_HEADERS = {DATA: DATA_HEADER, DATA_PAGE_V2: DATA_HEADER_V2}
VALUES, ENCODING, LEVELS_ENCODING = 1, 2, 4  # field ids of DataPageHeader; VALUES is the same in DataPageHeaderV2
V2_ENCODING, V2_LEVELS_BYTES = 4, 6  # field ids of DataPageHeaderV2
RLE, DICTIONARY_ENCODINGS = 3, (2, 8)  # values of Encoding; (PLAIN_DICTIONARY, RLE_DICTIONARY)
MAX_UNCOUNTED_BYTES = 100  # size of a dictionary page's header, which early Java writers left out of a chunk's size


class DamagedPageError(Exception):
    """Error for pages that contradict the file's footer, so that decoding could return wrong rows."""


class PageIndex:
    """Positions of those data pages of a column chunk that start with a new row.

    Damage to one page would shift the rows of all later pages. Therefore, the pages' numbers of rows and values must
    add up to the numbers in the footer: `rows` of the row group, and values of `chunk`. If a page of lists has a
    checksum, the checksum must be correct. The class is thread-safe.

    Attributes:
        begin: Offset of the column chunk in the file.
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
        self._rows: list[int] = []  # first row of each page
        self._coded: list[bool] = []  # True if pages from this entry up to the next one use the dictionary
        self._at, self._row = self.begin, 0
        self._lock = Lock()

    @property
    def nbytes(self) -> int:
        """Return the approximate memory use of the index in bytes."""
        return 500 + 80 * len(self._rows)

    def look_up(self, read_at: ReadAt) -> None:
        """Find all pages and their first rows, unless an earlier call has found them.

        Raises:
            DamagedPageError: The pages contradict the footer.
            One of pages.DECODING_ERRORS: The pages have an unexpected format.
            OSError: The storage fails.
        """
        with self._lock:
            while self._left > 0 and self._at < self._end:
                self._advance_page(read_at)
        if self._left and self._row == self._all_rows:
            missing = format_count(self._left, "value")
            raise DamagedPageError(f"the pages of column {self._name} contain {missing} fewer than the footer claims")
        if self._left or self._row != self._all_rows:
            raise DamagedPageError(
                f"the pages of column {self._name} contain {self._row:,} rows, but the footer claims {self._all_rows:,}"
            )

    def read(self, read_at: ReadAt, first: int, last: int) -> tuple[bytes, int]:
        """Read the pages that contain rows [first, last), after a call to `look_up`.

        Returns:
            Bytes of the dictionary page (if needed) and of the data pages; index of their first row in the row group.

        Raises:
            ValueError: No page contains the first row.
        """
        start, stop = bisect_right(self._rows, first) - 1, bisect_left(self._rows, last)
        if start < 0:
            raise ValueError(f"no page contains row {first:,}")
        begin, end = self._offsets[start], self._offsets[stop] if stop < len(self._rows) else self._end
        coded, row = any(self._coded[start:stop]), self._rows[start]
        data = read_at(begin, end - begin)
        if coded:
            data = read_at(self.begin, self._offsets[0] - self.begin) + data
        return data, row

    def _advance_page(self, read_at: ReadAt) -> None:
        """Advance to the end of the next page; record the page if it is a data page that starts with a new row."""
        header, size = self._header(read_at)
        kind, body = header[TYPE], header[COMPRESSED]
        room = self._end - self._at - size
        if not 0 <= body <= room + MAX_UNCOUNTED_BYTES:  # pyarrow would allocate memory of the claimed size
            raise DamagedPageError(f"a page of column {self._name} claims {body:,} bytes, but only {room:,} remain")
        if body > room:
            raise ValueError("the column chunk ends within a page")
        if fields := header.get(DATA_HEADERS.get(kind, 0)):
            values, rows, begins_row = fields[VALUES], fields[VALUES], True
            if not 0 <= values <= self._left:
                raise DamagedPageError(
                    f"a page of column {self._name} claims {values:,} values, but only {self._left:,} remain"
                )
            if self._depth:
                rows, begins_row = self._count_page_rows(read_at, self._at + size, header, values)
            if begins_row:
                self._offsets.append(self._at)
                self._rows.append(self._row)
                self._coded.append(False)
            self._coded[-1] |= fields[ENCODING if kind == DATA else V2_ENCODING] in DICTIONARY_ENCODINGS
            self._row, self._left = self._row + rows, self._left - values
        self._at += size + body

    def _header(self, read_at: ReadAt) -> tuple[dict[int, Any], int]:
        """Return the header of the next page: (field id → value, size of the header in bytes)."""
        size, room = 128, min(MAX_HEADER_BYTES, self._end - self._at)
        while True:
            try:
                return read_struct(read_at(self._at, min(size, room)))
            except TruncatedDataError:
                if size >= room:
                    raise
                size *= 16
            except ValueError as error:  # pyarrow could misread the header as another page
                raise DamagedPageError(f"a page of column {self._name} has no valid header: {error}") from None

    def _count_page_rows(self, read_at: ReadAt, at: int, header: dict[int, Any], values: int) -> tuple[int, bool]:
        """Return (number of rows that begin in a page of lists, True if the page starts with a new row)."""
        body = read_at(at, header[COMPRESSED])
        if CRC in header and crc32(body) != header[CRC] % (1 << 32):
            raise ValueError("a page's checksum is wrong")
        if header[TYPE] == DATA_PAGE_V2:  # the header's row count is unreliable: Arrow used to write the value count
            packed = body[: max(0, header[DATA_HEADER_V2][V2_LEVELS_BYTES])]
        else:
            packed = self._decompress_levels(body, header)
        return count_rows(packed, self._depth.bit_length(), values)

    def _decompress_levels(self, body: bytes, header: dict[int, Any]) -> bytes:
        """Return the encoded repetition levels of a version-1 data page; a codec compresses them with the values."""
        if header[DATA_HEADER][LEVELS_ENCODING] != RLE:
            raise ValueError("the levels of a page have a deprecated encoding")
        if self._codec != "UNCOMPRESSED":
            if not 0 <= header[UNCOMPRESSED] <= self._most_bytes:
                raise ValueError(f"a page claims an uncompressed size of {header[UNCOMPRESSED]} bytes")
            try:
                codec = self._codec.lower().replace("lz4", "lz4_raw")  # Hadoop's LZ4 framing raises an error
                body = pa.decompress(body, header[UNCOMPRESSED], codec, asbytes=True)
            except OSError as error:
                raise ValueError(str(error)) from None
        return body[4 : 4 + int.from_bytes(body[:4], "little")]


def count_rows(data: bytes, width: int, count: int) -> tuple[int, bool]:
    """Count the rows that begin in the first `count` repetition levels; each level of 0 begins a row.

    Args:
        data: Levels in Parquet's hybrid encoding (run-length and bit-packed).
        width: Number of bits per level, 1 to 8.
        count: Number of levels.

    Returns:
        Number of rows, and True if the first level begins a row.

    Raises:
        ValueError: There are fewer than `count` levels.
    """
    packed, levels = bytearray(), 0  # bytes and number of levels in bit-packed groups; only the last may be truncated
    rows, begins_row = 0, False
    at, remaining = 0, count
    while remaining > 0:
        try:
            head, at = _varint(data, at)
            level = data[at]
        except IndexError:
            raise ValueError("the levels of a page are truncated") from None
        if head & 1:  # groups of eight levels
            size = (head >> 1) * width
            groups = data[at : at + size]
            decoded = min(8 * len(groups) // width, remaining)
            packed += groups
            levels += decoded
            level &= (1 << width) - 1
        else:  # run of one repeated level
            size = 1
            decoded = min(head >> 1, remaining)
            rows += 0 if level else decoded
        if not decoded:
            raise ValueError("the levels of a page are truncated")
        if remaining == count:
            begins_row = level == 0
        at, remaining = at + size, remaining - decoded
    return rows + int((_unpack(packed, width, levels) == 0).sum()), begins_row


def _unpack(packed: bytearray, width: int, count: int) -> np.ndarray:
    """Return the first `count` levels of `width` bits each, uint8 [count]."""
    bits = np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little")
    if width == 1:
        return bits[:count]
    level_bits = bits[: count * width].reshape(-1, width)
    return np.packbits(level_bits, axis=1, bitorder="little").reshape(-1)


MAX_NESTING_DEPTH = 16  # maximum nesting of structs; Parquet's structs are at most 8 deep
TRUE, FALSE, BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, SET, MAP, STRUCT = range(1, 13)


class TruncatedDataError(ValueError):
    """Error for bytes that end within a Thrift value."""


def read_struct(data: bytes, at: int = 0, depth: int = 0) -> tuple[dict[int, Any], int]:
    """Return (field id → value, end position) of the Thrift struct at byte `at`, inside `depth` other structs.

    Raises:
        TruncatedDataError: The bytes end within the struct.
        ValueError: The bytes are not a valid struct.
    """
    if depth > MAX_NESTING_DEPTH:
        raise ValueError("structs are nested too deeply for a Parquet header")
    fields: dict[int, Any] = {}
    key = 0
    try:
        while True:
            head, at = data[at], at + 1
            if head == 0:
                return fields, at
            if head >> 4:
                key += head >> 4
            else:
                key, at = _integer(data, at)
            kind = head & 15
            fields[key], at = (kind == TRUE, at) if kind in (TRUE, FALSE) else _value(data, at, kind, depth)
    except IndexError:
        raise TruncatedDataError("the bytes end within a header") from None


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
    if kind in (BYTE, TRUE, FALSE):  # a boolean in a list takes a byte
        return data[at], at + 1
    if kind == DOUBLE:
        if at + 8 > len(data):
            raise IndexError
        return unpack_from("<d", data, at)[0], at + 8
    raise ValueError(f"type {kind} is not valid in a Parquet header")


def _list(data: bytes, at: int, depth: int) -> tuple[list, int]:
    head, at = data[at], at + 1
    size = head >> 4
    if size == 15:
        size, at = _varint(data, at)
    values = []
    for _ in range(size):  # each value takes at least one byte, so a wrong size raises IndexError
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
            raise ValueError("a number is too long for a Parquet header")


def _integer(data: bytes, at: int) -> tuple[int, int]:
    """Return (value of the zigzag-encoded integer at byte `at`, end position)."""
    value, at = _varint(data, at)
    return (value >> 1) ^ -(value & 1), at
