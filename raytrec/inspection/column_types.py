"""Find the columns of a folder's files, and a common type of each column over all files."""

from __future__ import annotations

import re
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import types as t

from raytrec.data.arrow import (
    AmbiguousColumnError,
    find_column,
    is_list,
    is_text,
    leaf_names,
    plain,
    type_at,
    value_type,
)
from raytrec.data.files.partitions import collect_folder_values, infer_folder_types, parse_folder_values
from raytrec.inspection.column_stats import NUMBERS, ColumnStats

# Folder keys and values that are times. They are not features, because new data has new values.
TIMES = {"date", "day", "ds", "dt", "hour", "hr", "minute", "month", "quarter", "time", "ts", "week", "year"}
DATE_PATTERN = re.compile(r"(19|20)\d\d-?[01]\d(-?[0-3]\d|$)|__|$")


def find_common_columns(footers: dict) -> set[str]:
    """Return the columns that all files contain, including the keys of their key=value folders."""
    names = ({*leaf_names(f.schema.to_arrow_schema()), *parse_folder_values(path)} for path, f in footers.items())
    return set.intersection(*names)


def infer_folder_column_types(footers: dict) -> dict[str, pa.DataType]:
    """Return a mapping from key to type, for the keys of key=value folders that become columns.

    A key becomes a column if it has several values, neither the key nor all values are times, and at least one
    file lacks a column of this name.
    """
    values = {key: {value or "" for value in texts} for key, texts in collect_folder_values(footers).items()}
    if not values:
        return {}
    file_columns = set.intersection(*(set(leaf_names(f.schema.to_arrow_schema())) for f in footers.values()))
    not_columns = file_columns | {
        key for key, texts in values.items() if key in TIMES or all(map(DATE_PATTERN.match, texts))
    }
    kinds = infer_folder_types(footers)
    return {key: kind for key, kind in kinds.items() if len(values[key]) > 1 and key not in not_columns}


def _arrow(path: str, footer: pq.FileMetaData, kinds: dict[str, pa.DataType]) -> pa.Schema:
    """Return the Arrow schema of a file, extended by the keys of its folders that are columns."""
    arrow = footer.schema.to_arrow_schema()
    added = [pa.field(key, kinds[key]) for key in parse_folder_values(path) if key in kinds]
    return pa.schema([*(field for field in arrow if field.name not in kinds), *added])


def unify_columns(footers: dict[str | None, dict], kinds: dict[str, pa.DataType]) -> list[ColumnStats]:
    """Return empty statistics of every column, including struct fields, with types common to all files."""
    schemas = {
        part: {path: _arrow(path, footer, kinds) for path, footer in files.items()} for part, files in footers.items()
    }
    names = dict.fromkeys(
        name for files in schemas.values() for schema in files.values() for name in leaf_names(schema)
    )
    return [_column(name, schemas) for name in names]


def _column(name: str, schemas: dict[str | None, dict]) -> ColumnStats:
    types, missing, ambiguous = {}, {part: [] for part in schemas}, []
    for part, path, schema in ((part, *entry) for part, files in schemas.items() for entry in files.items()):
        try:
            place = find_column(schema, name)
        except AmbiguousColumnError:
            ambiguous.append(path)
            first = next(iter(schema.get_all_field_indices(name)), None)
            types.setdefault("unknown" if first is None else schema.field(first).type, path)
            continue
        if place is None:
            missing[part].append(path)
        else:
            types.setdefault(type_at(schema, place), path)
    base, is_list, mixed = _unify_types([] if ambiguous else list(types))
    kind = next((t for t in types if ambiguous or _base_type(t)[0] != "null"), next(iter(types)))
    column = ColumnStats(name, str(kind), base, is_list, {str(t): p for t, p in types.items()}, mixed)
    column.stats_by_part = {
        part: replace(column, few=None, stats_by_part={}) for part in schemas if part and not missing[part]
    }
    lacking = [path for paths in missing.values() for path in paths]
    if ambiguous:
        column.trouble = f"several columns have this name in {_format_paths(ambiguous)}"
    elif missing[None]:
        column.trouble = f"the column is missing in {_format_paths(lacking)}"
    elif base == "other" and len(types) > 1:
        column.trouble = f"its type differs: {'; '.join(f'{t} in {p}' for t, p in column.types.items())}"
    elif base == "other":
        column.trouble = f"type {kind} is not supported"
    elif lacking:
        column.lacking = f"the column is missing in {_format_paths(lacking)}"
    return column


def _format_paths(paths: list[str]) -> str:
    return paths[0] + (f" and {len(paths) - 1:,} other files" if len(paths) > 1 else "")


def _unify_types(types: list) -> tuple[str, bool, bool]:
    """Return the common base type of a column, whether it is a list, and whether values must be cast."""
    kinds = [_base_type(kind) for kind in types]
    bases = {base for base, _ in kinds} - {"null"}
    is_list = any(listed for _, listed in kinds)
    if len(bases) <= 1:
        return (next(iter(bases), "null"), is_list, False)
    if bases <= NUMBERS:
        return ("integer" if bases <= {"integer", "bool"} else "float"), is_list, True
    if bases <= NUMBERS | {"text"}:
        return "text", is_list, True
    return "other", is_list, False


def _base_type(kind) -> tuple[str, bool]:
    """Return the base type of an Arrow type or of its list elements, and whether the type is a list."""
    value, listed = value_type(kind), is_list(plain(kind))
    tests = {
        "integer": t.is_integer,
        "float": t.is_floating,
        "bool": t.is_boolean,
        "decimal": t.is_decimal,
        "text": is_text,
        "null": t.is_null,
        "time": lambda k: t.is_temporal(k) and not t.is_interval(k),
    }
    return next((base for base, fits in tests.items() if fits(value)), "other"), listed
