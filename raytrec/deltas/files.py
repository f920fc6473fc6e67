"""Write the Arrow files of a delta."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from raytrec.common.output_folder import OutputFolder
from raytrec.common.storage import join_uri
from raytrec.deltas.changes import IdRowChanges, RowPiece
from raytrec.deltas.format import DELTAS_FOLDER, Operation, make_arrow_schema
from raytrec.scoring.manifest import FileEntry


class DeltaFiles:
    """Writer of this rank's files of one delta.

    Args:
        folder: Folder of deltas.
        attempt: Name of the subfolder for the delta's files, NUMBER-ATTEMPT.
        tables: Names of all tables.

    Attributes:
        entries: Operation → name of each file → size and checksum, as in DeltaManifest.files.
    """

    def __init__(self, folder: str, attempt: str, tables: Iterable[str]):
        self._output, self._attempt = OutputFolder(join_uri(folder, DELTAS_FOLDER)), attempt
        self._tables = {name: place for place, name in enumerate(tables)}
        self.entries: dict[Operation, dict[str, FileEntry]] = {}

    def write_rows(self, name: str, pieces: Iterable[RowPiece]) -> None:
        """Write new values of rows; no file is written if there are none.

        Raises:
            ValueError: A value is not finite.
            OSError: The file cannot be written.
        """
        self._write("rows", name, (self._to_row_columns(piece) for piece in pieces))

    def write_ids(self, name: str, changes: Mapping[str, IdRowChanges]) -> None:
        """Write rows with changed ids; no file is written if there are none. OSError is raised as in `write_rows`."""
        columns = (self._to_id_columns(table, each) for table, each in changes.items() if len(each.rows))
        self._write("ids", name, columns)

    def write_dense(self, name: str, values: Mapping[str, torch.Tensor]) -> None:
        """Write dense weights, which must be in host memory. OSError is raised as in `write_rows`."""
        columns = [
            list(values),
            [str(value.dtype).removeprefix("torch.") for value in values.values()],
            [list(value.shape) for value in values.values()],
            [value.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for value in values.values()],
        ]
        self._write("dense", name, [columns])

    def _write(self, operation: Operation, name: str, batches: Iterable[list[Any]]) -> None:
        batches, schema, place = iter(batches), make_arrow_schema(operation), f"{self._attempt}/{name}"
        first = next(batches, None)
        if first is None:
            return
        with self._output.stream(place, place) as stream:
            sink = _HashedSink(stream)
            with pa.ipc.new_file(sink, schema) as writer:
                for columns in (first, *batches):
                    arrays = [
                        column if isinstance(column, pa.Array) else pa.array(column, field.type)
                        for column, field in zip(columns, schema, strict=True)
                    ]
                    writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=schema))
        self.entries[operation] = {place: FileEntry(bytes=sink.size, sha256=sink.digest.hexdigest())}

    def _to_row_columns(self, piece: RowPiece) -> list[Any]:
        values, (count, width) = piece.values, piece.values.shape
        # A sum is faster than a mask of all values, but may overflow.
        if not (values.sum().isfinite() or values.isfinite().all()):
            raise ValueError(f"rows of table {piece.table} contain NaN or infinity")
        lists = pa.LargeListArray.from_arrays(np.arange(count + 1) * width, values.reshape(-1).numpy())
        return [self._repeat(piece.table, count), piece.rows.numpy(), np.full(count, piece.column, np.int32), lists]

    def _to_id_columns(self, table: str, changes: IdRowChanges) -> list[Any]:
        ids = pa.array(changes.ids.numpy(), mask=~changes.has_id.numpy())
        return [self._repeat(table, len(ids)), changes.rows.numpy(), ids]

    def _repeat(self, table: str, count: int) -> pa.Array:
        return pa.DictionaryArray.from_arrays(np.full(count, self._tables[table], np.int32), list(self._tables))


class _HashedSink(io.RawIOBase):
    """Output stream that counts and hashes the bytes that it passes on."""

    def __init__(self, stream: pa.NativeFile):
        self._stream, self.size, self.digest = stream, 0, hashlib.sha256()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._stream.write(data)
        self.digest.update(data)
        self.size += len(data)
        return len(data)
