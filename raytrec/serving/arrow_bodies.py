"""Arrow bodies from untrusted clients; small bodies that expand to too much data are refused."""

from __future__ import annotations

from collections.abc import Collection
from struct import error as StructError
from struct import unpack_from

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from raytrec.common.errors import DataError, get_first_line

RECORD_BATCH, DICTIONARY_BATCH = 3, 2  # of Arrow's MessageHeader (format/Message.fbs)
PLAIN_COLUMNS_TEXT = (
    "plain Arrow columns: no views, run-end encoding or unions, and no dictionaries of lists or structs"
)


class ExpansionLimitError(Exception):
    """Error for rows that expand to more bytes than a body may contain."""


def read_stream(body: bytes, columns: Collection[str], max_expanded_bytes: int) -> pa.Table:
    """Return the rows of an Arrow stream.

    Args:
        body: Bytes of the stream.
        columns: Columns that are used, as named in a schema; other columns are ignored.
        max_expanded_bytes: Maximum size of the columns after shared values are copied into each row.

    Raises:
        ValueError: The body is not a stream.
        DataError: The stream is compressed or a column has an unsupported type.
        ExpansionLimitError: The columns exceed `max_expanded_bytes`.
    """
    try:
        for message in pa.ipc.MessageReader.open_stream(body):
            if _is_compressed(message.metadata):  # Arrow allocates the size that a buffer claims
                raise DataError("the Arrow buffers are compressed", where="the body", expected="an uncompressed stream")
        table = pa.ipc.open_stream(body).read_all()
        table.validate(full=True)  # offsets outside of the body would crash the process
    except (pa.ArrowException, OSError, StructError) as error:
        raise ValueError(get_first_line(error)) from None
    sharing = [place for place, each in enumerate(table.schema) if _may_share(each.type)]
    if sharing:
        used = {name.partition(".")[0] for name in columns} | set(columns)
        names = table.column_names
        if (
            sum(_count_expanded_bytes(table.column(i), names[i]) for i in sharing if names[i] in used)
            > max_expanded_bytes
        ):
            raise ExpansionLimitError
    return table


def _may_share(kind: pa.DataType) -> bool:
    """Return True if rows of this type may share values, or parts of values."""
    return bool(kind.num_fields) or kind.has_variadic_buffers or types.is_dictionary(kind)


def _is_compressed(metadata: pa.Buffer) -> bool:
    """Return True if a message's buffers are compressed (RecordBatch.compression of Arrow's format)."""
    data = metadata.to_pybytes()
    message = unpack_from("<I", data)[0]
    kind = _find_field(data, message, 1)
    kind = data[kind] if kind else 0
    batch = _find_table(data, message, 2) if kind in (RECORD_BATCH, DICTIONARY_BATCH) else 0
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


def _count_expanded_bytes(array: pa.Array | pa.ChunkedArray, name: str) -> int:
    """Return the bytes of shared values if each row had its own copy; 0 for types that cannot share values.

    Raises:
        DataError: The type could share more than text.
    """
    if isinstance(array, pa.ChunkedArray):
        return sum(_count_expanded_bytes(chunk, name) for chunk in array.chunks)
    kind = array.type
    if types.is_dictionary(kind):
        if kind.value_type.num_fields or kind.value_type.has_variadic_buffers:
            raise _make_type_error(kind, name)
        if not types.is_string(kind.value_type) and not types.is_large_string(kind.value_type):
            return 0
        return pc.sum(pc.binary_length(array.dictionary).take(array.indices)).as_py() or 0
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _count_expanded_bytes(array.flatten(), name)
    if types.is_struct(kind):
        return sum(_count_expanded_bytes(part, name) for part in array.flatten())
    if types.is_map(kind):
        return _count_expanded_bytes(array.keys, name) + _count_expanded_bytes(array.items, name)
    if kind.num_fields or kind.has_variadic_buffers or types.is_list_view(kind):
        raise _make_type_error(kind, name)
    return 0


def _make_type_error(kind: pa.DataType, name: str) -> DataError:
    return DataError(f"unsupported type {kind}", where=f"the body, column {name}", expected=PLAIN_COLUMNS_TEXT)
