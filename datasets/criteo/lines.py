"""Criteo's TSV lines → Arrow: label, 13 integers, 26 hexadecimal values, no header."""

from __future__ import annotations

import gzip
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as csv

from raytrec.errors import DataError

DENSE = [f"I{i}" for i in range(1, 14)]
SPARSE = [f"C{i}" for i in range(1, 27)]
COLUMNS = ["label", *DENSE, *SPARSE]
TYPES = {"label": pa.int8(), **dict.fromkeys(DENSE, pa.int64()), **dict.fromkeys(SPARSE, pa.string())}
CHUNK_BYTES = 64 << 20


@dataclass(frozen=True)
class Chunk:
    """Lines that begin in bytes [start, stop) of a file; stop None: to the end (compressed files)."""

    path: str
    start: int
    stop: int | None


def chunks(path: Path) -> list[Chunk]:
    """A plain file in chunks of 64 MiB; a .gz file as one, read as a stream."""
    if path.suffix == ".gz":
        return [Chunk(str(path), 0, None)]
    size = path.stat().st_size
    return [Chunk(str(path), at, min(at + CHUNK_BYTES, size)) for at in range(0, size, CHUNK_BYTES)]


def read(chunk: Chunk, skip_bad: bool) -> Iterator[tuple[pa.Table, int]]:
    """Tables of parsed lines, with the number of malformed lines that were skipped in each.

    Raises:
        DataError: a malformed line, unless skip_bad; names file, line and its beginning.
    """
    before = 0  # lines of a stream's earlier blocks
    for block in _blocks(chunk):
        yield _parse(block, chunk, skip_bad, before)
        if chunk.stop is None:
            before += block.count(b"\n")


def _blocks(chunk: Chunk) -> Iterator[bytes]:
    """Whole lines, about CHUNK_BYTES at a time."""
    if chunk.stop is None:
        with gzip.open(chunk.path) as file:
            while block := file.read(CHUNK_BYTES):
                yield block + file.readline()
        return
    with open(chunk.path, "rb") as file:
        start = chunk.start
        if start:  # a line that begins before this chunk belongs to the one before
            file.seek(start - 1)
            start += len(file.readline()) - 1
        if start < chunk.stop:
            block = file.read(chunk.stop - start)
            yield block + (b"" if block.endswith(b"\n") else file.readline())


def _parse(block: bytes, chunk: Chunk, skip_bad: bool, before: int) -> tuple[pa.Table, int]:
    skipped = []

    def invalid(row) -> str:
        skipped.append(row)
        return "skip" if skip_bad else "error"

    try:
        table = csv.read_csv(
            io.BytesIO(block),
            csv.ReadOptions(column_names=COLUMNS, use_threads=False, block_size=max(len(block), 1)),
            csv.ParseOptions(delimiter="\t", quote_char=False, invalid_row_handler=invalid),
            csv.ConvertOptions(column_types=TYPES, null_values=[""], strings_can_be_null=True),
        )
        good = _well_formed(table)
    except pa.ArrowInvalid:  # a field that is no number: find the lines one by one
        good, table = None, None
    if table is not None and good.all() and (skip_bad or not skipped):
        return table, len(skipped)
    if skip_bad and table is not None:
        return table.filter(pa.array(good)), len(skipped) + int((~good).sum())
    return _line_by_line(block, chunk, skip_bad, before)


def _well_formed(table: pa.Table) -> np.ndarray:
    """bool [n]: label 0 or 1, and every value of at most 8 hexadecimal digits."""
    good = pc.fill_null(pc.is_in(table["label"], pa.array([0, 1], pa.int8())), False)
    for name in SPARSE:
        good = pc.and_(good, pc.fill_null(pc.match_substring_regex(table[name], "^[0-9a-fA-F]{1,8}$"), True))
    return good.to_numpy()


def _line_by_line(block: bytes, chunk: Chunk, skip_bad: bool, before: int) -> tuple[pa.Table, int]:
    """The slow way for a block that holds a malformed line: names it, or leaves it out."""
    good, bad = [], 0
    for number, line in enumerate(block.splitlines(), 1):
        problem = _problem(line)
        if problem and not skip_bad:
            at = before + number + _lines_before(chunk)
            raise DataError(
                problem,
                where=f"{chunk.path}, line {at}: {line[:60].decode('latin-1')!r}",
                expected="label (0 or 1), 13 integers and 26 hexadecimal values, divided by tabs",
                do="correct the line, or leave such lines out with --on-bad-line skip",
            )
        if problem:
            bad += 1
        else:
            good.append(line)
    if not good:
        return pa.schema(TYPES).empty_table(), bad
    table, _ = _parse(b"\n".join(good) + b"\n", chunk, True, before)
    return table, bad


def _problem(line: bytes) -> str | None:
    fields = line.rstrip(b"\r").split(b"\t")
    if len(fields) != len(COLUMNS):
        return f"the line has {len(fields)} fields"
    if fields[0] not in (b"0", b"1"):
        return f"the label is {fields[0].decode('latin-1')!r}"
    for name, value in zip(COLUMNS[1:], fields[1:], strict=True):
        try:
            if value:
                int(value, 10 if name in DENSE else 16)
        except ValueError:
            return f"{name} is {value.decode('latin-1')!r}"
        if name in SPARSE and len(value) > 8:
            return f"{name} is {value.decode('latin-1')!r}"
    return None


def _lines_before(chunk: Chunk) -> int:
    """Lines that begin before a chunk; counted only when there is an error to place."""
    count = 0
    if chunk.start:
        with open(chunk.path, "rb") as file:
            left = chunk.start
            while left and (block := file.read(min(left, 1 << 24))):
                count += block.count(b"\n")
                left -= len(block)
            if block[-1:] != b"\n":
                count += 1  # the line that the chunk's start cuts belongs to the chunk before
    return count


def hex_values(column: pa.ChunkedArray) -> np.ndarray:
    """Hexadecimal text as int64 [n]; -1 where it is missing."""
    encoded = column.combine_chunks().dictionary_encode()
    words = np.array([int(word, 16) for word in encoded.dictionary.to_pylist()] + [-1], dtype=np.int64)
    return words[encoded.indices.fill_null(len(words) - 1).to_numpy(zero_copy_only=False)]
