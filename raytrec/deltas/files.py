"""Write the Arrow files and the manifest of a delta."""

from __future__ import annotations

import hashlib
import io
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch

from raytrec.common.documents import to_json_document
from raytrec.common.errors import DataError, RaytrecError, RunError, get_first_line
from raytrec.common.formatting import as_dict
from raytrec.common.output_folder import OutputFolder
from raytrec.common.reading import UnreadableError
from raytrec.common.storage import join_uri
from raytrec.deltas.chain import NewestDelta, find_newest_delta
from raytrec.deltas.changes import IdRowChanges, RowPiece
from raytrec.deltas.format import (
    DELTAS_FOLDER,
    DeltaManifest,
    DeltaTable,
    Operation,
    format_number,
    has_manifest,
    make_arrow_schema,
    read_delta_manifest,
)
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
        self._folder, self._attempt = join_uri(folder, DELTAS_FOLDER), attempt
        self._tables = {name: place for place, name in enumerate(tables)}
        self.entries: dict[Operation, dict[str, FileEntry]] = {}

    def write_rows(self, name: str, pieces: Iterable[RowPiece]) -> None:
        """Write new values of rows to a file with this name, unless there are none.

        Raises:
            ValueError: A value is not finite.
            OSError: The file cannot be written.
            DataError: As for `open_filesystem`.
        """
        self._write("rows", name, (self._to_row_columns(piece) for piece in pieces))

    def write_ids(self, name: str, changes: Mapping[str, IdRowChanges]) -> None:
        """Write rows with changed ids (table → rows) like `write_rows`, except for the check of the values."""
        columns = (
            [self._repeat(table, len(rows)), rows.numpy(), pa.array(ids.numpy(), mask=~has_id.numpy())]
            for table, (rows, ids, has_id) in changes.items()
            if len(rows)
        )
        self._write("ids", name, columns)

    def write_dense(self, name: str, values: Mapping[str, torch.Tensor]) -> None:
        """Write dense weights (name → tensor in host memory) like `write_rows`, except for the check of the values."""
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
        with OutputFolder(self._folder).stream(place, place) as stream:
            sink = _HashedSink(stream)
            with pa.ipc.new_file(sink, schema) as writer:
                for columns in (first, *batches):
                    writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))
        self.entries[operation] = {place: FileEntry(bytes=sink.size, sha256=sink.digest.hexdigest())}

    def _to_row_columns(self, piece: RowPiece) -> list[Any]:
        values, (count, width) = piece.values, piece.values.shape
        # A sum is faster than a mask of all values, but may overflow.
        if not (values.sum().isfinite() or values.isfinite().all()):
            raise ValueError(f"rows of table {piece.table} contain NaN or infinity")
        lists = pa.LargeListArray.from_arrays(np.arange(count + 1) * width, values.reshape(-1).numpy())
        return [self._repeat(piece.table, count), piece.rows.numpy(), np.full(count, piece.column, np.int32), lists]

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


class DeltaOutcome(NamedTuple):
    """Outcome of writing a delta, the same on all ranks.

    Attributes:
        number: Number of the delta if it has been written, else of the newest known delta.
        error: Reason why the delta was not written, or None.
    """

    number: int
    error: str | None = None


class ManifestWriter:
    """Writer of the manifests of a run's deltas, used on rank 0.

    Args:
        folder: Folder of deltas.
        stream: Id of the run's stream (DeltaStream.id).
        tables: Sizes of all tables.
        confirm: Function called before a delta is committed; raises RunError if this group no longer owns the run.
    """

    def __init__(self, folder: str, stream: str, tables: dict[str, DeltaTable], confirm: Callable[[], None]):
        self._folder, self._stream, self._tables, self._confirm = folder, stream, tables, confirm
        self._newest: NewestDelta | None = None  # None: unknown

    def find_since(self, position: Mapping[str, Any] | None, step: int) -> tuple[int, list[DeltaManifest] | None]:
        """Return the number of the newest delta, and the deltas that contain changes after a checkpoint.

        A checkpoint contains the number N of the delta of its step. If that delta could not be written, delta N
        belongs to a later step or does not exist. In the second case, the changes before the checkpoint are unknown.

        Args:
            position: Entry "deltas" of the checkpoint's index; None at the start of the run.
            step: Step of the checkpoint.

        Returns:
            The number, 0 if the folder cannot be read; and the manifests of the deltas in ascending order, None if
            they are unknown.
        """
        first = 0 if position is None else as_dict(position).get("number")
        is_same = position is None or as_dict(position).get("stream") == self._stream
        try:
            self._newest = newest = find_newest_delta(self._folder)
        except (OSError, DataError):
            return 0, None
        if not is_same or not isinstance(first, int) or not 0 <= first <= newest.number:
            return newest.number, None
        try:
            found = [read_delta_manifest(self._folder, each) for each in range(max(1, first), newest.number + 1)]
        except (OSError, DataError, UnreadableError):
            return newest.number, None
        if None in found or [sha256 for _, sha256 in found[:-1]] != [delta.parent for delta, _ in found[1:]]:
            return newest.number, None  # a delta is missing or damaged
        deltas = [delta for delta, _ in found]
        return newest.number, deltas[1:] if first and deltas[0].step == step else deltas

    def begin(self, known: int) -> tuple[int, str | None, str]:
        """Start the next delta.

        Args:
            known: Number of the newest known delta. The folder's newest delta has another number if the store has
                created a manifest in spite of an error, or if another process has written or removed deltas.

        Returns:
            (number of the newest delta; reason why the next delta cannot be started, or None; name of the subfolder
            for the next delta's files). If the folder cannot be read, the number is `known`, and the name is "".
        """
        try:
            self._newest = self._newest or find_newest_delta(self._folder)
        except (OSError, RaytrecError) as failure:
            return known, describe_failure(failure), ""
        number = self._newest.number
        error = None if number == known else f"the newest delta in {self._folder} is {number}, not {known}"
        return number, error, f"{format_number(number + 1)}-{uuid.uuid4().hex[:8]}"

    def commit(self, number: int, entries: Iterable[dict[Operation, dict[str, FileEntry]]], **about: Any) -> str | None:
        """Write the manifest of a delta. Return None, or the reason why the manifest was not written.

        Args:
            number: Number of the delta, which `begin` has started.
            entries: DeltaFiles.entries of each rank.
            **about: Fields step, cut_unix_s and last of the manifest.
        """
        manifest = DeltaManifest(
            stream=self._stream, number=number, parent=self._newest.sha256, tables=self._tables, **about
        )
        for operation, files in (item for rank_entries in entries for item in rank_entries.items()):
            manifest.files.setdefault(operation, {}).update(files)
        content = to_json_document(manifest)
        try:
            self._confirm()
            if has_manifest(self._folder, number):
                raise RunError(f"delta {number} already exists in {self._folder}")
            OutputFolder(join_uri(self._folder, DELTAS_FOLDER)).write(f"{format_number(number)}.json", content)
        except (OSError, RaytrecError) as failure:
            return describe_failure(failure)
        self._newest = NewestDelta(number, hashlib.sha256(content).hexdigest())
        return None

    def give_up(self, number: int, attempt: str) -> None:
        """Remove the files of a delta that could not be written, unless its manifest exists. Errors are ignored.

        Args:
            number: Number of the delta.
            attempt: Name of the subfolder with the files.
        """
        self._newest = None
        with suppress(OSError, RaytrecError):  # a store may have created the manifest in spite of the error
            if not has_manifest(self._folder, number):
                OutputFolder(join_uri(self._folder, DELTAS_FOLDER)).remove(attempt)


def describe_failure(failure: Exception) -> str:
    """Return the reason for a failure as a short text: a RaytrecError's `what`, or an OSError's reason, or one line."""
    reason = failure.what if isinstance(failure, RaytrecError) else getattr(failure, "strerror", None)
    return reason or get_first_line(failure)
