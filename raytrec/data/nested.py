"""Columns by name where columns hold structs: `user.city` is the field `city` of the column `user`.

A name is first that of a whole column (which may have dots in it), then a path of fields. Lists of structs
and maps give lists: `items.id` of list<struct<id, price>>, `scores.key` and `scores.value` of a map. No torch
here.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

Path = tuple[int, ...]  # a column's place, then those of fields; lists and maps are passed without a step


class Ambiguous(KeyError):
    """A name that stands for more than one column or field."""

    def __init__(self, name: str):
        super().__init__(f"column {name} is there more than once")


def find(schema: pa.Schema, name: str) -> Path | None:
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
    inner = element(kind)
    return _fields(inner) if inner is not None and types.is_struct(inner) else []


def element(kind: pa.DataType) -> pa.DataType | None:
    """What any kind of list holds; None for what is no list."""
    listed = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return kind.value_type if listed or types.is_list_view(kind) or types.is_large_list_view(kind) else None


def leaves(schema: pa.Schema) -> list[str]:
    """Every column; in place of structs, of lists of them and of maps, their fields. A name that stands twice
    is there twice."""
    return [name for field in schema for name in _leaves(field.name, field.type)]


def _leaves(name: str, kind: pa.DataType) -> list[str]:
    fields = _fields(kind)
    return [leaf for f in fields for leaf in _leaves(f"{name}.{f.name}", f.type)] or [name]


def type_at(schema: pa.Schema, path: Path) -> pa.DataType:
    """The type that `column_at` gives."""
    return _type(schema.field(path[0]).type, path[1:])


def _type(kind: pa.DataType, steps: Path) -> pa.DataType:
    if not steps:
        return kind
    inner = _type(_fields(kind)[steps[0]].type, steps[1:])
    return inner if types.is_struct(kind) else pa.list_(inner)


def select(schema: pa.Schema, names: list[str]) -> pa.Schema:
    """The schema that `pick` gives.

    Raises:
        KeyError: a name that is not there, or not once.
    """
    return pa.schema([(name, type_at(schema, _path(schema, name))) for name in names])


def empty_table(schema: pa.Schema) -> pa.Table:
    """No rows of a schema (pyarrow's own empty_table does not know extension types inside of others)."""
    return pa.table([pa.nulls(0, field.type) for field in schema], names=schema.names)


def to_read(schema: pa.Schema, names: list[str]) -> list[str]:
    """What to ask Parquet for, so that `pick` finds the names: fields of structs are read alone, without the
    struct's others; of a list of structs, or a map, the whole column."""
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


def pick(table: pa.Table, names: list[str]) -> pa.Table:
    """The named columns of a table, in this order.

    Raises:
        KeyError: as `select`.
    """
    if table.column_names == names:
        return table
    columns = {name: column_at(table, _path(table.schema, name)) for name in names}
    return pa.table(columns) if columns else table.select([])


def _path(schema: pa.Schema, name: str) -> Path:
    path = find(schema, name)
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
