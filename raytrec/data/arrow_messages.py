"""Messages of Arrow streams from untrusted sources. Does not import torch."""

from __future__ import annotations

from struct import unpack_from

import pyarrow as pa

RECORD_BATCH, DICTIONARY_BATCH = 3, 2  # of Arrow's MessageHeader (format/Message.fbs)
VERSION_5 = 4  # of Arrow's MetadataVersion; earlier versions may name a compression in custom_metadata


def has_compressed_buffers(stream: bytes | pa.Buffer) -> bool:
    """Return True if a stream contains compressed buffers, for which Arrow allocates the size that they claim.

    Raises:
        pa.ArrowException, OSError, struct.error: The bytes are not a stream.
    """
    return any(_is_compressed(message.metadata) for message in pa.ipc.MessageReader.open_stream(stream))


def _is_compressed(metadata: pa.Buffer) -> bool:
    """Return True if a message's buffers are or may be compressed.

    Arrow names the compression in RecordBatch.compression, and before version 5 in custom_metadata.
    """
    data = metadata.to_pybytes()
    message = unpack_from("<I", data)[0]
    kind = _find_field(data, message, 1)
    kind = data[kind] if kind else 0
    batch = _find_table(data, message, 2) if kind in (RECORD_BATCH, DICTIONARY_BATCH) else 0
    version = _find_field(data, message, 0)
    if batch and _find_field(data, message, 4) and (unpack_from("<h", data, version)[0] if version else 0) < VERSION_5:
        return True
    if kind == DICTIONARY_BATCH:
        batch = _find_table(data, batch, 1)
    return bool(batch and _find_field(data, batch, 3))


def _find_field(data: bytes, table: int, number: int) -> int:
    """Return the position of a field of a FlatBuffers table, or 0 if the field is missing."""
    vtable = table - unpack_from("<i", data, table)[0]
    if vtable < 0 or 4 + 2 * number >= unpack_from("<H", data, vtable)[0]:
        return 0
    offset = unpack_from("<H", data, vtable + 4 + 2 * number)[0]
    return table + offset if offset else 0


def _find_table(data: bytes, table: int, number: int) -> int:
    place = _find_field(data, table, number)
    return place + unpack_from("<I", data, place)[0] if place else 0
