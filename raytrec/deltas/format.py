"""Folder of a run's deltas: layout, manifests, and Arrow files read from untrusted folders. Does not import torch.

FOLDER/stream.json                     DeltaStream: identity of the run that writes the folder
FOLDER/exports/000000000012/           full export of the state that delta 12 leads to (`raytrec export`)
FOLDER/deltas/000000000013.json        DeltaManifest of delta 13; exists once all of its files are complete
FOLDER/deltas/000000000013-ATTEMPT/    files of delta 13; ATTEMPT is a random name

Deltas are numbered from 1 without gaps. Each manifest contains the SHA-256 of the previous manifest. The files
are Arrow IPC files; their schema metadata names the operation and the version of the format:

    rows    new values of table rows, or of a range of their columns
    ids     rows of managed ids: all listed rows lose their id, then each non-null id gets its row
    dense   new values of all dense weights

When a run returns to an earlier checkpoint, its next delta also contains the current values of all rows and ids that
the deltas after the checkpoint have changed. If those deltas cannot be read, it contains all rows and ids.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterator
from struct import error as StructError
from typing import Literal

import numpy as np
import pyarrow as pa
from pyarrow import fs
from pydantic import Field, model_validator

from raytrec.common.documents import validate_as
from raytrec.common.errors import DataError, get_first_line
from raytrec.common.reading import UnreadableError, open_regular, parse_json
from raytrec.common.storage import join_uri, open_filesystem, query_file_info, read_bytes
from raytrec.config.base import NonNegativeInt, PositiveInt, Section
from raytrec.data.arrow import has_compressed_buffers
from raytrec.scoring.manifest import FileEntry

DELTA_FORMAT: Literal[1] = 1
STREAM_FILE, EXPORTS_FOLDER, DELTAS_FOLDER = "stream.json", "exports", "deltas"
Operation = Literal["rows", "ids", "dense"]


def make_arrow_schema(operation: Operation) -> pa.Schema:
    """Return the Arrow schema of an operation's files."""
    table = pa.field("table", pa.dictionary(pa.int32(), pa.string()), nullable=False)
    row = pa.field("row", pa.int64(), nullable=False)
    fields = {
        # `values` of a row begin at column `column`; column-wise shards write different columns of the same row.
        "rows": [table, row, pa.field("column", pa.int32()), pa.field("values", pa.large_list(pa.float32()))],
        "ids": [table, row, pa.field("id", pa.int64())],
        # Values in row-major order, as little-endian bytes of the dtype (torch's name, such as float32).
        "dense": [
            pa.field("name", pa.string()),
            pa.field("dtype", pa.string()),
            pa.field("shape", pa.list_(pa.int64())),
            pa.field("values", pa.large_binary()),
        ],
    }[operation]
    return pa.schema(fields, {"raytrec.operation": operation, "raytrec.version": str(DELTA_FORMAT)})


class DeltaStream(Section):
    """Identity of the run that writes a folder of deltas.

    Attributes:
        format: Version of the file format.
        id: Random identifier, which the checkpoints of the run also contain.
        run: Name of the run.
    """

    format: Literal[1] = DELTA_FORMAT
    id: str
    run: str


class DeltaTable(Section):
    """Numbers of rows and columns of a table, which must be those in the export to which the delta is applied."""

    rows: PositiveInt
    dim: PositiveInt


class DeltaManifest(Section):
    """Content of a delta.

    Attributes:
        format: Version of the file format.
        stream: DeltaStream.id of the run.
        number: Number of the delta, from 1.
        parent: SHA-256 of the file of the previous manifest; empty for delta 1.
        step: Step whose state the delta leads to. It is smaller than the previous delta's step if the run has
            returned to an earlier checkpoint in the meantime.
        cut_unix_s: Time at which training reached the step, in seconds since the Unix epoch.
        last: True if the run has ended with this delta.
        tables: Sizes of all tables.
        files: Operation → name of each file, relative to the folder of the manifest → size and checksum.
    """

    format: Literal[1] = DELTA_FORMAT
    stream: str
    number: PositiveInt
    parent: str
    step: NonNegativeInt
    cut_unix_s: float
    last: bool = False
    tables: dict[str, DeltaTable]
    files: dict[Operation, dict[str, FileEntry]] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_names(self) -> DeltaManifest:
        prefix = f"{format_number(self.number)}-"
        for name in (name for files in self.files.values() for name in files):
            folder, _, file = name.partition("/")
            valid_file = file.isascii() and file.replace("-", "").replace(".", "").isalnum() and ".." not in file
            if not (folder.startswith(prefix) and folder[len(prefix) :].isalnum() and valid_file):
                raise ValueError(f"files: {name!r} is not a file of delta {self.number}")
        return self


def format_number(number: int) -> str:
    """Return the name of a delta or of a full export: its number with leading zeros, 12 digits."""
    return f"{number:012d}"


def get_manifest_uri(folder: str, number: int) -> str:
    """Return the location of a delta's manifest in a folder of deltas."""
    return join_uri(folder, f"{DELTAS_FOLDER}/{format_number(number)}.json")


def get_export_uri(folder: str, number: int) -> str:
    """Return the location of the full export of the state that a delta leads to."""
    return join_uri(folder, f"{EXPORTS_FOLDER}/{format_number(number)}")


def has_manifest(folder: str, number: int) -> bool:
    """Return True if a folder of deltas contains the manifest of a delta.

    Raises:
        OSError: The store cannot be read.
        DataError: As for `open_filesystem`.
    """
    return query_file_info(get_manifest_uri(folder, number)).is_file


def read_delta_manifest(folder: str, number: int) -> tuple[DeltaManifest, str] | None:
    """Read the manifest of a delta; return None if the delta does not exist.

    Args:
        folder: Folder of deltas, a local path or a URI.
        number: Number of the delta.

    Returns:
        The manifest, and the SHA-256 of its file.

    Raises:
        UnreadableError: The file is not the manifest of this delta.
        OSError: The file cannot be read.
        DataError: As for `open_filesystem`.
    """
    try:
        content = read_bytes(get_manifest_uri(folder, number))
    except (FileNotFoundError, NotADirectoryError):
        return None
    manifest = validate_as(parse_json(content), DeltaManifest)
    if manifest.number != number:
        raise UnreadableError(f"the file contains delta {manifest.number}")
    return manifest, hashlib.sha256(content).hexdigest()


MAX_NAMES = 100_000  # maximum number of table names in the dictionary of a file
ARROW_MAGIC_BYTES = 8  # size of the magic bytes and padding before the stream in an Arrow IPC file


class UnusableDeltaError(ValueError):
    """Error for a delta that must not be applied; its message states the reason."""


def read_batches(folder: str, manifest: DeltaManifest, operation: Operation) -> Iterator[pa.RecordBatch]:
    """Yield the record batches of all files of an operation, after checking their checksums, types and nulls.

    Args:
        folder: Folder of deltas.
        manifest: Manifest of the delta.
        operation: Operation of the files.

    Raises:
        UnusableDeltaError: A file is missing, damaged or cannot be read, or does not have the format of deltas.
    """
    for name, entry in manifest.files.get(operation, {}).items():
        try:
            yield from _read_file(join_uri(folder, f"{DELTAS_FOLDER}/{name}"), entry, make_arrow_schema(operation))
        except (OSError, ValueError, StructError, pa.ArrowException, DataError) as error:
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
    if content.size != entry.bytes:
        raise UnusableDeltaError(f"the path is not a file of {entry.bytes:,} bytes, the size in the manifest")
    if hashlib.sha256(content).hexdigest() != entry.sha256:
        raise UnusableDeltaError("the file differs from its checksum in the manifest")
    # The messages are read in file order; the footer, which could point to other positions, is not used.
    stream = content.slice(min(ARROW_MAGIC_BYTES, content.size))
    if has_compressed_buffers(stream):
        raise UnusableDeltaError("the buffers are compressed")
    table = pa.ipc.open_stream(stream).read_all()
    if not table.schema.equals(schema, check_metadata=True):
        raise UnusableDeltaError("the Arrow schema or its metadata differs from the format of deltas")
    table.validate(full=True)  # offsets outside of the values would read other memory
    if any(table[name].null_count for name in table.column_names if name != "id"):
        raise UnusableDeltaError("a column other than id contains null")
    return table.to_batches()


def select_tables(batch: pa.RecordBatch, tables: Container[str]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the name of each of `tables` that occurs in a batch, and the positions of its rows in the batch, int64 [n].

    Args:
        batch: Batch of a file of the operation rows or ids.
        tables: Names of tables; rows of other tables are ignored.

    Raises:
        UnusableDeltaError: The dictionary of the batch names more than MAX_NAMES tables.
    """
    column = batch["table"]
    if len(column.dictionary) > MAX_NAMES:
        raise UnusableDeltaError(f"a file names {len(column.dictionary):,} tables, more than {MAX_NAMES:,}")
    codes = column.indices.to_numpy()
    for code in np.unique(codes):
        if (name := column.dictionary[code].as_py()) in tables:
            yield name, np.flatnonzero(codes == code)
