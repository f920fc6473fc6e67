"""Scan Parquet files for their columns, the columns' common types over all files, and the columns' statistics."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import groupby

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import types as t
from rich.progress import Progress

from raytrec.common.errors import DataError, get_first_line
from raytrec.common.formatting import format_count
from raytrec.common.storage import open_filesystem
from raytrec.common.terminal import open_console
from raytrec.data.arrow import (
    AmbiguousColumnError,
    find_column,
    find_required_columns,
    is_list,
    is_text,
    leaf_names,
    pick_columns,
    plain,
    type_at,
    value_type,
)
from raytrec.data.files.footers import read_footer
from raytrec.data.files.listing import Listing, list_files
from raytrec.data.files.partitions import (
    build_folder_column,
    collect_folder_values,
    infer_folder_type,
    parse_folder_values,
)
from raytrec.inspection.column_stats import NUMBERS, ColumnStats, pair_with_labels

MAX_COLUMNS_PER_READ = 100  # limits memory, and lets the progress bar advance within row groups of wide files
# Folder keys and values that are times. They are not features, because new data has new values.
TIMES = {"date", "day", "ds", "dt", "hour", "hr", "minute", "month", "quarter", "time", "ts", "week", "year"}
DATE_PATTERN = re.compile(r"(19|20)\d\d-?[01]\d(-?[0-3]\d|$)|__|$")
Footers = dict[str, pq.FileMetaData]  # path of a file → its footer


@dataclass
class Scan:
    """Statistics of a folder's columns, and the extent of the data that was read.

    Attributes:
        columns: Statistics of each column.
        rows: Number of rows read from the training data.
        whole: True if all rows of the training data and of `inspected_parts` were read.
        inspected_parts: Name (valid, test, …) → path, for validation and test data that were read.
        skipped_parts: Name → reason, for validation and test data that were not read.
        listing: Files of the training data, and left-out entries with reasons.
        folders: Keys of key=value folders that are in the path of every file of the training data, sorted.
    """

    columns: list[ColumnStats]
    rows: int
    whole: bool
    inspected_parts: dict[str, str]
    skipped_parts: dict[str, str]
    listing: Listing
    folders: list[str]


def scan_columns(uri: str, max_rows: int | None, also: dict[str, str], is_label: Callable[[str], bool]) -> Scan:
    """Read the columns of Parquet files, and return their statistics. A terminal shows a progress bar meanwhile.

    Args:
        uri: Folder or file of training data.
        max_rows: Approximate number of rows to read from each of training, validation and test data; None: all.
        also: Name → path of validation and test data. Data that cannot be listed, whose footers cannot be read, or
            that lacks a label of the training data, is skipped.
        is_label: Function that returns True if a column name may be that of a label.

    Raises:
        DataError: The training data has no files, rows or readable columns, a footer of the training data cannot be
            read, or a file cannot be opened.
    """
    listing = list_files(uri, "path")
    footers: dict[str | None, Footers] = {None: {path: read_footer(path) for path in listing.files}}
    not_seen: dict[str, str] = {}
    labels = {name for name in _find_common_columns(footers[None]) if is_label(name)}
    for part, place in also.items():
        try:
            files = {path: read_footer(path) for path in list_files(place, "path").files}
        except DataError as error:
            not_seen[part] = error.what
            continue
        if missing := labels - _find_common_columns(files):
            not_seen[part] = f"some of its files lack column {' and column '.join(sorted(missing))}"
        else:
            footers[part] = files
    kinds = _infer_folder_columns({path: each for files in footers.values() for path, each in files.items()}, labels)
    columns = _unify_columns(footers, kinds)
    groups = {part: _groups(files) for part, files in footers.items()}
    if not sum(rows for *_, rows in groups[None]):
        raise DataError("the data has no rows", where=uri, expected=f"at least one row in {listing}")
    chosen = {part: _choose_row_groups(of, max_rows) for part, of in groups.items()}
    _read_columns(columns, chosen, footers, kinds, [c for c in columns if c.name in labels])
    rows = sum(rows for *_, rows in chosen[None])
    scanned = {part: also[part] for part in footers if part}
    in_all = sorted(set.intersection(*(set(parse_folder_values(path)) for path in footers[None])))
    return Scan(columns, rows, chosen == groups, scanned, not_seen, listing, in_all)


def _find_common_columns(footers: Footers) -> set[str]:
    """Return the names of columns that all files contain, including the keys of their key=value folders."""
    names = ({*leaf_names(f.schema.to_arrow_schema()), *parse_folder_values(path)} for path, f in footers.items())
    return set.intersection(*names)


def _infer_folder_columns(footers: Footers, labels: set[str]) -> dict[str, pa.DataType]:
    """Return a mapping from each key of key=value folders that becomes a column to its type.

    A key becomes a column if it is in `labels` or has several values, neither its name nor all values denote times, and
    at least one file lacks a column of this name.
    """
    folder_values, kinds = collect_folder_values(footers), {}
    if not folder_values:
        return {}
    file_columns = set.intersection(*(set(leaf_names(f.schema.to_arrow_schema())) for f in footers.values()))
    for key, texts in folder_values.items():
        values = {text or "" for text in texts}
        is_time = key in TIMES or all(map(DATE_PATTERN.match, values))
        if (len(values) > 1 or key in labels) and not is_time and key not in file_columns:
            kinds[key] = infer_folder_type(texts)
    return kinds


def _unify_columns(footers: dict[str | None, Footers], kinds: dict[str, pa.DataType]) -> list[ColumnStats]:
    """Return statistics without rows for every column of any file, where structs are replaced by their fields."""
    schemas = []
    for part, files in footers.items():
        for path, footer in files.items():
            added = [pa.field(key, kinds[key]) for key in parse_folder_values(path) if key in kinds]
            stored = (field for field in footer.schema.to_arrow_schema() if field.name not in kinds)
            schemas.append((part, path, pa.schema([*stored, *added])))
    names = dict.fromkeys(name for *_, schema in schemas for name in leaf_names(schema))
    return [_column(name, schemas, name in kinds) for name in names]


def _column(name: str, schemas: list[tuple[str | None, str, pa.Schema]], is_folder_key: bool) -> ColumnStats:
    """Return statistics without rows for a column, with its common type or the reason why it cannot be used.

    `schemas` contains (name of validation or test data, or None for training data; path; schema) for each file.
    """
    types, missing, ambiguous = {}, {part: [] for part, *_ in schemas}, []
    for part, path, schema in schemas:
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
    column = ColumnStats(name, str(kind), base, is_list, is_folder_key, {str(t): p for t, p in types.items()}, mixed)
    column.stats_by_part = {
        part: replace(column, few=None, stats_by_part={}) for part in missing if part and not missing[part]
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
    return paths[0] + (f" and {format_count(len(paths) - 1, 'other file')}" if len(paths) > 1 else "")


def _unify_types(types: list) -> tuple[str, bool, bool]:
    """Return ColumnStats.base for a column's types, True if some types are lists, and True if values must be cast."""
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
    """Return (base type of an Arrow type or of its list elements, True if the type is a list)."""
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


def _groups(footers: dict) -> list[tuple[str, int, int]]:
    """Return (path, index of the row group, number of rows) for all row groups."""
    return [(p, i, f.row_group(i).num_rows) for p, f in footers.items() for i in range(f.num_row_groups)]


def _choose_row_groups(groups: list, max_rows: int | None) -> list:
    """Return evenly spaced row groups, at least one, with about `max_rows` rows in total; None: all row groups."""
    total = sum(rows for *_, rows in groups)
    if max_rows is None or max_rows >= total:
        return groups
    count = max(1, round(len(groups) * max_rows / total))
    return [groups[i * len(groups) // count] for i in range(count)]


def _read_columns(
    columns: list[ColumnStats], chosen: dict, footers: dict, kinds: dict[str, pa.DataType], labels: list[ColumnStats]
) -> None:
    """Read row groups and add them to the columns' statistics; show a progress bar on a terminal.

    Args:
        columns: Statistics of each column; changed in place.
        chosen: Name of validation or test data, or None for training data → (path, index of the row group,
            rows) of each row group to read.
        footers: Name as in `chosen` → path → footer.
        kinds: Key of key=value folders that is a column → its type.
        labels: Statistics of possible labels, with which other columns are compared.

    Raises:
        DataError: A file cannot be opened, or no column can be read.
    """
    console, errors = open_console(stderr=True), []
    slices = [columns[at : at + MAX_COLUMNS_PER_READ] for at in range(0, len(columns), MAX_COLUMNS_PER_READ)]
    work = [(part, path, i, batch) for part, of in chosen.items() for path, i, _ in of for batch in slices]
    with Progress(console=console, disable=not console.is_terminal, transient=True) as bar:
        for (part, path), of_file in groupby(bar.track(work, description="reading"), key=lambda step: step[:2]):
            try:
                filesystem, inner = open_filesystem(path)
                file = filesystem.open_input_file(inner)
            except OSError as error:
                raise _unreadable_error("open the file", error, path) from None
            with file:  # opened once for all row groups, because parsing a large footer is slow
                reader = pq.ParquetFile(file, metadata=footers[part][path])
                for *_, index, batch in of_file:
                    usable = [c for c in batch if not c.trouble and (part is None or part in c.stats_by_part)]
                    label_columns = [c for c in labels if part is None and usable and not c.trouble]
                    names = list(dict.fromkeys(column.name for column in [*usable, *label_columns]))
                    stored = [name for name in names if name not in kinds]
                    data = dict(zip(stored, _read(reader, index, stored) if stored else (), strict=True))
                    rows = reader.metadata.row_group(index).num_rows
                    for name in (n for n in names if n not in data):
                        data[name] = pa.chunked_array([build_folder_column(path, name, kinds[name], rows)])
                    for column in usable:
                        errors += _add(column, part, data[column.name], f"{path}, row group {index}")
                    # A label in a later slice of columns has no trouble yet if it could not be read.
                    readable = [c for c in label_columns if not (c.trouble or isinstance(data[c.name], Exception))]
                    for column in usable if readable else []:
                        pair_with_labels(column, data, readable)
    if errors and all(column.trouble for column in columns):
        raise errors[0]


def _add(column: ColumnStats, part: str | None, data: pa.ChunkedArray | Exception, where: str) -> list[DataError]:
    """Add a row group's values to a column's statistics; if this fails, set `trouble` and return [error], else []."""
    try:
        if isinstance(data, Exception):
            raise data
        (column if part is None else column.stats_by_part[part]).add(data)
    except Exception as error:  # an unreadable column must not stop the scan of other columns
        column.trouble = f"cannot be read in {where}: {get_first_line(error)}"
        return [_unreadable_error(f"read column '{column.name}'", error, where)]
    return []


def _read(reader: pq.ParquetFile, index: int, names: list[str]) -> list[pa.ChunkedArray | Exception]:
    """Return columns of row group `index` in the order of `names`, with an error for each that cannot be read."""
    try:
        table = reader.read_row_group(index, columns=find_required_columns(reader.schema_arrow, names))
        return pick_columns(table, names).columns
    except Exception as error:
        return [error] if len(names) == 1 else [_read(reader, index, [name])[0] for name in names]


def _unreadable_error(task: str, error: Exception, where: str) -> DataError:
    return DataError(
        f"cannot {task}: {get_first_line(error)}",
        where=where,
        expected="a complete and readable Parquet file",
        do="check that the file can be read; if it is damaged, write or copy it again",
    )
