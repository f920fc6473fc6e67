"""A checkpoint written once more, with other tables: block by block, in this process alone."""

from __future__ import annotations

import uuid
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from raytrec.checkpoint.blocks import blocks
from raytrec.checkpoint.index import is_local, make_folder, write_index, writing
from raytrec.checkpoint.rawfile import Sink, Source, open_source, read_block
from raytrec.checkpoint.rows import BAND_BYTES, StoredTable
from raytrec.checkpoint.sound import ITEM_BYTES
from raytrec.checkpoint.storage import DTYPES
from raytrec.checkpoint.table_changes import TableChange
from raytrec.common.storage import open_filesystem
from raytrec.embeddings.initial import initial_values


def rewrite(
    folder: str, index: dict[str, Any], out: str, changes: Mapping[str, TableChange], about: dict, seed: int
) -> None:
    """Writes a checkpoint with the tensors of another one, some of whose tables change.

    Args:
        folder, index: of the one that there is.
        out: the folder of the new one, without a checkpoint.
        changes: table → what becomes of it.
        about: what the new index says beside the tensors.
        seed: of initial values.

    Raises:
        CheckpointError: what is read is damaged, or there is no room for what is written.
    """
    filesystem, path = open_filesystem(out)
    attempt = uuid.uuid4().hex[:8]
    with ExitStack() as stack:
        sources = {name: stack.enter_context(open_source(folder, name)) for name in _files(index)}
        stack.enter_context(writing(out))
        if is_local(filesystem):
            make_folder(Path(path))
        file = f"{attempt}-00000.bin"
        sink = stack.enter_context(Sink(out, file))
        writer, tensors = _Writer(sink, file, index["block_bytes"]), {}
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
                rows = _rows(stored, owner, change, seed if kind == "weight" else None)
                tensors[name] = writer.write(entry["dtype"], shape, rows)
        for table, change in changes.items():
            for kind, values in change.ids.items():
                pieces = iter([torch.from_numpy(np.ascontiguousarray(values, np.int64))])
                tensors[f"ids/{table}/{kind}"] = writer.write("int64", [len(values)], pieces)
        sink.sync()
    content = {"attempt": attempt, "block_bytes": index["block_bytes"]}
    write_index(out, {**content, "tensors": tensors, "about": about})


class _Writer:
    """Tensors, each as one chunk of a file, or as the chunks that they were."""

    def __init__(self, sink: Sink, file: str, block_bytes: int):
        self._sink, self._file, self._block_bytes = sink, file, block_bytes

    def write(self, dtype: str, shape: list[int], pieces: Iterator[torch.Tensor]) -> dict[str, Any]:
        """What the index says of a tensor that consists of these pieces, whose blocks begin anywhere."""
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

    def copy(
        self, folder: str, sources: dict[str, Source], name: str, entry: dict[str, Any]
    ) -> dict[str, Any]:
        """The same of a tensor of another checkpoint."""
        chunks = []
        for chunk in entry["chunks"]:
            start, size = self._sink.align(), prod(chunk["sizes"]) * ITEM_BYTES[entry["dtype"]]
            for number, crc in enumerate(chunk["crc32"]):
                begin = number * self._block_bytes
                block = memoryview(bytearray(min(self._block_bytes, size - begin)))
                where = f"{folder}/{chunk['file']}, tensor {name}"
                read_block(sources[chunk["file"]], chunk["start"] + begin, block, crc, where)
                self._sink.write(block)
            chunks.append({**chunk, "file": self._file, "start": start})
        return {**entry, "chunks": chunks}

    def _put(self, block: bytearray) -> int:
        self._sink.write(memoryview(block))
        return zlib.crc32(block)


def _rows(stored: StoredTable, name: str, change: TableChange, seed: int | None) -> Iterator[torch.Tensor]:
    """The new rows of a table, some at a time: float32 [n, dim].

    Args:
        seed: of the initial values of rows that the checkpoint does not have; None: those are 0.
    """
    assert change.source is not None
    count = max(1, BAND_BYTES // (4 * stored.dim))
    for first in range(0, len(change.source), count):
        source = change.source[first : first + count]
        band = np.zeros((len(source), stored.dim), np.float32)
        new = np.flatnonzero(source < 0)
        if seed is not None and len(new):
            ids = torch.from_numpy(new + first)
            band[new] = initial_values(seed, name, ids, range(stored.dim), change.table.rows).numpy()
        # Rows that follow one another in both are read together.
        ends = np.flatnonzero(np.diff(source) != 1) + 1
        for begin, end in zip([0, *ends], [*ends, len(source)], strict=True):
            if source[begin] >= 0:
                band[begin:end] = stored.read(int(source[begin]), int(source[end - 1]) + 1)
        yield torch.from_numpy(band)


def _files(index: dict[str, Any]) -> set[str]:
    return {chunk["file"] for entry in index["tensors"].values() for chunk in entry["chunks"]}
