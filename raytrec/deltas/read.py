"""Read the files of deltas from untrusted folders."""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterator
from struct import error as StructError

import numpy as np
import pyarrow as pa
from pyarrow import fs

from raytrec.common.errors import get_first_line
from raytrec.common.reading import open_regular
from raytrec.common.storage import join_uri, open_filesystem
from raytrec.data.arrow import has_compressed_buffers
from raytrec.deltas.format import DELTAS_FOLDER, DeltaManifest, Operation, make_arrow_schema
from raytrec.scoring.manifest import FileEntry

MAX_NAMES = 100_000  # names of tables in a dictionary of a file
ARROW_MAGIC_BYTES = 8  # before the stream in an Arrow IPC file


class UnusableDeltaError(ValueError):
    """Reason why a delta must not be applied."""


def read_batches(folder: str, manifest: DeltaManifest, operation: Operation) -> Iterator[pa.RecordBatch]:
    """Yield the batches of all files of an operation, whose offsets, dictionaries and nulls have been checked.

    Args:
        folder: Folder of deltas.
        manifest: Manifest of the delta.
        operation: Operation of the files.

    Raises:
        UnusableDeltaError: A file is missing, damaged, or not of the format of deltas.
    """
    for name, entry in manifest.files.get(operation, {}).items():
        try:
            yield from _read_file(join_uri(folder, f"{DELTAS_FOLDER}/{name}"), entry, make_arrow_schema(operation))
        except (OSError, ValueError, StructError, pa.ArrowException) as error:
            raise UnusableDeltaError(f"{name}: {get_first_line(error)}") from None


def _read_file(uri: str, entry: FileEntry, schema: pa.Schema) -> list[pa.RecordBatch]:
    filesystem, path = open_filesystem(uri)
    info, content = filesystem.get_file_info(path), pa.py_buffer(b"")
    if info.type == fs.FileType.NotFound:
        raise UnusableDeltaError("the file is missing")
    if info.is_file and info.size == entry.bytes:
        if filesystem.type_name == "local":
            with open_regular(path) as local:  # pipes would block
                content = pa.py_buffer(local.readall())
        else:
            with filesystem.open_input_stream(path) as file:
                content = file.read_buffer(entry.bytes)
    if (content.size, hashlib.sha256(content).hexdigest()) != (entry.bytes, entry.sha256):
        raise UnusableDeltaError(f"the file differs from the written file of {entry.bytes:,} bytes")
    # The messages are read in their order; the footer, which could point elsewhere, is not used.
    stream = content.slice(min(ARROW_MAGIC_BYTES, content.size))
    if has_compressed_buffers(stream):
        raise UnusableDeltaError("the buffers are compressed")
    table = pa.ipc.open_stream(stream).read_all()
    if not table.schema.equals(schema, check_metadata=True):
        raise UnusableDeltaError("the Arrow schema or its metadata differ from the format of deltas")
    table.validate(full=True)  # offsets outside of the values would read other memory
    if any(table[name].null_count for name in table.column_names if name != "id"):
        raise UnusableDeltaError("a value is null")
    return table.to_batches()


def select_tables(batch: pa.RecordBatch, tables: Container[str]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield each of some tables that a batch names, and the places of its entries in the batch, int64 [n].

    Raises:
        UnusableDeltaError: The batch names too many tables.
    """
    column = batch["table"]
    if len(column.dictionary) > MAX_NAMES:
        raise UnusableDeltaError(f"a file names {len(column.dictionary):,} tables")
    codes = column.indices.to_numpy()
    for code in np.unique(codes):
        if (name := column.dictionary[code].as_py()) in tables:
            yield name, np.flatnonzero(codes == code)
