"""Reads the columns of row groups, a hundred at a time, and adds them to their statistics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import TYPE_CHECKING

import pyarrow as pa

from raytrec.common.errors import DataError
from raytrec.common.storage import open_filesystem
from raytrec.inspection.column_stats import ColumnStats, pair_with_labels

if TYPE_CHECKING:
    import pyarrow.parquet as pq

COLUMNS_AT_ONCE = 100  # of a row group: progress shows on wide files, too, whose row groups take memory


def read_columns(columns: list[ColumnStats], chosen: dict, footers: dict, labels: list[ColumnStats]) -> None:
    """Adds row groups to the statistics, with a bar on terminals.

    Args:
        chosen: part of the data → (file, row group, rows). footers: part → file → footer.
        labels: columns that may be labels, with which others are compared.

    Raises:
        DataError: a file cannot be opened, or no column can be read.
    """
    from rich.console import Console
    from rich.progress import Progress

    console, errors = Console(stderr=True), []
    slices = [columns[at : at + COLUMNS_AT_ONCE] for at in range(0, len(columns), COLUMNS_AT_ONCE)]
    work = [(part, path, i, some) for part, of in chosen.items() for path, i, _ in of for some in slices]
    with Progress(console=console, disable=not console.is_terminal, transient=True) as bar:
        steps = bar.track(work, description="reading")
        for (part, path), of_file in groupby(steps, key=lambda step: step[:2]):
            with _opened(path, footers[part][path]) as reader:
                for *_, index, some in of_file:
                    wanted = [column for column in some if column.is_read_in(part)]
                    beside = [c for c in labels if part is None and wanted and not c.trouble]
                    names = list(dict.fromkeys(column.name for column in [*wanted, *beside]))
                    data = dict(zip(names, _read(reader, index, names), strict=True))
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
        first = _first_line(error)
        column.trouble = f"cannot be read in {where}: {first}"
        return _unreadable(first, where)
    return None


@contextmanager
def _opened(path: str, footer: pq.FileMetaData) -> Iterator[pq.ParquetFile]:
    """A file, opened once for all of its row groups: to parse its footer takes longer the more there are."""
    import pyarrow.parquet as pq

    try:
        filesystem, inner = open_filesystem(path)
        file = filesystem.open_input_file(inner)
    except OSError as error:
        raise _unreadable(_first_line(error), path) from None
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
    from raytrec.data.arrow import pick_columns, to_read

    return pick_columns(
        reader.read_row_group(index, columns=to_read(reader.schema_arrow, names)), names
    ).columns


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _unreadable(why: str, where: str) -> DataError:
    return DataError(
        f"cannot read the row group: {why}",
        where=where,
        expected="a whole Parquet file",
        do="write or copy the file again",
    )
