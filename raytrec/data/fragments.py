"""A dataset as an ordered list of row groups, read from the files' footers; the driver checks types here."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from raytrec.data.faults import retried
from raytrec.errors import DataError, did_you_mean
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
        left_out: what was wrong with files that are left out (data.on_error: skip).
    """

    uri: str
    groups: tuple[RowGroup, ...]
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

    def groups_of(file: str) -> list[RowGroup]:
        try:
            return _row_groups(file, schema)
        except DataError as error:
            if not skip:
                raise
            left_out.append(error)
            return []

    with ThreadPoolExecutor(16) as pool:
        groups = [group for per_file in pool.map(groups_of, files) for group in per_file]
    if not groups:
        raise DataError(
            "there are no rows",
            where=f"{key}={uri}",
            expected=f"rows in its {len(files)} Parquet files"
            + (f", of which {len(left_out)} are left out: {left_out[0].what}" if left_out else ""),
        )
    return Dataset(uri, tuple(groups), tuple(left_out))


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


def _row_groups(uri: str, schema: Schema) -> list[RowGroup]:
    metadata = read_footer(uri)
    _check_columns(metadata.schema.to_arrow_schema(), schema, uri)
    counts = (metadata.row_group(i).num_rows for i in range(metadata.num_row_groups))
    return [RowGroup(uri, i, rows) for i, rows in enumerate(counts) if rows]


def _check_columns(arrow, schema: Schema, uri: str) -> None:
    for column in schema.columns:
        if column not in arrow.names:
            near = did_you_mean(column, arrow.names)
            raise DataError(
                f"column '{column}' is missing",
                where=uri,
                expected=f"the schema's columns; the file has {', '.join(arrow.names)}",
                do=f"did you mean '{near}'? Correct the schema" if near else "correct the schema or the data",
            )
    for column in schema.labels:
        _check_number(arrow.field(column).type, column, "label", uri)
    for column in schema.dense:
        _check_number(arrow.field(column).type, column, "dense column", uri)
    for feature, spec in schema.sparse.items():
        text_allowed = schema.tables[spec.table].out_of_range == "hash"
        _check_ids(arrow.field(schema.column_of(feature)).type, feature, spec.table, text_allowed, uri)
        if spec.weights:
            _check_weights(arrow.field(spec.weights).type, spec.weights, uri)


def _check_number(kind, column: str, role: str, uri: str) -> None:
    import pyarrow.types as t

    if not (t.is_integer(kind) or t.is_floating(kind) or t.is_boolean(kind) or t.is_decimal(kind)):
        what = "a list" if is_list(kind) else str(kind)
        raise DataError(
            f"{role} '{column}' is {what} ({kind})"
            if is_list(kind)
            else f"{role} '{column}' is of type {kind}",
            where=f"{uri}, column {column}",
            expected="one number a row",
            do="convert the column, or list it under sparse",
        )


def _check_ids(kind, feature: str, table: str, text_allowed: bool, uri: str) -> None:
    import pyarrow.types as t

    value = value_type(kind)
    if t.is_integer(value) or (is_text(value) and text_allowed):
        return
    raise DataError(
        f"sparse feature '{feature}' holds {value}",
        where=f"{uri}, column {feature}",
        expected="integer ids, or lists of them",
        do=f"for text, set tables.{table}.out_of_range to hash"
        if is_text(value)
        else "convert the column, or list it under dense",
    )


def _check_weights(kind, column: str, uri: str) -> None:
    import pyarrow.types as t

    if not (is_list(kind) and (t.is_floating(kind.value_type) or t.is_integer(kind.value_type))):
        raise DataError(
            f"weights '{column}' are of type {kind}",
            where=f"{uri}, column {column}",
            expected="lists of numbers, one for each id",
        )


def is_list(kind) -> bool:
    """Whether an Arrow type is any kind of list."""
    import pyarrow.types as t

    return t.is_list(kind) or t.is_large_list(kind) or t.is_fixed_size_list(kind)


def is_text(kind) -> bool:
    """Whether an Arrow type is text or bytes."""
    import pyarrow.types as t

    return t.is_string(kind) or t.is_large_string(kind) or t.is_binary(kind) or t.is_large_binary(kind)


def value_type(kind):
    """The type of the ids inside lists and dictionaries."""
    import pyarrow.types as t

    while True:
        if is_list(kind) or t.is_dictionary(kind):
            kind = kind.value_type
        else:
            return kind
