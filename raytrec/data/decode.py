"""Rows of one row group of a Parquet file, decoded. No torch here."""

from __future__ import annotations

from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq

from raytrec.common.errors import DataError
from raytrec.common.storage import open_filesystem
from raytrec.data.faults import retry_read, storage_hint
from raytrec.data.nested import pick, to_read
from raytrec.data.pages import Version, read_rows

_footers: dict[Version, pq.FileMetaData] = {}  # of this process
FOOTER_BYTES = 16 << 20
WHOLE_ROWS = 65_536  # row groups of up to so many rows are decoded whole, and cut then


def decode(path: str, group: int, first: int, rows: int, columns: list[str]) -> pa.Table:
    """Columns of rows [first, first + rows) of a row group.

    Raises:
        DataError: what is wrong with the file; names it and the row group.
    """
    try:
        table = retry_read(path, partial(_read, path, group, first, rows, columns))
        if table.num_rows < rows:
            raise IndexError(
                f"its pages hold fewer than {first + rows:,} rows, and its footer says otherwise"
            )
    except (pa.ArrowException, OSError, IndexError, KeyError, ValueError, RecursionError) as error:
        raise undecodable(error, path, group) from None
    return table


def undecodable(error: Exception, path: str, group: int) -> DataError:
    """The error for a row group that pyarrow cannot decode, or whose storage fails."""
    return DataError(
        f"cannot decode the row group: {(str(error).splitlines() or [type(error).__name__])[0]}",
        where=f"{path}, row group {group}",
        expected=storage_hint(path) + "a whole Parquet file that does not change while it is read",
        do="write or copy the file again, or skip its rows: data.on_error=skip",
    )


def _read(path: str, group: int, first: int, rows: int, columns: list[str]) -> pa.Table:
    filesystem, inner = open_filesystem(path)
    info = filesystem.get_file_info(inner)
    with filesystem.open_input_file(inner) as file:
        version = path, info.size, info.mtime_ns
        footer = _footers.get(version)
        reader = pq.ParquetFile(file, metadata=footer, pre_buffer=True, page_checksum_verification=True)
        if footer is None:
            _remember(version, reader.metadata)
        asked, there = to_read(reader.schema_arrow, columns), reader.metadata.row_group(group).num_rows
        if there < first + rows:
            raise IndexError(f"it has {there:,} rows, and had {first + rows:,} or more before")
        if there <= max(WHOLE_ROWS, 2 * rows):
            table = reader.read_row_group(group, columns=asked, use_threads=False).slice(first, rows)
        else:
            table = read_rows(file, version, reader, group, first, first + rows, asked)
        return pick(table, columns)


def _remember(version: Version, footer: pq.FileMetaData) -> None:
    """Keeps a footer for the file's other row groups; the oldest go when they take too much memory. (Parsed
    for each row group, a footer costs a good part of what decoding does.)"""
    _footers[version] = footer
    while sum(known.serialized_size for known in _footers.values()) > FOOTER_BYTES and len(_footers) > 1:
        del _footers[next(iter(_footers))]
