"""Scan the Parquet files of a folder for the types and statistics of columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby

import pyarrow as pa
import pyarrow.parquet as pq
from rich.progress import Progress

from raytrec.common.errors import DataError, get_first_line
from raytrec.common.formatting import open_console
from raytrec.common.storage import open_filesystem
from raytrec.data.arrow import find_required_columns, pick_columns
from raytrec.data.files.footers import read_footer
from raytrec.data.files.listing import Listing, list_files
from raytrec.data.files.partitions import build_folder_column, parse_folder_values
from raytrec.inspection.column_stats import ColumnStats, pair_with_labels
from raytrec.inspection.column_types import find_common_columns, infer_folder_column_types, unify_columns

MAX_COLUMNS_PER_READ = 100  # limits memory, and lets the progress bar advance within row groups of wide files


@dataclass
class Scan:
    """Statistics of a folder's columns, and the extent of the data that was read.

    Attributes:
        columns: Statistics of each column.
        rows: Number of rows read from the training data.
        whole: True if all rows of training, validation and test data were read.
        inspected_parts: Name → path of validation and test data that were read.
        skipped_parts: Name → reason for validation and test data that were not read.
        listing: Files of the training data, and left-out entries with reasons.
        folders: Keys of key=value folders that apply to all files of the training data.
    """

    columns: list[ColumnStats]
    rows: int
    whole: bool
    inspected_parts: dict[str, str]
    skipped_parts: dict[str, str]
    listing: Listing
    folders: list[str]


def scan_columns(
    uri: str,
    max_rows: int | None,
    also: dict[str, str] | None = None,
    is_label: Callable[[str], bool] = lambda name: False,
) -> Scan:
    """Read the columns of Parquet files, and return their statistics.

    Args:
        uri: Folder or file of training data.
        max_rows: Approximate number of rows to read from each of training, validation and test data; None:
            all rows.
        also: Name → path of validation and test data. Data whose files cannot be read, or lack a label of the
            training data, is skipped.
        is_label: Predicate on column names, True for labels; default: no column is a label.

    Raises:
        DataError: The training data contains no files or no rows, or a file is incomplete.
    """
    listing = list_files(uri, "inspect")
    footers: dict[str | None, dict] = {None: _footers(listing)}
    not_seen: dict[str, str] = {}
    labels = {name for name in find_common_columns(footers[None]) if is_label(name)}
    for part, place in (also or {}).items():
        try:
            footers[part] = _footers(list_files(place, "inspect"))
        except DataError as error:
            not_seen[part] = error.what
            continue
        if missing := labels - find_common_columns(footers[part]):
            not_seen[part] = f"column {', '.join(sorted(missing))} is missing"
            del footers[part]
    kinds = infer_folder_column_types({path: footer for files in footers.values() for path, footer in files.items()})
    columns = unify_columns(footers, kinds)
    groups = {part: _groups(files) for part, files in footers.items()}
    if not sum(rows for *_, rows in groups[None]):
        raise DataError("the data has no rows", where=uri, expected=f"rows in its {len(footers[None])} Parquet files")
    chosen = {part: _choose_row_groups(of, max_rows) for part, of in groups.items()}
    _read_columns(columns, chosen, footers, kinds, [c for c in columns if c.name in labels])
    rows = sum(rows for *_, rows in chosen[None])
    scanned = {part: place for part, place in (also or {}).items() if part in footers}
    in_all = sorted(set.intersection(*(set(parse_folder_values(path)) for path in footers[None])))
    return Scan(columns, rows, chosen == groups, scanned, not_seen, listing, in_all)


def _footers(listing: Listing) -> dict:
    """Return a mapping from path to footer, for all files of a listing."""
    return {path: read_footer(path) for path in listing.files}


def _groups(footers: dict) -> list[tuple[str, int, int]]:
    """Return (path, index of the row group, rows) for all row groups."""
    return [(p, i, f.row_group(i).num_rows) for p, f in footers.items() for i in range(f.num_row_groups)]


def _choose_row_groups(groups: list, max_rows: int | None) -> list:
    """Return evenly spaced row groups with about `max_rows` rows in total."""
    total = sum(rows for *_, rows in groups)
    if max_rows is None or max_rows >= total:
        return groups
    count = max(1, round(len(groups) * max_rows / total))
    return [groups[i * len(groups) // count] for i in range(count)]


def _read_columns(
    columns: list[ColumnStats], chosen: dict, footers: dict, kinds: dict[str, pa.DataType], labels: list[ColumnStats]
) -> None:
    """Read row groups and add them to the statistics, with a progress bar on terminals.

    Args:
        columns: Statistics of each column; changed in place.
        chosen: Name of validation or test data, or None for training data → (path, index of the row group,
            rows) of each row group to read.
        footers: Name as in `chosen` → path → footer.
        kinds: Key of key=value folders that is a column → its type.
        labels: Possible labels, with which other columns are compared.

    Raises:
        DataError: A file cannot be opened, or no column can be read.
    """
    console, errors = open_console(stderr=True), []
    slices = [columns[at : at + MAX_COLUMNS_PER_READ] for at in range(0, len(columns), MAX_COLUMNS_PER_READ)]
    work = [(part, path, i, batch) for part, of in chosen.items() for path, i, _ in of for batch in slices]
    with Progress(console=console, disable=not console.is_terminal, transient=True) as bar:
        steps = bar.track(work, description="reading")
        for (part, path), of_file in groupby(steps, key=lambda step: step[:2]):
            with _open_file(path, footers[part][path]) as reader:
                for *_, index, batch in of_file:
                    usable = [c for c in batch if not c.trouble and (part is None or part in c.stats_by_part)]
                    label_columns = [c for c in labels if part is None and usable and not c.trouble]
                    names = list(dict.fromkeys(column.name for column in [*usable, *label_columns]))
                    stored = [name for name in names if name not in kinds]
                    data = dict(zip(stored, _read(reader, index, stored) if stored else (), strict=True))
                    rows = reader.metadata.row_group(index).num_rows
                    for name in (n for n in names if n not in data):
                        data[name] = pa.chunked_array([build_folder_column(path, name, kinds[name], rows)])
                    errors += [
                        error
                        for column in usable
                        if (error := _add(column, part, data[column.name], f"{path}, row group {index}"))
                    ]
                    # A label in a later slice of columns has no trouble yet if it could not be read.
                    readable = [c for c in label_columns if not (c.trouble or isinstance(data[c.name], Exception))]
                    for column in usable if readable else []:
                        pair_with_labels(column, data, readable)
    if errors and all(column.trouble for column in columns):
        raise errors[0]


def _add(column: ColumnStats, part: str | None, data: pa.ChunkedArray | Exception, where: str) -> DataError | None:
    """Add a row group's column to its statistics, or return an error if the column cannot be read."""
    try:
        if isinstance(data, Exception):
            raise data
        (column if part is None else column.stats_by_part[part]).add(data)
    except Exception as error:  # an unreadable column must not stop the scan of other columns
        first = get_first_line(error)
        column.trouble = f"cannot be read in {where}: {first}"
        return _unreadable_error(first, where)
    return None


@contextmanager
def _open_file(path: str, footer: pq.FileMetaData) -> Iterator[pq.ParquetFile]:
    """Open a file once for all of its row groups, because parsing a large footer is slow."""
    try:
        filesystem, inner = open_filesystem(path)
        file = filesystem.open_input_file(inner)
    except OSError as error:
        raise _unreadable_error(get_first_line(error), path) from None
    with file:
        yield pq.ParquetFile(file, metadata=footer)


def _read(reader: pq.ParquetFile, index: int, names: list[str]) -> list:
    """Return a row group's columns, with an error in place of each column that cannot be read."""
    try:
        return _read_together(reader, index, names)
    except (pa.ArrowException, OSError, KeyError):
        return [_try_read(reader, index, name) for name in names]


def _try_read(reader: pq.ParquetFile, index: int, name: str) -> pa.ChunkedArray | Exception:
    try:
        return _read_together(reader, index, [name])[0]
    except Exception as error:
        return error


def _read_together(reader: pq.ParquetFile, index: int, names: list[str]) -> list[pa.ChunkedArray]:
    table = reader.read_row_group(index, columns=find_required_columns(reader.schema_arrow, names))
    return pick_columns(table, names).columns


def _unreadable_error(why: str, where: str) -> DataError:
    return DataError(
        f"cannot read the row group: {why}",
        where=where,
        expected="a complete Parquet file",
        do="write or copy the file again",
    )
