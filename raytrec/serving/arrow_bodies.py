"""Read Arrow bodies from untrusted clients, and measure the data to which small bodies expand."""

from __future__ import annotations

from collections.abc import Collection
from struct import error as StructError

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from raytrec.common.errors import DataError, get_first_line
from raytrec.data.arrow import has_compressed_buffers, is_text

PLAIN_COLUMNS_TEXT = "a column without views, run-end encoding, unions, or dictionaries of nested values"


def read_stream(body: bytes, columns: Collection[str]) -> tuple[pa.Table, int]:
    """Return the rows of an Arrow stream, and the size in bytes of their dictionary-encoded texts after decoding.

    Args:
        body: Bytes of the stream.
        columns: Names of the columns whose texts are measured. A struct field (column.field) selects its column.

    Raises:
        DataError: The body is not a valid Arrow stream, its buffers are compressed, or one of `columns` has an
            unsupported type.
    """
    try:
        if has_compressed_buffers(body):
            what, do = "the Arrow buffers are compressed", "write the stream without compression"
            raise DataError(what, where="the body", expected="an uncompressed stream", do=do)
        table = pa.ipc.open_stream(body).read_all()
        table.validate(full=True)  # offsets outside of the body would crash the process
        sharing = [(place, each.name) for place, each in enumerate(table.schema) if _may_share(each.type)]
        used = {name.partition(".")[0] for name in columns} | set(columns) if sharing else set()
        return table, sum(_count_expanded_bytes(table.column(place), name) for place, name in sharing if name in used)
    except (pa.ArrowException, OSError, StructError, ValueError) as error:  # ValueError: a name that is not UTF-8
        what = f"the body is not a valid Arrow stream: {get_first_line(error)}"
        raise DataError(what, where="the body", expected="a schema followed by record batches") from None


def _may_share(kind: pa.DataType) -> bool:
    """Return True if rows of a column of this type may share values, or parts of values."""
    if isinstance(kind, pa.BaseExtensionType):
        return _may_share(kind.storage_type)
    return bool(kind.num_fields) or kind.has_variadic_buffers or types.is_dictionary(kind)


def _count_expanded_bytes(array: pa.Array | pa.ChunkedArray, name: str) -> int:
    """Return the size in bytes of a column's dictionary-encoded texts, at all levels of nesting, after decoding.

    Raises:
        DataError: The column has a type whose rows can share values in a way that is not measured.
    """
    kind = array.type
    if isinstance(array, pa.ChunkedArray):
        parts = array.chunks
    elif isinstance(kind, pa.BaseExtensionType):
        parts = [array.storage]
    elif types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        parts = [array.flatten()]
    elif types.is_struct(kind):
        parts = array.flatten()
    elif types.is_map(kind):
        parts = [array.keys, array.items]
    else:
        value_type = kind.value_type if types.is_dictionary(kind) else kind
        if value_type.num_fields or value_type.has_variadic_buffers:
            where = f"the body, column {name}"
            raise DataError(f"unsupported type {kind}", where=where, expected=PLAIN_COLUMNS_TEXT)
        if not (types.is_dictionary(kind) and is_text(value_type)):
            return 0
        return pc.sum(pc.binary_length(array.dictionary).take(array.indices)).as_py() or 0
    return sum(_count_expanded_bytes(part, name) for part in parts)
