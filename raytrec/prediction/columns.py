"""Columns that predictions carry over from their input. This module does not import torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from raytrec.common.errors import ConfigError, DataError, make_unknown_word_error
from raytrec.config.features import resolve_input_columns, select_needed_transforms
from raytrec.config.transforms import Transform
from raytrec.data.arrow import empty_table, find_column, leaf_names, select_schema, type_at
from raytrec.data.fragments import read_footer
from raytrec.data.order import Part
from raytrec.data.pages.decode import decode_columns
from raytrec.data.transform import Draw, apply_transforms

MAX_CACHED_SCHEMAS = 8  # maximum number of files whose schemas are cached


@dataclass(frozen=True)
class CarriedColumns:
    """Columns that predictions carry over from their input.

    A column is read from the files or the names of their key=value folders. If neither contains the column, the
    column is created by data.transforms.

    Attributes:
        names: Column names, in order; struct fields are named as in a schema, such as `user.id`.
        transforms: Transforms of the run.
        folders: Key in the names of key=value folders → type of its values.
        code: Folder from which modules of transforms can be imported, in addition to Python's path; None: no folder.
    """

    names: tuple[str, ...]
    transforms: tuple[Transform, ...] = ()
    folders: Mapping[str, pa.DataType] = field(default_factory=dict)
    code: str | None = None
    _schemas: dict[str, tuple[pa.Schema, dict[str, pa.DataType]]] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def schema(self, uri: str) -> pa.Schema:
        """Return the schema of the carried columns of a file, without dictionary types.

        Raises:
            DataError: A column does not exist, or the file contains it twice.
        """
        if not self.names:
            return pa.schema([])
        arrow, _ = self._read_schema(uri)
        raw, created, transforms, sources = self._split_columns(arrow)
        kinds = {name: type_at(arrow, find_column(arrow, name)) for name in raw}
        if created:
            outputs = apply_transforms(empty_table(select_schema(arrow, sources)), transforms, uri, self.code)
            kinds |= {name: outputs.schema.field(name).type for name in created}
        if missing := [name for name in self.names if name not in kinds]:
            available = leaf_names(arrow)
            what = f"column '{missing[0]}' does not exist in the input"
            do = "correct --columns (default: data.reserve_columns of the run)"
            raise make_unknown_word_error(what, missing[0], available, uri, do=do, kind=DataError)
        return pa.schema([(name, _unwrap_dictionary(kinds[name])) for name in self.names])

    def read(self, part: Part) -> pa.Table:
        """Read the carried columns of a part of a row group, with the types of `schema`.

        Raises:
            DataError: The columns cannot be decoded.
        """
        schema, (arrow, folders) = self.schema(part.path), self._read_schema(part.path)
        raw, created, transforms, sources = self._split_columns(arrow)
        names = list(dict.fromkeys([*raw, *sources]))
        table = decode_columns(part.path, part.group, part.first, part.rows, names, folders)
        columns = {name: table[name] for name in raw}
        if created:
            where, draw = f"{part.path}, row group {part.group}", Draw(first=part.number)
            outputs = apply_transforms(table.select(sources), transforms, where, self.code, draw)
            columns |= {name: outputs[name] for name in created}
        return pa.table([columns[name].cast(schema.field(name).type) for name in schema.names], schema)

    def _read_schema(self, uri: str) -> tuple[pa.Schema, dict[str, pa.DataType]]:
        """Return the schema of a file including columns from its folders, and the types of these columns."""
        if uri not in self._schemas:
            if len(self._schemas) >= MAX_CACHED_SCHEMAS:
                self._schemas.clear()
            arrow = read_footer(uri).schema.to_arrow_schema()
            added = {name: kind for name, kind in self.folders.items() if find_column(arrow, name) is None}
            self._schemas[uri] = pa.schema([*arrow, *map(pa.field, added, added.values())]), added
        return self._schemas[uri]

    def _split_columns(self, arrow: pa.Schema) -> tuple[list[str], list[str], tuple[Transform, ...], list[str]]:
        """Return (columns that a file or its folders contain, columns that transforms create, transforms, inputs)."""
        written = {name for transform in self.transforms for name in transform.writes}
        raw = [name for name in self.names if find_column(arrow, name) is not None]
        created = [name for name in self.names if name not in raw and name in written]
        transforms = select_needed_transforms(self.transforms, created)
        return raw, created, transforms, resolve_input_columns(transforms, created)


def _unwrap_dictionary(kind: pa.DataType) -> pa.DataType:
    """Return the value type of a dictionary type, so that all parts of a file have the same type; keep other types."""
    return _unwrap_dictionary(kind.value_type) if pa.types.is_dictionary(kind) else kind


def split_names(column_options: Sequence[str]) -> list[str]:
    """Return the column names in the values of --columns; a value contains one or more names, separated by commas."""
    return [name.strip() for each in column_options for name in each.split(",") if name.strip()]


def choose_columns(requested_columns: Sequence[str] | None, carry: Sequence[str], scores: Sequence[str]) -> list[str]:
    """Return the names of the columns to carry over.

    Args:
        requested_columns: Values of --columns (see `split_names`); None: `carry` is returned.
        carry: Default columns, which are data.reserve_columns of the run.
        scores: Names of the score columns.

    Raises:
        ConfigError: A column is named twice, or has the name of a score column.
    """
    names = list(carry) if requested_columns is None else split_names(requested_columns)
    if repeated := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"column '{min(repeated)}' is repeated", where="--columns", expected="unique names")
    if conflicts := set(names) & set(scores):
        raise ConfigError(
            f"column '{min(conflicts)}' conflicts with a score column of the same name",
            where="--columns",
            expected=f"names other than {', '.join(scores)}",
            do="rename the column in the input or the task",
        )
    return names
