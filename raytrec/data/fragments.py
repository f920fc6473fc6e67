"""A dataset as an ordered list of row groups, read from the files' footers; the driver checks types here."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from raytrec.data.faults import retried
from raytrec.data.form import Form
from raytrec.data.kinds import check_columns, is_list
from raytrec.errors import DataError
from raytrec.schema import Schema
from raytrec.storage import open_filesystem


@dataclass(frozen=True)
class RowGroup:
    """One row group of one Parquet file (`path` is a path or URI that `storage.open_filesystem` opens)."""

    path: str
    index: int
    rows: int


@dataclass(frozen=True)
class Dataset:
    """Row groups in file order: files by path, groups by index, empty ones left out.

    Attributes:
        form: how its rows are read.
        left_out: what was wrong with files that are left out (data.on_error: skip).
    """

    uri: str
    groups: tuple[RowGroup, ...]
    form: Form
    left_out: tuple[DataError, ...] = ()

    @property
    def rows(self) -> int:
        """Rows of all groups."""
        return sum(group.rows for group in self.groups)


def scan(uri: str, schema: Schema, key: str = "data", *, skip: bool = False) -> Dataset:
    """Reads the footers of a folder (or file) of Parquet and checks every file's columns against the schema.

    Args:
        uri: folder (searched in depth; names that begin with `_` or `.` are left out) or one file.
        key: the config key that named it, for messages.
        skip: leave out files that are not whole, or whose columns are not the schema's.

    Raises:
        DataError: nothing there, no rows, a file that is not whole, a column missing or of the wrong type.
    """
    files, left_out = list_files(uri, key), []

    def look(file: str) -> tuple[list[RowGroup], set[str]]:
        try:
            return _look(file, schema)
        except DataError as error:
            if not skip:
                raise
            left_out.append(error)
            return [], set()

    with ThreadPoolExecutor(16) as pool:
        seen = list(pool.map(look, files))
    groups = tuple(group for per_file, _ in seen for group in per_file)
    if not groups:
        raise DataError(
            "there are no rows",
            where=f"{key}={uri}",
            expected=f"rows in its {len(files)} Parquet files"
            + (f", of which {len(left_out)} are left out: {left_out[0].what}" if left_out else ""),
        )
    form = Form(schema, frozenset().union(*(lists for _, lists in seen)))
    return Dataset(uri, groups, form, tuple(left_out))


def list_files(uri: str, key: str) -> list[str]:
    """The Parquet files of a folder (in depth, by path), or the one file."""
    from pyarrow import fs

    filesystem, path = open_filesystem(uri)
    prefix = uri.partition("://")[0] + "://" if "://" in uri else ""
    try:
        info = filesystem.get_file_info(path)
        if info.type == fs.FileType.File:
            return [prefix + path]
        if info.type == fs.FileType.NotFound:
            raise DataError(
                "there is no such folder",
                where=f"{key}={uri}",
                expected="a folder of .parquet files",
                do="correct the path, or write the data with `raytrec prepare`",
            )
        found = filesystem.get_file_info(fs.FileSelector(path, recursive=True))
    except OSError as error:
        raise DataError(f"cannot list the folder: {error}", where=f"{key}={uri}") from None
    names = sorted(
        f.path
        for f in found
        if f.type == fs.FileType.File and f.extension == "parquet" and not _hidden(f.path.removeprefix(path))
    )
    if not names:
        raise DataError(
            "the folder holds no Parquet files", where=f"{key}={uri}", expected="files named *.parquet"
        )
    return [prefix + name for name in names]


def _hidden(path: str) -> bool:
    return any(part[0] in "_." for part in path.split("/") if part)


def read_footer(uri: str):
    """The metadata of a Parquet file (pyarrow.parquet.FileMetaData).

    Raises:
        DataError: when the file is cut off, empty or no Parquet.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    def read():
        filesystem, path = open_filesystem(uri)
        with filesystem.open_input_file(path) as file:
            return pq.read_metadata(file)

    try:
        metadata = retried(uri, read)
        metadata.schema.to_arrow_schema()
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"not a whole Parquet file: {str(error).splitlines()[0]}",
            where=uri,
            expected="a readable footer; the file may be cut off, or still being written",
            do="write or copy the file again, or remove it",
        ) from None
    return metadata


def _look(uri: str, schema: Schema) -> tuple[list[RowGroup], set[str]]:
    """A file's row groups, and the sparse features that are lists in it."""
    metadata = read_footer(uri)
    arrow = metadata.schema.to_arrow_schema()
    check_columns(arrow, schema, uri)
    lists = {name for name in schema.sparse if is_list(arrow.field(schema.column_of(name)).type)}
    counts = (metadata.row_group(i).num_rows for i in range(metadata.num_row_groups))
    return [RowGroup(uri, i, rows) for i, rows in enumerate(counts) if rows], lists
