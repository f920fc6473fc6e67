"""Read table rows from a checkpoint without torch or a process group, and resolve the warm starts of tables.

Reading needs memory only for the requested rows and one block of each shard, so tables may be larger than this
machine's memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any

import numpy as np

from raytrec.checkpoint.index import INDEX, CheckpointError
from raytrec.checkpoint.rawfile import Source, StoredChunk, open_data_file, parse_chunks
from raytrec.common.errors import RunError, SchemaError, make_unknown_word_error
from raytrec.common.formatting import format_count
from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema, Table

NUMPY_DTYPES = {"float64": "<f8", "float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}
TENSOR_KEY = "tables/{}/{}"


class StoredTable:
    """Table in a checkpoint that was saved under any sharding plan.

    An instance is a context manager, because it keeps files open.

    Args:
        folder: Folder of the checkpoint, a local path or a URI.
        index: Index of the checkpoint, as returned by `read_index`.
        name: Name of the table.
        kind: "weight", or the name of an optimizer state; state with one value per row has one column.
        checked: True to verify checksums, which requires reading whole blocks; False if the whole table has
            already been verified.

    Attributes:
        rows: Number of rows.
        dim: Number of columns.

    Raises:
        RunError: There is no such table or optimizer state.
        CheckpointError: A file cannot be opened, or the dtype is not supported. Methods that read rows raise it if the
            rows cannot be read or their checksum does not match.
        DataError: As for `open_data_file`.
    """

    def __init__(self, folder: str, index: dict[str, Any], name: str, kind: str = "weight", checked: bool = True):
        entry = index["tensors"].get(TENSOR_KEY.format(name, kind))
        if entry is None:
            names = list_table_names(index)
            raise make_unknown_word_error(f"there is no table '{name}'", name, names, folder, kind=RunError)
        if entry["dtype"] not in NUMPY_DTYPES:
            what, expected = f"cannot read {kind} of table {name} with dtype {entry['dtype']}", ", ".join(NUMPY_DTYPES)
            raise CheckpointError(what, where=folder, expected=f"one of {expected}")
        self._name, self._folder = name, folder
        self.rows, self.dim = _to_rows_and_columns(entry["shape"], 1)
        chunks = parse_chunks(TENSOR_KEY.format(name, kind), entry)
        self._files = ExitStack()
        sources = {file: self._files.enter_context(open_data_file(folder, file)) for file in {c.file for c in chunks}}
        block_bytes = index["block_bytes"] if checked else None
        self._chunks = [_ChunkReader(sources[chunk.file], chunk, block_bytes, folder) for chunk in chunks]

    def __enter__(self) -> StoredTable:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def read(self, first: int, end: int) -> np.ndarray:
        """Return the rows [first, end), which must exist: float32 [end - first, dim]."""
        band = np.empty((end - first, self.dim), np.float32)
        for chunk in self._chunks:
            chunk.into(band, first)
        return band

    def take(self, rows: Sequence[int]) -> np.ndarray:
        """Return the rows with these indices: float32 [len(rows), dim].

        Raises:
            RunError: A row does not exist.
        """
        for row in rows:
            if not 0 <= row < self.rows:
                what = f"table {self._name} has no row {row}"
                expected = f"a row from 0 to {self.rows - 1:,}"
                raise RunError(what, where=self._folder, expected=expected)
        unique, positions = np.unique(np.asarray(rows, np.int64), return_inverse=True)
        return self.gather(unique)[positions]

    def gather(self, rows: np.ndarray) -> np.ndarray:
        """Return rows, given by index, which must exist: int64 [n] → float32 [n, dim].

        Runs of consecutive, increasing indices are read at once.
        """
        values = np.empty((len(rows), self.dim), np.float32)
        ends = np.flatnonzero(np.diff(rows) != 1) + 1
        for first, end in pairwise([0, *ends.tolist(), len(rows)]):
            if first < end:
                values[first:end] = self.read(int(rows[first]), int(rows[end - 1]) + 1)
        return values


def list_table_names(index: dict[str, Any]) -> list[str]:
    """Return the sorted names of the tables in a checkpoint."""
    names = [name for name in index["tensors"] if name.startswith("tables/") and name.endswith("/weight")]
    return sorted(name.removeprefix("tables/").removesuffix("/weight") for name in names)


class _ChunkReader:
    """Reader of a table's shard in a file. The last block is cached, because the next read may start in it.

    Args:
        source: Open file of the chunk.
        chunk: Chunk that contains the shard.
        block_bytes: Size of a block; None: only the rows are read, without verifying checksums.
        folder: Folder of the checkpoint, for errors.
    """

    def __init__(self, source: Source, chunk: StoredChunk, block_bytes: int | None, folder: str):
        self._source, self._chunk, self._folder = source, chunk, folder
        self._dtype, self._block_bytes = np.dtype(NUMPY_DTYPES[chunk.dtype]), block_bytes
        self._first, self._column = _to_rows_and_columns(chunk.offsets, 0)
        self._rows, self._columns = _to_rows_and_columns(chunk.sizes, 1)
        self._number, self._block = -1, memoryview(b"")

    def into(self, band: np.ndarray, first: int) -> None:
        """Copy this shard's rows into a band of rows that starts with row `first` of the table."""
        low, high = max(first, self._first), min(first + len(band), self._first + self._rows)
        if low < high:
            columns = slice(self._column, self._column + self._columns)
            band[low - first : high - first, columns] = self._read(low - self._first, high - self._first)

    def _read(self, low: int, high: int) -> np.ndarray:
        width = self._columns * self._dtype.itemsize
        raw, place = bytearray((high - low) * width), low * width
        filled = 0
        if self._block_bytes is None:
            self._chunk.read(self._source, self._folder, place, memoryview(raw))
            filled = len(raw)
        while filled < len(raw):
            number, within = divmod(place + filled, self._block_bytes)
            if number != self._number:
                block = self._chunk.read_block(self._source, self._folder, number, self._block_bytes)
                self._number, self._block = number, block
            piece = self._block[within : within + len(raw) - filled]
            raw[filled : filled + len(piece)] = piece
            filled += len(piece)
        values = np.frombuffer(raw, self._dtype).reshape(high - low, self._columns)
        return (values.astype("<u4") << 16).view("<f4") if self._chunk.dtype == "bfloat16" else values


def _to_rows_and_columns(numbers: Sequence[int], second: int) -> tuple[int, int]:
    """Return a shape or offset as (rows, columns); the columns of a one-dimensional tensor are `second`."""
    return numbers[0], numbers[1] if len(numbers) > 1 else second


@dataclass(frozen=True)
class TableWarmStart:
    """Resolved rule for initializing one table of a new run from a checkpoint.

    Attributes:
        policy: Name of the policy: exact, resize, new or drop.
        rows: Number of leading rows loaded from the checkpoint; 0 for new and drop.
        note: Line that describes the change to the user; None if the table is loaded unchanged.
    """

    policy: str
    rows: int
    note: str | None


def resolve_warm_starts(config: RunConfig, stored_schema: Schema, schema: Schema) -> dict[str, TableWarmStart]:
    """Return table → its warm start according to warm_start.tables, for each table in the schema or the checkpoint.

    Args:
        config: Configuration of the new run.
        stored_schema: Schema of the checkpoint.
        schema: Schema of the new run.

    Raises:
        SchemaError: A table differs or is missing on one side, and warm_start.tables has no policy that allows this.
    """
    starts = {}
    for table in {**stored_schema.tables, **schema.tables}:
        matching = [policy for key, policy in config.warm_start.tables.items() if fnmatchcase(table, key)]
        policy = matching[-1] if matching else "exact"  # the last matching pattern takes precedence
        starts[table] = _resolve_warm_start(table, stored_schema.tables.get(table), schema.tables.get(table), policy)
    return starts


def _resolve_warm_start(table: str, old: Table | None, new: Table | None, policy: str) -> TableWarmStart:
    old_text, new_text = (_describe_table(side) if side else "missing" for side in (old, new))
    if new is None and policy == "drop":
        return TableWarmStart("drop", 0, f"table {table} ({old_text}) of the checkpoint is dropped")
    if new is not None and policy == "new":
        return TableWarmStart("new", 0, f"table {table} ({new_text}) gets its initial values")
    managed = [t for t in (old, new) if t and t.ids]
    is_same_kind = len(managed) != 1 and (not managed or old.own_rows == new.own_rows)
    if old and new and is_same_kind and (old.rows, old.dim) == (new.rows, new.dim):
        return TableWarmStart("exact", new.rows, None)
    # Hashed ids would get other rows in a table of another size.
    fits = old and new and old.dim == new.dim and old.out_of_range != "hash"
    is_resizable = fits and not managed
    if is_resizable and policy == "resize":
        added = new.rows - old.rows
        dropped = f"is loaded without the checkpoint's last {format_count(-added, 'row')}"
        change = f"gets {format_count(added, 'new row')} with initial values" if added > 0 else dropped
        return TableWarmStart("resize", min(old.rows, new.rows), f"table {table} {change}")
    suggestion = "drop" if new is None else "resize" if is_resizable else "new"
    conversion = "try raytrec convert, " if fits and (new.ids or not old.ids) else ""
    raise SchemaError(
        f"table {table} is {new_text} in the schema, but {old_text} in the checkpoint",
        where="warm_start.from",
        expected="the tables of the checkpoint, or an entry in warm_start.tables for each difference",
        do=f"set warm_start.tables.{table}={suggestion}, {conversion}or set data.schema=CHECKPOINT/{INDEX}",
    )


def _describe_table(table: Table) -> str:
    size = f"{table.rows:,} × {table.dim}"
    if not table.ids:
        return f"{size} with hashed ids" if table.out_of_range == "hash" else size
    return f"{size} with managed ids (fallback rows: {table.ids.fallback_rows:,})"


def parse_stored_schema(about: dict[str, Any]) -> Schema:
    """Parse the schema stored in the `about` of a checkpoint's index; raise SchemaError if it is not valid."""
    return Schema.parse_stored(str(about.get("schema", "")), "the checkpoint's schema")
