"""Arrow columns by name, as plain types, as flat arrays.

A name is first that of a whole column (which may have dots in it), then a path of fields. Lists of structs
and maps give lists: `items.id` of list<struct<id, price>>, `scores.key` and `scores.value` of a map. No torch
here.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

Path = tuple[int, ...]  # a column's place, then those of fields; lists and maps are passed without a step


class Ambiguous(KeyError):
    """A name that stands for more than one column or field."""

    def __init__(self, name: str):
        super().__init__(f"column {name} is there more than once")


def find_column(schema: pa.Schema, name: str) -> Path | None:
    """The path of a name, or None.

    Raises:
        Ambiguous: more than one column or field has it.
    """
    exact = schema.get_all_field_indices(name)
    return (exact[0],) if len(exact) == 1 else _find(list(schema), name)


def _find(fields: list[pa.Field], name: str) -> Path | None:
    exact = [i for i, f in enumerate(fields) if f.name == name]
    if len(exact) > 1:
        raise Ambiguous(name)
    if exact:
        return (exact[0],)
    found = []
    for i, field in enumerate(fields):
        if name.startswith(f"{field.name}."):
            inner = _find(_fields(field.type), name[len(field.name) + 1 :])
            found += [(i, *inner)] if inner else []
    if len(found) > 1:
        raise Ambiguous(name)
    return found[0] if found else None


def _fields(kind: pa.DataType) -> list[pa.Field]:
    """The fields of a struct, a map's entries, or of what a list holds."""
    if types.is_map(kind):
        return [pa.field("key", kind.key_type), pa.field("value", kind.item_type)]
    if types.is_struct(kind):
        return [kind.field(i) for i in range(kind.num_fields)]
    inner = list_element(kind)
    return _fields(inner) if inner is not None and types.is_struct(inner) else []


def list_element(kind: pa.DataType) -> pa.DataType | None:
    """What any kind of list holds; None for other types."""
    if not kind.num_fields:  # quicker than to ask for each kind of list
        return None
    listed = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return kind.value_type if listed or types.is_list_view(kind) or types.is_large_list_view(kind) else None


def leaf_names(schema: pa.Schema) -> list[str]:
    """Every column; in place of structs, of lists of them and of maps, their fields. A name that stands twice
    is there twice."""
    return [name for field in schema for name in _leaves(field.name, field.type)]


def _leaves(name: str, kind: pa.DataType) -> list[str]:
    fields = _fields(kind)
    return [leaf for f in fields for leaf in _leaves(f"{name}.{f.name}", f.type)] or [name]


def type_at(schema: pa.Schema, path: Path) -> pa.DataType:
    """The type that `column_at` gives."""
    return _at(pa.nulls(0, schema.field(path[0]).type), path[1:]).type


def select_schema(schema: pa.Schema, names: list[str]) -> pa.Schema:
    """The schema that `pick_columns` gives.

    Raises:
        KeyError: a name that is not there, or not once.
    """
    return pa.schema([(name, type_at(schema, _path(schema, name))) for name in names])


def empty_table(schema: pa.Schema) -> pa.Table:
    """No rows of a schema (pyarrow's own empty_table does not know extension types inside of others)."""
    return pa.table([pa.nulls(0, field.type) for field in schema], names=schema.names)


def to_read(schema: pa.Schema, names: list[str]) -> list[str]:
    """What to ask Parquet for, so that `pick_columns` finds the names: fields of structs are read alone,
    without the struct's others; of a list of structs, or a map, the whole column."""
    whole = set(schema.names)
    if whole.issuperset(names):
        return names
    return list(dict.fromkeys(name if name in whole else _to_read(schema, name) for name in names))


def _to_read(schema: pa.Schema, name: str) -> str:
    """The part of a path that leads through structs only."""
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
    """The named columns of a table, in this order.

    Raises:
        KeyError: as `select_schema`.
    """
    if table.column_names == names:
        return table
    columns = {name: column_at(table, _path(table.schema, name)) for name in names}
    return pa.table(columns) if columns else table.select([])


def _path(schema: pa.Schema, name: str) -> Path:
    path = find_column(schema, name)
    if path is None:
        raise KeyError(f"column {name} is gone")
    return path


def column_at(table: pa.Table, path: Path) -> pa.ChunkedArray:
    """A column, or what is at a path of fields: null wherever a struct on the way is."""
    column = table.column(path[0])
    if len(path) == 1:
        return column
    kind = type_at(table.schema, path)
    return pa.chunked_array([_at(chunk, path[1:]) for chunk in column.chunks], kind)


def _at(array: pa.Array, steps: Path) -> pa.Array:
    if not steps:
        return array
    if types.is_struct(array.type):
        return _at(pc.struct_field(array, [steps[0]]), steps[1:])
    if types.is_map(array.type):
        entries = pa.struct([("key", array.type.key_type), ("value", array.type.item_type)])
        array = array.cast(pa.list_(entries))
    lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(offsets, _at(array.flatten(), steps))


def is_list(kind: pa.DataType) -> bool:
    """Whether an Arrow type is any kind of list."""
    return list_element(kind) is not None


def is_text(kind: pa.DataType) -> bool:
    """Whether an Arrow type is text or bytes."""
    return (
        types.is_string(kind)
        or types.is_large_string(kind)
        or types.is_string_view(kind)
        or types.is_binary(kind)
        or types.is_large_binary(kind)
        or types.is_binary_view(kind)
        or types.is_fixed_size_binary(kind)
    )


def is_number(kind: pa.DataType) -> bool:
    """Whether an Arrow type is one number, or true and false."""
    return (
        types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind) or types.is_decimal(kind)
    )


def value_type(kind: pa.DataType) -> pa.DataType:
    """The type of the ids: in a list, of what it holds; plain."""
    inner = list_element(plain(kind))
    return plain(kind) if inner is None else plain(inner)


@lru_cache(maxsize=1024)
def plain(kind: pa.DataType) -> pa.DataType:
    """The type that `plain_array` gives."""
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
    """The same values in a type that Arrow's functions and NumPy know: no dictionaries, runs, views of text,
    extensions, half floats or short decimals. What lists hold stays as it is."""
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


def one_array(column: pa.ChunkedArray) -> pa.Array:
    """A column as one array of a plain type (kinds.plain_array)."""
    return plain_array(column.chunk(0) if column.num_chunks == 1 else column.combine_chunks())


def unnest(array: pa.Array) -> tuple[np.ndarray, pa.Array]:
    """(offsets int32 [n + 1] from 0, flat values): scalars as lists of one, nulls as empty lists."""
    if pa.types.is_list(array.type) and not array.null_count:
        offsets, flat = array.offsets.to_numpy(), array.flatten()
        offsets = offsets - offsets[0] if offsets[0] else offsets
    else:
        nested = is_list(array.type)
        lengths = (
            pc.fill_null(pc.list_value_length(array), 0) if nested else array.is_valid().cast(pa.int32())
        )
        flat = array.flatten() if nested else array.drop_null()
        offsets = np.zeros(len(array) + 1, np.int32)
        np.cumsum(lengths.to_numpy(zero_copy_only=False), out=offsets[1:])
    return offsets, plain_array(flat)
