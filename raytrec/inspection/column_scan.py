"""Types and statistics of a folder's columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby

import pyarrow as pa
import pyarrow.parquet as pq
from rich.progress import Progress

from raytrec.common.errors import DataError, first_line
from raytrec.common.storage import open_filesystem
from raytrec.common.terminal import open_console
from raytrec.data.arrow import (
    pick_columns,
    to_read,
)
from raytrec.data.footers import read_footer
from raytrec.data.listing import Listing, list_files
from raytrec.data.partitions import folder_column, in_folders
from raytrec.inspection.column_stats import ColumnStats, pair_with_labels
from raytrec.inspection.column_types import agreed_columns, common_names, folder_kinds

COLUMNS_AT_ONCE = 100  # of a row group: progress shows on wide files, too, whose row groups take memory


@dataclass
class Scan:
    """What was looked at.

    Attributes:
        rows: of the training data that were looked at; whole: whether these, and the others', are all.
        also: name → place of validation and test data that was looked at.
        not_seen: name → why it was not.
        listing: files of the training data, and why others are left out.
        folders: keys of the folders key=value that all files of the training data are in.
    """

    columns: list[ColumnStats]
    rows: int
    whole: bool
    also: dict[str, str]
    not_seen: dict[str, str]
    listing: Listing
    folders: list[str]


def scan_columns(
    uri: str,
    max_rows: int | None,
    also: dict[str, str] | None = None,
    is_label: Callable[[str], bool] = lambda name: False,
) -> Scan:
    """Statistics of every column.

    Args:
        also: name → place of validation and test data; what has no Parquet, or no labels, is none.
        is_label: whether a column of this name is one.

    Raises:
        DataError: nothing there, no rows, or a file that is not whole.
    """
    listing = list_files(uri, "inspect")
    footers: dict[str | None, dict] = {None: _footers(listing)}
    not_seen: dict[str, str] = {}
    labels = {name for name in common_names(footers[None]) if is_label(name)}
    for part, place in (also or {}).items():
        try:
            footers[part] = _footers(list_files(place, "inspect"))
        except DataError as error:
            not_seen[part] = error.what
            continue
        if missing := labels - common_names(footers[part]):
            not_seen[part] = f"it has no column {', '.join(sorted(missing))}"
            del footers[part]
    kinds = folder_kinds({path: footer for files in footers.values() for path, footer in files.items()})
    columns = agreed_columns(footers, kinds)
    groups = {part: _groups(files) for part, files in footers.items()}
    if not sum(rows for *_, rows in groups[None]):
        raise DataError(
            "there are no rows", where=uri, expected=f"rows in its {len(footers[None])} Parquet files"
        )
    chosen = {part: _spread(of, max_rows) for part, of in groups.items()}
    _read_columns(columns, chosen, footers, kinds, [c for c in columns if c.name in labels])
    rows = sum(rows for *_, rows in chosen[None])
    seen = {part: place for part, place in (also or {}).items() if part in footers}
    in_all = sorted(set.intersection(*(set(in_folders(path)) for path in footers[None])))
    return Scan(columns, rows, chosen == groups, seen, not_seen, listing, in_all)


def _footers(listing: Listing) -> dict:
    """Return the footer of each file."""
    return {path: read_footer(path) for path in listing.files}


def _groups(footers: dict) -> list[tuple[str, int, int]]:
    """(file, row group, rows)."""
    return [(p, i, f.row_group(i).num_rows) for p, f in footers.items() for i in range(f.num_row_groups)]


def _spread(groups: list, max_rows: int | None) -> list:
    """Row groups, evenly spread, that hold about max_rows rows."""
    total = sum(rows for *_, rows in groups)
    if max_rows is None or max_rows >= total:
        return groups
    count = max(1, round(len(groups) * max_rows / total))
    return [groups[i * len(groups) // count] for i in range(count)]


def _read_columns(
    columns: list[ColumnStats],
    chosen: dict,
    footers: dict,
    kinds: dict[str, pa.DataType],
    labels: list[ColumnStats],
) -> None:
    """Adds row groups to the statistics, with a bar on terminals.

    Args:
        chosen: part of the data → (file, row group, rows). footers: part → file → footer.
        kinds: types of columns in folders' names.
        labels: columns that may be labels, with which others are compared.

    Raises:
        DataError: a file cannot be opened, or no column can be read.
    """
    console, errors = open_console(stderr=True), []
    slices = [columns[at : at + COLUMNS_AT_ONCE] for at in range(0, len(columns), COLUMNS_AT_ONCE)]
    work = [(part, path, i, some) for part, of in chosen.items() for path, i, _ in of for some in slices]
    with Progress(console=console, disable=not console.is_terminal, transient=True) as bar:
        steps = bar.track(work, description="reading")
        for (part, path), of_file in groupby(steps, key=lambda step: step[:2]):
            with _opened(path, footers[part][path]) as reader:
                for *_, index, some in of_file:
                    wanted = [c for c in some if not c.trouble and (part is None or part in c.elsewhere)]
                    beside = [c for c in labels if part is None and wanted and not c.trouble]
                    names = list(dict.fromkeys(column.name for column in [*wanted, *beside]))
                    held = [name for name in names if name not in kinds]
                    data = dict(zip(held, _read(reader, index, held) if held else (), strict=True))
                    rows = reader.metadata.row_group(index).num_rows
                    for name in (n for n in names if n not in data):
                        data[name] = pa.chunked_array([folder_column(path, name, kinds[name], rows)])
                    errors += [
                        error
                        for column in wanted
                        if (error := _add(column, part, data[column.name], f"{path}, row group {index}"))
                    ]
                    for column in wanted if beside else []:
                        pair_with_labels(column, data, [c for c in beside if not c.trouble])
    if errors and all(column.trouble for column in columns):
        raise errors[0]


def _add(
    column: ColumnStats, part: str | None, data: pa.ChunkedArray | Exception, where: str
) -> DataError | None:
    """Adds a row group's column; what is wrong with it."""
    try:
        if isinstance(data, Exception):
            raise data
        (column if part is None else column.elsewhere[part]).add(data)
    except Exception as error:  # whatever it is: one column must not stop the look at the others
        first = first_line(error)
        column.trouble = f"cannot be read in {where}: {first}"
        return _unreadable(first, where)
    return None


@contextmanager
def _opened(path: str, footer: pq.FileMetaData) -> Iterator[pq.ParquetFile]:
    """A file, opened once for all of its row groups: to parse its footer takes longer the more there are."""
    try:
        filesystem, inner = open_filesystem(path)
        file = filesystem.open_input_file(inner)
    except OSError as error:
        raise _unreadable(first_line(error), path) from None
    with file:
        yield pq.ParquetFile(file, metadata=footer)


def _read(reader: pq.ParquetFile, index: int, names: list[str]) -> list:
    """A row group's columns, or for each what is wrong with it."""
    try:
        return _read_together(reader, index, names)
    except (pa.ArrowException, OSError, KeyError):
        return [_attempt(reader, index, name) for name in names]


def _attempt(reader: pq.ParquetFile, index: int, name: str) -> pa.ChunkedArray | Exception:
    try:
        return _read_together(reader, index, [name])[0]
    except Exception as error:
        return error


def _read_together(reader: pq.ParquetFile, index: int, names: list[str]) -> list[pa.ChunkedArray]:
    table = reader.read_row_group(index, columns=to_read(reader.schema_arrow, names))
    return pick_columns(table, names).columns


def _unreadable(why: str, where: str) -> DataError:
    return DataError(
        f"cannot read the row group: {why}",
        where=where,
        expected="a whole Parquet file",
        do="write or copy the file again",
    )
