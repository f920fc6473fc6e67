"""Read lines of Criteo's TSV files as Arrow tables.

A line contains a label, 13 integers and 26 hexadecimal values. The files have no header.
"""

from __future__ import annotations

import binascii
import gzip
import io
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as csv

from raytrec.common.errors import DataError
from raytrec.common.formatting import format_count

DENSE = [f"I{i}" for i in range(1, 14)]
SPARSE = [f"C{i}" for i in range(1, 27)]
COLUMNS = ["label", *DENSE, *SPARSE]
TYPES = {"label": pa.int8(), **dict.fromkeys(DENSE, pa.int64()), **dict.fromkeys(SPARSE, pa.string())}
CHUNK_BYTES = 64 << 20
INTEGER, HEX = rb"(?:-?\d{1,18})?", rb"(?:[0-9a-fA-F]{1,8})?"  # both may be empty
LINE = re.compile(rb"[01](?:\t%b){13}(?:\t%b){26}" % (INTEGER, HEX))


@dataclass(frozen=True)
class Chunk:
    """Lines that begin in bytes [start, stop) of a file.

    Attributes:
        path: Path of the file.
        start: Offset of the first byte.
        stop: Offset after the last byte; None: the end of the file (compressed files).
    """

    path: str
    start: int
    stop: int | None


def chunks(path: Path) -> list[Chunk]:
    """Return the chunks of a file: 64 MiB each, or a single chunk for a .gz file, which is read as a stream."""
    if path.suffix == ".gz":
        return [Chunk(str(path), 0, None)]
    size = path.stat().st_size
    return [Chunk(str(path), at, min(at + CHUNK_BYTES, size)) for at in range(0, size, CHUNK_BYTES)]


def read(chunk: Chunk, skip_bad: bool) -> Iterator[tuple[pa.Table, int]]:
    """Yield tables of parsed lines, each with the number of malformed lines that were skipped.

    Raises:
        DataError: A compressed file is damaged; or a line is malformed and `skip_bad` is False, in which case the error
            names the file and the line and quotes its beginning.
    """
    line_offset = 0  # number of lines in earlier blocks of a stream
    for block in _blocks(chunk):
        yield _parse(block, chunk, skip_bad, line_offset)
        if chunk.stop is None:
            line_offset += block.count(b"\n")


def _blocks(chunk: Chunk) -> Iterator[bytes]:
    """Yield whole lines, about CHUNK_BYTES at a time."""
    if chunk.stop is None:
        try:
            with gzip.open(chunk.path) as file:
                while block := file.read(CHUNK_BYTES):
                    yield block + file.readline()
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(f"cannot decompress the file: {error}", where=chunk.path, do="download it again") from None
        return
    with open(chunk.path, "rb") as file:
        start = chunk.start
        if start:  # a line that begins before this chunk belongs to the previous chunk
            file.seek(start - 1)
            start += len(file.readline()) - 1
        if start < chunk.stop:
            block = file.read(chunk.stop - start)
            yield block + (b"" if block.endswith(b"\n") else file.readline())


def _parse(block: bytes, chunk: Chunk, skip_bad: bool, line_offset: int) -> tuple[pa.Table, int]:
    try:
        table = _arrow(block)
        if _well_formed(table):
            return table, 0
    except pa.ArrowInvalid:  # a wrong number of fields, or a field that is not a number
        pass
    return _line_by_line(block, chunk, skip_bad, line_offset)


def _arrow(block: bytes) -> pa.Table:
    return csv.read_csv(
        io.BytesIO(block),
        csv.ReadOptions(column_names=COLUMNS, use_threads=False, block_size=max(len(block), 1)),
        csv.ParseOptions(delimiter="\t", quote_char=False),
        csv.ConvertOptions(column_types=TYPES, null_values=[""], strings_can_be_null=True),
    )


def _well_formed(table: pa.Table) -> bool:
    """Return True if each label is 0 or 1, and each value is missing or has 1 to 8 hexadecimal digits."""
    good = pc.all(pc.fill_null(pc.is_in(table["label"], pa.array([0, 1], pa.int8())), False)).as_py()
    return good is not False and all(
        pc.all(pc.match_substring_regex(table[name], "^[0-9a-fA-F]{1,8}$")).as_py() is not False for name in SPARSE
    )


def _line_by_line(block: bytes, chunk: Chunk, skip_bad: bool, line_offset: int) -> tuple[pa.Table, int]:
    """Parse a block line by line, and raise DataError for a malformed line, or skip it if `skip_bad` is set."""
    good, bad = [], 0
    for number, line in enumerate(block.splitlines(), 1):
        if LINE.fullmatch(line):
            good.append(line)
        elif line and not skip_bad:
            at = line_offset + number + _lines_before(chunk)
            raise DataError(
                _problem(line),
                where=f"{chunk.path}, line {at}: {line[:60].decode('latin-1')!r}",
                expected="a label (0 or 1), then 13 integers and 26 hexadecimal values of up to 8 digits (or empty), "
                "separated by tabs",
                do="correct the line, or skip such lines with --on-bad-line skip",
            )
        elif line:  # empty lines are ignored, as in Arrow
            bad += 1
    return _arrow(b"\n".join(good) + b"\n") if good else pa.schema(TYPES).empty_table(), bad


def _problem(line: bytes) -> str:
    """Return the reason why a line does not match LINE."""
    fields = line.split(b"\t")
    if len(fields) != len(COLUMNS):
        return f"the line has {format_count(len(fields), 'field')}"
    patterns = [b"[01]", *[INTEGER] * len(DENSE), *[HEX] * len(SPARSE)]
    wrong = next(i for i, (p, field) in enumerate(zip(patterns, fields, strict=True)) if not re.fullmatch(p, field))
    name = "the label" if wrong == 0 else COLUMNS[wrong]
    return f"{name} is {fields[wrong].decode('latin-1')!r}"


def _lines_before(chunk: Chunk) -> int:
    """Return the number of lines that begin before a chunk.

    The function reads the file, and must therefore be called only for an error.
    """
    count = 0
    if chunk.start:
        with open(chunk.path, "rb") as file:
            remaining = chunk.start
            while remaining and (block := file.read(min(remaining, 1 << 24))):
                count += block.count(b"\n")
                remaining -= len(block)
            if block[-1:] != b"\n":
                count += 1  # a line that crosses the start of the chunk belongs to the previous chunk
    return count


def hex_values(column: pa.ChunkedArray) -> np.ndarray:
    """Return the values of hexadecimal texts of 1 to 8 digits, int64 [n]; -1 for nulls."""
    missing = column.is_null().to_numpy()
    padded = pc.utf8_lpad(column.fill_null(""), 8, "0").combine_chunks()
    digits = padded.buffers()[2]
    if digits is None or not len(padded):
        return np.zeros(0, np.int64)
    start = 8 * padded.offset
    values = np.frombuffer(binascii.unhexlify(digits[start : start + 8 * len(padded)]), ">u4")
    return np.where(missing, -1, values.astype(np.int64))
