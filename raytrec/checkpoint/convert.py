"""Convert tables of a checkpoint to managed ids, hashed ids or another number of rows, for `raytrec convert`.

Tensors are processed block by block in a single process.
"""

from __future__ import annotations

import uuid
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from raytrec.checkpoint.blocks import DTYPES, blocks
from raytrec.checkpoint.index import convert_write_errors, write_index
from raytrec.checkpoint.rawfile import RawFileWriter, Source, make_folder, open_data_file, parse_chunks
from raytrec.checkpoint.restore import read_stored_ids
from raytrec.checkpoint.rows import StoredTable
from raytrec.common.errors import SchemaError
from raytrec.common.formatting import format_count
from raytrec.config.schema import Table
from raytrec.config.schema_parts import ManagedIds
from raytrec.data.ids import hash_bits
from raytrec.embeddings.hashing import compute_initial_values

BAND_BYTES = 4 << 20  # size of the float32 rows that are processed at a time
NOT_NEEDED = "a table that this conversion would change", "omit this option"  # expected and do of an error


@dataclass(frozen=True)
class TableConversion:
    """Conversion of a stored table to new settings.

    Attributes:
        table: New settings of the table.
        note: Line that describes the conversion to the user.
        source: For each row of the new table, its row in the checkpoint, int64 [table.rows]. A row with
            source -1 gets initial values and zero optimizer state. None: all rows are unchanged.
        ids: New tensors of the table's managed ids: name after ids/TABLE/ (restore.py) → int64 [n].
        about: Entry for the table's managed ids in the index; None without managed ids.
    """

    table: Table
    note: str
    source: np.ndarray | None = None
    ids: Mapping[str, np.ndarray] = field(default_factory=dict)
    about: Mapping[str, Any] | None = None


def to_managed(name: str, table: Table) -> TableConversion:
    """Return the conversion to managed ids with default settings, in which ids 0 to rows - 1 keep their rows.

    A fallback row, which ids without their own row share, is added.

    Raises:
        SchemaError: The ids of the table are already managed, or are hashed.
    """
    if table.ids:
        raise _conversion_error(name, "its ids are already managed", *NOT_NEEDED)
    if table.out_of_range == "hash":
        reason = "each row is shared by all ids that were hashed to it, and these ids are not recorded"
        raise _conversion_error(name, reason, "a table whose ids are its row numbers")
    policy, rows = ManagedIds(), table.rows
    ids = np.arange(rows)
    ids = ids[np.argsort(hash_bits(ids.astype(np.uint64)).view(np.int64), kind="stable")]
    id_columns = {"id": ids, "row": ids, "sightings": np.ones_like(ids), "last": np.full_like(ids, -1)}
    return TableConversion(
        Table(rows=rows + policy.fallback_rows, dim=table.dim, ids=policy),
        f"table {name}: ids 0 to {rows - 1:,} keep their rows; one more row is added for ids without a row",
        np.concatenate([np.arange(rows), np.full(policy.fallback_rows, -1)]),
        id_columns,
        {"rows": rows, "waiting": 0, "left": 0, "handed": rows},
    )


def to_hash(name: str, table: Table) -> TableConversion:
    """Return the conversion to hashed ids, in which ids below the number of rows keep their rows.

    All other ids, and ids that are text, are hashed to these rows.

    Raises:
        SchemaError: The ids of the table are managed, or are already hashed.
    """
    if table.ids:
        reason = "the checkpoint does not record whether its ids were text (hashed differently from integers)"
        raise _conversion_error(name, reason, "a table whose ids are its row numbers")
    if table.out_of_range == "hash":
        raise _conversion_error(name, "its ids are already hashed", *NOT_NEEDED)
    return TableConversion(
        table.model_copy(update={"out_of_range": "hash"}),
        f"table {name}: ids 0 to {table.rows - 1:,} keep their rows; all other ids are hashed to these rows",
    )


def resize_table(folder: str, index: Mapping[str, Any], name: str, table: Table, rows: int) -> TableConversion:
    """Return the conversion to a table with a different number of rows.

    Without managed ids, the first rows are kept. With managed ids, all ids are kept if they fit, else the ids
    seen most often.

    Args:
        folder: Folder of the checkpoint.
        index: Index of the checkpoint.
        name: Name of the table.
        table: Settings of the table in the checkpoint.
        rows: New number of rows, at least 1.

    Raises:
        SchemaError: The table has hashed ids, already has this number of rows, or would have only fallback rows.
        CheckpointError: The managed ids cannot be read.
    """
    if table.out_of_range == "hash":
        raise _conversion_error(
            name, "its hashed ids would get different rows in a table of another size", "a table without hashed ids"
        )
    if rows == table.rows:
        raise _conversion_error(name, f"it already has {format_count(rows, 'row')}", *NOT_NEEDED)
    if table.ids and rows <= table.ids.fallback_rows:
        reason = f"with resize:{rows}, all of its rows would be fallback rows"
        expected = f"more rows than the {format_count(table.ids.fallback_rows, 'fallback row')} of the table"
        raise _conversion_error(name, reason, expected, f"pass resize:{table.ids.fallback_rows + 1} or more")
    new = table.model_copy(update={"rows": rows})
    if table.ids:
        return _resize_ids(read_stored_ids(folder, index, name), index["about"]["ids"][name], name, table, new)
    source = np.arange(rows)
    source[table.rows :] = -1
    kept, end = sorted((rows, table.rows))
    more = format_count(end - kept, "newly initialized row" if rows > kept else "row")
    note = f"table {name} keeps its first {format_count(kept, 'row')} and {'gets' if rows > kept else 'loses'} {more}"
    return TableConversion(new, note, source)


def _resize_ids(
    saved: Mapping[str, torch.Tensor], about: Mapping[str, Any], name: str, old: Table, new: Table
) -> TableConversion:
    """Return the conversion of a table with managed ids to a different number of rows.

    Fallback rows, which ids without their own row share, are at the end of a table. An id keeps its row if the new
    table has a row of this number that is not a fallback row. All other ids that are kept move to free rows.
    """
    values, capacity = {key: tensor.numpy() for key, tensor in saved.items()}, new.own_rows
    selected = np.lexsort((-values["last"], -values["sightings"]))[:capacity]  # ties: lowest key first
    retained = {key: column[np.sort(selected)] for key, column in values.items()}
    old_rows, is_free = retained["row"], np.ones(capacity, bool)
    in_place = old_rows < capacity
    is_free[old_rows[in_place]] = False
    free_rows = np.flatnonzero(is_free)
    moved = len(old_rows) - int(in_place.sum())
    new_rows = old_rows.copy()
    new_rows[~in_place] = free_rows[:moved]
    source = np.full(new.rows, -1)
    source[new_rows] = old_rows
    source[capacity:] = np.arange(old.own_rows, old.rows)
    dropped = len(values["id"]) - len(old_rows)
    return TableConversion(
        new,
        f"table {name}: the rows of {format_count(len(old_rows), 'id')} are kept"
        + (f"; the ids seen least often ({dropped:,}) are dropped" if dropped else ""),
        source,
        {**retained, "row": new_rows} | ({"left": free_rows[moved:]} if moved < len(free_rows) else {}),
        {**about, "rows": len(old_rows), "left": len(free_rows) - moved, "handed": capacity},
    )


def _conversion_error(table: str, reason: str, expected: str, do: str | None = None) -> SchemaError:
    return SchemaError(
        f"table {table} cannot be converted: {reason}",
        where=f"--table {table}",
        expected=expected,
        do=do or f"reinitialize the table in a warm start with another schema: warm_start.tables.{table}=new",
    )


def rewrite_checkpoint(
    folder: str, index: dict[str, Any], out: str, changes: Mapping[str, TableConversion], about: dict, seed: int
) -> None:
    """Write a copy of a checkpoint in which some tables are converted.

    Args:
        folder: Folder of the checkpoint to read.
        index: Index of the checkpoint to read.
        out: Folder of the new checkpoint, which is created if missing; it must not contain a checkpoint.
        changes: Table → conversion of the table.
        about: Entry "about" of the new index, as JSON values.
        seed: Seed for initial values.

    Raises:
        CheckpointError: The checkpoint to read is damaged or cannot be read, a converted tensor has a dtype that
            StoredTable does not support, or the new checkpoint cannot be written.
        DataError: The path `out` is not valid, or its store cannot be reached.
    """
    attempt = uuid.uuid4().hex[:8]
    with ExitStack() as stack:
        files = {chunk["file"] for entry in index["tensors"].values() for chunk in entry["chunks"]}
        sources = {name: stack.enter_context(open_data_file(folder, name)) for name in files}
        stack.enter_context(convert_write_errors(out))
        make_folder(out)
        file = f"{attempt}-00000.bin"
        sink = stack.enter_context(RawFileWriter(out, file))
        writer, tensors = _TensorWriter(sink, file, index["block_bytes"]), {}
        for name, entry in index["tensors"].items():
            part, owner, kind = (*name.split("/", 2), "", "")[:3]
            change = changes.get(owner) if part in ("tables", "ids") else None
            if part == "ids" and change is not None and not kind.startswith("waiting_"):
                continue
            if part == "ids" or change is None or change.source is None or not entry["shape"]:
                tensors[name] = writer.copy(folder, sources, name, entry)
                continue
            shape = [change.table.rows, *entry["shape"][1:]]
            with StoredTable(folder, index, owner, kind) as stored:
                rows = _read_new_rows(stored, owner, change, seed if kind == "weight" else None)
                tensors[name] = writer.write(entry["dtype"], shape, rows)
        for table, change in changes.items():
            for kind, values in change.ids.items():
                pieces = iter([torch.from_numpy(np.ascontiguousarray(values, np.int64))])
                tensors[f"ids/{table}/{kind}"] = writer.write("int64", [len(values)], pieces)
        sink.sync()
    content = {"attempt": attempt, "block_bytes": index["block_bytes"]}
    write_index(out, {**content, "tensors": tensors, "about": about})


class _TensorWriter:
    """Writer of tensors to one file. A new tensor becomes a single chunk; a copied tensor keeps its chunks."""

    def __init__(self, sink: RawFileWriter, file: str, block_bytes: int):
        self._sink, self._file, self._block_bytes = sink, file, block_bytes

    def write(self, dtype: str, shape: list[int], pieces: Iterator[torch.Tensor]) -> dict[str, Any]:
        """Write a tensor given as consecutive pieces, cast to `dtype`, and return its entry in the index.

        Pieces need not end at block boundaries.
        """
        start, crc32, waiting = self._sink.align(), [], bytearray()
        for piece in pieces:
            for block in blocks(piece.to(DTYPES[dtype]), self._block_bytes):
                waiting += block
                while len(waiting) >= self._block_bytes:
                    crc32.append(self._put(waiting[: self._block_bytes]))
                    del waiting[: self._block_bytes]
        if waiting:
            crc32.append(self._put(waiting))
        chunk = {"offsets": [0] * len(shape), "sizes": shape, "file": self._file, "start": start}
        return {"dtype": dtype, "shape": shape, "chunks": [{**chunk, "crc32": crc32}]}

    def copy(self, folder: str, sources: dict[str, Source], name: str, entry: dict[str, Any]) -> dict[str, Any]:
        """Copy a tensor from another checkpoint, and return its entry in the new index."""
        chunks = []
        for chunk, part in zip(parse_chunks(name, entry), entry["chunks"], strict=True):
            start = self._sink.align()
            for number in range(len(chunk.crc32)):
                self._sink.write(chunk.read_block(sources[chunk.file], folder, number, self._block_bytes))
            chunks.append({**part, "file": self._file, "start": start})
        return {**entry, "chunks": chunks}

    def _put(self, block: bytearray) -> int:
        self._sink.write(memoryview(block))
        return zlib.crc32(block)


def _read_new_rows(stored: StoredTable, name: str, change: TableConversion, seed: int | None) -> Iterator[torch.Tensor]:
    """Yield the rows of a converted table in order, BAND_BYTES at a time: float32 [n, dim].

    Args:
        stored: Table in the checkpoint.
        name: Name of the table.
        change: Conversion of the table.
        seed: Seed for the initial values of rows that are not in the checkpoint; None: these rows are 0.
    """
    assert change.source is not None
    count = max(1, BAND_BYTES // (4 * stored.dim))
    for first in range(0, len(change.source), count):
        source = change.source[first : first + count]
        band = np.zeros((len(source), stored.dim), np.float32)
        new = np.flatnonzero(source < 0)
        if seed is not None and len(new):
            ids = torch.from_numpy(new + first)
            band[new] = compute_initial_values(seed, name, ids, range(stored.dim), change.table.rows).numpy()
        band[source >= 0] = stored.gather(source[source >= 0])
        yield torch.from_numpy(band)
