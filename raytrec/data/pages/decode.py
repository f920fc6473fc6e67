"""Decode the rows of a row group, and record skipped rows. Does not import torch."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from raytrec.common.errors import DataError, convert_os_errors, get_first_line
from raytrec.common.reading import retry_read, storage_hint
from raytrec.common.storage import open_filesystem
from raytrec.data.arrow import find_required_columns, pick_columns
from raytrec.data.files.partitions import build_folder_column
from raytrec.data.pages import FileVersion, read_rows
from raytrec.data.pages.chunks import DamagedPageError

SKIPPED_ROWS_FILE = "skipped.jsonl"  # file in the run folder that lists skipped rows
_footers: dict[FileVersion, pq.FileMetaData] = {}  # footer of each file version, shared by all threads
_lock = threading.Lock()
MAX_FOOTER_CACHE_BYTES = 16 << 20
MAX_OPEN_FILES = 8  # per thread
MAX_FULL_DECODE_ROWS = 65_536  # row groups with at most this many rows, or twice the rows to read, are decoded fully


@dataclass(frozen=True)
class ReadErrorPolicy:
    """Treatment of bad rows, which cannot be read or violate the schema (data.on_error).

    Attributes:
        skip: True to skip bad rows; False to raise an error.
        log: File on storage shared by all nodes, to which each skip appends a JSON line {what, where, rows};
            None: skips are not recorded.
    """

    skip: bool = False
    log: str | None = None

    def leave_out(self, error: DataError, rows: int | None) -> None:
        """Record rows that are skipped because of an error; raise the error if `skip` is False.

        Args:
            error: Error of the rows.
            rows: Number of rows; None: unknown.

        Raises:
            DataError: `error` itself, if `skip` is False.
            RunError: The log cannot be written.
        """
        if not self.skip:
            raise error
        if self.log:
            # Processes append short lines atomically.
            with convert_os_errors("cannot record skipped rows", where=self.log), open(self.log, "ab") as file:
                line = json.dumps({"what": error.what, "where": error.where, "rows": rows}) + "\n"
                file.write(line.encode())


def decode_columns(
    path: str, group: int, first: int, rows: int, names: list[str], folders: Mapping[str, pa.DataType | None] = {}
) -> pa.Table:
    """Return columns for rows [first, first + rows) of a row group, from the file and from the names of its folders.

    Args:
        path: Path or URI of the file.
        group: Index of the row group.
        first: Index of the first row in the row group.
        rows: Number of rows.
        names: Names of the columns and struct fields, in the order of the result.
        folders: Column → type, for columns read from folder names (ResolvedReadPlan.folders); default: all
            columns are in the file.

    Raises:
        DataError: The file is damaged, has changed or lacks a column, or the storage fails.
    """
    stored = [name for name in names if name not in folders]
    try:
        read = partial(_read, path, group, first, rows, stored)
        table = retry_read(path, read) if stored else pa.table([pa.nulls(rows)], [""])
        if table.num_rows < rows:
            raise IndexError(f"the pages contain fewer rows than the footer claims ({first + rows:,} or more)")
    except (DamagedPageError, pa.ArrowException, OSError, IndexError, KeyError, ValueError, RecursionError) as error:
        raise DataError(
            f"cannot decode the row group: {get_first_line(error)}",
            where=f"{path}, row group {group}",
            expected=storage_hint(path) + "a complete Parquet file with all required columns, which does not change",
            do="write or copy the file again; in new runs, evaluations and predictions, data.on_error=skip skips its "
            "rows, except for items",
        ) from None
    for name in names:
        if name in folders:
            table = table.append_column(name, build_folder_column(path, name, folders[name], rows))
    return table.select(names)


def _read(path: str, group: int, first: int, rows: int, columns: list[str]) -> pa.Table:
    filesystem, inner = open_filesystem(path)
    info = filesystem.get_file_info(inner)
    if info.type == fs.FileType.NotFound:
        _open_files.files.pop(path, None)
        raise FileNotFoundError(f"the file no longer exists: {path}")
    version = path, info.size, info.mtime_ns
    try:
        file, reader = _open_cached(version, lambda: filesystem.open_input_file(inner))
        required_columns = find_required_columns(reader.schema_arrow, columns)
        group_rows = reader.metadata.row_group(group).num_rows
        if group_rows < first + rows:
            raise IndexError(f"it has {group_rows:,} rows, but previously had {first + rows:,} or more")
        if group_rows <= max(MAX_FULL_DECODE_ROWS, 2 * rows):
            table = reader.read_row_group(group, columns=required_columns, use_threads=False)
            if table.num_rows != group_rows:
                raise IndexError(f"the pages contain {table.num_rows:,} rows, but the footer claims {group_rows:,}")
            table = table.slice(first, rows)
        else:
            table = read_rows(file, version, reader, group, first, first + rows, required_columns)
        return pick_columns(table, columns)
    except BaseException:
        _open_files.files.pop(path, None)  # after a storage error, the retry must open the file again
        raise


class _OpenFiles(threading.local):
    """Open files of the current thread; the most recently used file is the last."""

    def __init__(self) -> None:
        self.files: dict[str, tuple[FileVersion, pa.NativeFile, pq.ParquetFile]] = {}


_open_files = _OpenFiles()


def _open_cached(version: FileVersion, open_file: Callable[[], pa.NativeFile]) -> tuple[pa.NativeFile, pq.ParquetFile]:
    """Return a file and its reader, which stay open for the next row groups of this thread.

    Opening a file takes as long as decoding a thousand rows.
    """
    path, remote = version[0], "://" in version[0]
    cached = _open_files.files.pop(path, None)
    if cached is None or cached[0] != version:
        file, footer = open_file(), _footers.get(version)
        # Reads of local files have little latency, so the threads of pre_buffer would only cost time.
        reader = pq.ParquetFile(file, metadata=footer, pre_buffer=remote, page_checksum_verification=True)
        if footer is None:  # parsing it again for each row group would take a considerable share of the decoding time
            with _lock:
                _footers[version] = reader.metadata
                while len(_footers) > 1 and sum(f.serialized_size for f in _footers.values()) > MAX_FOOTER_CACHE_BYTES:
                    del _footers[next(iter(_footers))]  # the oldest
        cached = version, file, reader
    _open_files.files[path] = cached  # moved to the end of the dict; files at the start are closed first
    if len(_open_files.files) > MAX_OPEN_FILES:
        del _open_files.files[next(iter(_open_files.files))]
    return cached[1:]
