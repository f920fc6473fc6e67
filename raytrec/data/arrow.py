"""Find, read and convert Arrow columns, and detect compressed Arrow streams. Does not import torch."""

from __future__ import annotations

from functools import lru_cache
from struct import unpack_from

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

Path = tuple[int, ...]  # index of the column, then the indexes of nested fields; lists and maps add no index
TEXT_TYPES = pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(), pa.binary_view()
TEXT_TYPE_IDS = {kind.id for kind in (*TEXT_TYPES, pa.binary(1))}  # binary(1): bytes of a fixed size


class AmbiguousColumnError(KeyError):
    """Error for a name that several columns or fields of a schema have."""

    def __init__(self, name: str):
        super().__init__(f"column {name} exists more than once")


def find_column(schema: pa.Schema, name: str) -> Path | None:
    """Return the path of a column, or of a field such as `user.age`; None if the schema has neither.

    Fields belong to structs, to structs in lists, or to maps (key, value). A column named `user.age` has precedence.

    Raises:
        AmbiguousColumnError: Several columns or fields have the name.
    """
    exact = schema.get_all_field_indices(name)
    return (exact[0],) if len(exact) == 1 else _find_path(list(schema), name)


def _find_path(fields: list[pa.Field], name: str) -> Path | None:
    paths: list[Path] = [(i,) for i, field in enumerate(fields) if field.name == name]
    for i, field in enumerate(fields if not paths else ()):
        if name.startswith(f"{field.name}."):
            inner = _find_path(_child_fields(field.type), name[len(field.name) + 1 :])
            paths += [(i, *inner)] if inner else []
    if len(paths) > 1:
        raise AmbiguousColumnError(name)
    return paths[0] if paths else None


def _child_fields(kind: pa.DataType) -> list[pa.Field]:
    """Return the fields of a struct, of a map's entries, or of the structs in a list; [] for other types."""
    if types.is_map(kind):
        return [pa.field("key", kind.key_type), pa.field("value", kind.item_type)]
    if types.is_struct(kind):
        return [kind.field(i) for i in range(kind.num_fields)]
    inner = list_element_type(kind)
    return _child_fields(inner) if inner is not None and types.is_struct(inner) else []


def list_element_type(kind: pa.DataType) -> pa.DataType | None:
    """Return the element type of any kind of list; None for other types."""
    if not kind.num_fields:  # faster than a check for each kind of list
        return None
    listed = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return kind.value_type if listed or types.is_list_view(kind) or types.is_large_list_view(kind) else None


def leaf_names(schema: pa.Schema) -> list[str]:
    """Return the names of all columns, where a struct, list of structs or map is replaced by its fields.

    Fields are named as in `user.age`, at all levels of nesting. Duplicate names are kept.
    """
    return [name for field in schema for name in _leaves(field.name, field.type)]


def _leaves(name: str, kind: pa.DataType) -> list[str]:
    fields = _child_fields(kind)
    return [leaf for f in fields for leaf in _leaves(f"{name}.{f.name}", f.type)] or [name]


def type_at(schema: pa.Schema, path: Path) -> pa.DataType:
    """Return the type of the column that `column_at` returns for a path, given the schema of the table."""
    return _get_nested(pa.nulls(0, schema.field(path[0]).type), path[1:]).type


def select_schema(schema: pa.Schema, names: list[str]) -> pa.Schema:
    """Return the schema of the table that `pick_columns` returns for a table with this schema.

    Raises:
        KeyError: A name does not exist or is ambiguous.
    """
    return pa.schema([(name, type_at(schema, _path(schema, name))) for name in names])


def empty_table(schema: pa.Schema) -> pa.Table:
    """Return a table with a schema's columns and no rows; unlike in pyarrow, nested extension types are supported."""
    return pa.table([pa.nulls(0, field.type) for field in schema], names=schema.names)


def find_required_columns(schema: pa.Schema, names: list[str]) -> list[str]:
    """Return the columns and fields to read from Parquet so that `pick_columns` finds all `names`; without duplicates.

    Fields of structs are read individually; lists of structs and maps are read as a whole.

    Raises:
        KeyError: A name does not exist or is ambiguous.
    """
    columns = set(schema.names)
    return list(dict.fromkeys(name if name in columns else _join_struct_path(schema, name) for name in names))


def _join_struct_path(schema: pa.Schema, name: str) -> str:
    """Return the dotted name of a column or field, without the fields inside its first list or map."""
    path = _path(schema, name)
    field = schema.field(path[0])
    parts = [field.name]
    for step in path[1:]:
        if not types.is_struct(field.type):
            break
        field = field.type.field(step)
        parts.append(field.name)
    return ".".join(parts)


def pick_columns(table: pa.Table, names: list[str]) -> pa.Table:
    """Return a table of the named columns and fields, in the order of `names`.

    Raises:
        KeyError: A name does not exist or is ambiguous.
    """
    if table.column_names == names:
        return table
    columns = {name: column_at(table, _path(table.schema, name)) for name in names}
    return pa.table(columns) if columns else table.select([])


def _path(schema: pa.Schema, name: str) -> Path:
    path = find_column(schema, name)
    if path is None:
        raise KeyError(f"column {name} does not exist")
    return path


def column_at(table: pa.Table, path: Path) -> pa.ChunkedArray:
    """Return the column or field at a path, with one value per row; null where a struct on the path is null.

    If the path passes through a list or map, each value is a list; a null list becomes an empty list.
    """
    column = table.column(path[0])
    if len(path) == 1:
        return column
    kind = type_at(table.schema, path)
    return pa.chunked_array([_get_nested(chunk, path[1:]) for chunk in column.chunks], kind)


def _get_nested(array: pa.Array, steps: Path) -> pa.Array:
    if not steps:
        return array
    if types.is_struct(array.type):
        return _get_nested(pc.struct_field(array, [steps[0]]), steps[1:])
    if types.is_map(array.type):
        entries = pa.struct([("key", array.type.key_type), ("value", array.type.item_type)])
        array = array.cast(pa.list_(entries))
    offsets, flat = unnest(array)
    return pa.ListArray.from_arrays(offsets, _get_nested(flat, steps))


def is_list(kind: pa.DataType) -> bool:
    """Return True if an Arrow type is any kind of list."""
    return list_element_type(kind) is not None


def is_text(kind: pa.DataType) -> bool:
    """Return True if an Arrow type is text or bytes; False for dictionary-encoded text, which `plain` resolves."""
    return kind.id in TEXT_TYPE_IDS


def is_number(kind: pa.DataType) -> bool:
    """Return True if an Arrow type is an integer, float, decimal or boolean type."""
    return types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind) or types.is_decimal(kind)


def value_type(kind: pa.DataType) -> pa.DataType:
    """Return the plain type (`plain`) of a column's values; for lists, the plain type of the elements."""
    inner = list_element_type(plain(kind))
    return plain(kind) if inner is None else plain(inner)


@lru_cache(maxsize=1024)
def plain(kind: pa.DataType) -> pa.DataType:
    """Return the type to which `plain_array` converts an array of type `kind`."""
    if isinstance(kind, pa.BaseExtensionType):
        return plain(kind.storage_type)
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return plain(kind.value_type)
    if types.is_string_view(kind):
        return pa.string()
    if types.is_binary_view(kind):
        return pa.binary()
    if types.is_float16(kind):
        return pa.float32()
    if types.is_decimal32(kind) or types.is_decimal64(kind):
        return pa.decimal128(kind.precision, kind.scale)
    return kind


def plain_array(array: pa.Array) -> pa.Array:
    """Return an array of the same values in a type that Arrow's functions and NumPy support.

    Dictionary and run-end encodings, string and binary views, extension types, float16, decimal32 and
    decimal64 are converted. Values in lists are not changed.
    """
    while array.type != plain(array.type):
        if isinstance(array.type, pa.BaseExtensionType):
            array = array.storage
        elif types.is_dictionary(array.type):
            array = array.dictionary_decode()
        elif types.is_run_end_encoded(array.type):
            array = pc.run_end_decode(array)
        else:
            array = array.cast(plain(array.type))
    return array


def to_plain_array(column: pa.ChunkedArray) -> pa.Array:
    """Return a column as a single array of a plain type (`plain_array`)."""
    return plain_array(column.chunk(0) if column.num_chunks == 1 else column.combine_chunks())


def find_common_type(first: pa.DataType | None, second: pa.DataType) -> pa.DataType | None:
    """Return the type to which Arrow promotes both types, or None if there is none; `second` if `first` is None."""
    if first is None or first == second:
        return second
    schemas = [pa.schema([("x", kind)]) for kind in (first, second)]
    try:
        return pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    except (pa.ArrowTypeError, pa.ArrowInvalid):
        return None


def unnest(array: pa.Array) -> tuple[np.ndarray, pa.Array]:
    """Flatten an array of lists. Scalars count as one-element lists, nulls as empty lists.

    Returns:
        Offsets of the n lists, int32 [n + 1], starting at 0; and the values of all lists as a plain array.
    """
    if pa.types.is_list(array.type) and not array.null_count:
        offsets, flat = array.offsets.to_numpy(), array.flatten()
        offsets = offsets - offsets[0] if offsets[0] else offsets
    else:
        nested = is_list(array.type)
        lengths = pc.fill_null(pc.list_value_length(array), 0) if nested else array.is_valid().cast(pa.int32())
        flat = array.flatten() if nested else array.drop_null()
        offsets = np.zeros(len(array) + 1, np.int32)
        np.cumsum(lengths.to_numpy(zero_copy_only=False), out=offsets[1:])
    return offsets, plain_array(flat)


RECORD_BATCH, DICTIONARY_BATCH = 3, 2  # values of MessageHeader in Arrow's format/Message.fbs
VERSION_5 = 4  # value of MetadataVersion; messages of earlier versions may name a compression in custom_metadata


def has_compressed_buffers(stream: bytes | pa.Buffer) -> bool:
    """Return True if an Arrow IPC stream contains, or may contain, compressed buffers.

    Untrusted streams of this kind are not safe to read: Arrow allocates the uncompressed size that a buffer claims.

    Raises:
        pa.ArrowException, OSError, struct.error: The bytes are not a valid stream.
    """
    return any(_is_compressed(message.metadata) for message in pa.ipc.MessageReader.open_stream(stream))


def _is_compressed(metadata: pa.Buffer) -> bool:
    """Return True if RecordBatch.compression is set, or if custom_metadata may name a compression."""
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
