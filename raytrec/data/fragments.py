"""A dataset as an ordered list of row groups, read from the files' footers; the driver checks types here."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from raytrec.common.errors import DataError
from raytrec.common.storage import open_filesystem
from raytrec.config.schema import Schema
from raytrec.config.sections import folders
from raytrec.config.transforms import Transform
from raytrec.data.faults import retry_read, storage_hint
from raytrec.data.form import Form, Range
from raytrec.data.kinds import check_present, check_types, is_list
from raytrec.data.nested import empty_table, select
from raytrec.data.partitions import ALL, Between, in_order, within
from raytrec.data.statistics import accused
from raytrec.data.transform import apply_transforms

MOST_ROWS = 2**31 - 1  # of a row group; no writer comes near
CLOSELY_ROWS = 65_536  # row groups of more are looked at closely


@dataclass(frozen=True)
class RowGroup:
    """One row group of one Parquet file (`path` is a path or URI that `storage.open_filesystem` opens)."""

    path: str
    index: int
    rows: int


@dataclass(frozen=True)
class Dataset:
    """Row groups in file order: files by path, groups by index, empty ones skipped.

    Attributes:
        uri: where it is, for messages.
        form: how its rows are read.
        left_out: what was wrong with files that are skipped (data.on_error: skip).
        accused: row groups that a run will stop at, as far as footers say (statistics.py).
    """

    uri: str
    groups: tuple[RowGroup, ...]
    form: Form
    left_out: tuple[DataError, ...] = ()
    accused: tuple[RowGroup, ...] = ()

    @cached_property
    def rows(self) -> int:
        """Rows of all groups."""
        return sum(group.rows for group in self.groups)


def scan(
    places: str | list[str],
    schema: Schema,
    key: str = "data",
    *,
    transforms: tuple[Transform, ...] = (),
    between: Between = ALL,
    label_ranges: Mapping[str, Range | None] | None = None,
    skip: bool = False,
) -> Dataset:
    """Reads the footers of folders (or files) of Parquet and checks every file's columns against the schema.

    Args:
        places: folders (searched recursively; names that begin with `_` or `.` are skipped) or files.
        key: the config key that named them, for messages.
        transforms: what is done to columns before they are held to the schema.
        between: first and last partition to read.
        label_ranges: see Form.
        skip: skip files that are not whole, or whose columns are not the schema's.

    Raises:
        DataError: nothing there, no rows, a file that is not whole, a column missing or of the wrong type.
    """
    files, left_out = list_files(places, key, between), []
    form = Form(schema, transforms=transforms, label_ranges=label_ranges or {}, folder=os.getcwd())

    def look(file: str) -> tuple[list[RowGroup], set[str], list[int]]:
        try:
            return _look(file, form)
        except DataError as error:
            if not skip:
                raise
            left_out.append(error)
            return [], set(), []

    with ThreadPoolExecutor(16) as pool:
        seen = list(pool.map(look, files))
    groups = tuple(group for per_file, *_ in seen for group in per_file)
    if not groups:
        raise DataError(
            "there are no rows",
            where=f"{key}={name_of(places)}",
            expected=f"rows in its {len(files)} Parquet files"
            + (f", of which {len(left_out)} are skipped: {left_out[0].what}" if left_out else ""),
        )
    lists = frozenset().union(*(lists for _, lists, _ in seen))
    bad = tuple(g for per_file, _, bad in seen for g in per_file if not skip and g.index in bad)
    return Dataset(name_of(places), groups, replace(form, lists=lists), tuple(left_out), bad)


def name_of(places: str | list[str]) -> str:
    """Folders as one text."""
    return ", ".join(folders(places))


def list_files(places: str | list[str], key: str, between: Between = ALL) -> list[str]:
    """The Parquet files of folders, in their order; in each all depths, by path."""
    files = [file for place in folders(places) for file in _files_of(place, key, between)]
    twice = [file for file, count in Counter(files).items() if count > 1]
    if twice:
        raise DataError(
            f"{len(twice)} files are named twice, the first is {twice[0]}",
            where=f"{key}={name_of(places)}",
            expected="folders that do not hold each other",
            do="name each folder once: every row is trained once an epoch",
        )
    return files


def _files_of(uri: str, key: str, between: Between) -> list[str]:
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
        if info.type == fs.FileType.Unknown:
            raise DataError(
                "this is no file, but a pipe or a device", where=f"{key}={uri}", expected="Parquet"
            )
        found = filesystem.get_file_info(fs.FileSelector(path, recursive=True))
    except OSError as error:
        raise DataError(f"cannot list the folder: {error}", where=f"{key}={uri}") from None
    odd = [f.path for f in found if f.type in (fs.FileType.Unknown, fs.FileType.NotFound)]
    if odd := sorted(n for n in odd if n.endswith(".parquet") and not _hidden(n.removeprefix(path))):
        raise DataError(
            f"{len(odd)} of the .parquet in the folder are no files, but pipes, devices or links to nothing",
            where=f"{key}={uri}, {odd[0]}",
            expected="files",
            do="remove them, or name them with _ at the beginning",
        )
    names = [f.path for f in found if f.type == fs.FileType.File and f.extension == "parquet"]
    names = sorted((n for n in names if not _hidden(n.removeprefix(path))), key=in_order)
    if not names:
        raise DataError(
            "the folder holds no Parquet files", where=f"{key}={uri}", expected="files named *.parquet"
        )
    names = within(names, path, between, uri) if any(between) else names
    return [prefix + name for name in names]


def _hidden(path: str) -> bool:
    return any(part[0] in "_." for part in path.split("/") if part)


class Implausible(Exception):
    """A footer that claims what the file cannot hold."""


def _check_claims(footer: pq.FileMetaData, size: int) -> None:
    """Looks whether a file of `size` bytes can hold what its footer claims, before anything counts on it.

    Raises:
        Implausible: what it claims.
    """
    for g in range(footer.num_row_groups):
        group = footer.row_group(g)
        if not 0 <= group.num_rows <= MOST_ROWS:
            raise Implausible(f"its footer claims {group.num_rows:,} rows in row group {g}")
        # Of ordinary row groups, one column: there may be millions.
        for c in range(group.num_columns if group.num_rows > CLOSELY_ROWS else min(1, group.num_columns)):
            chunk, column = group.column(c), footer.schema.column(c)
            begin = min(chunk.data_page_offset, chunk.dictionary_page_offset or chunk.data_page_offset)
            held = chunk.total_compressed_size
            what = f"its footer claims {group.num_rows:,} rows in row group {g}, and of column {column.path}"
            if begin < 0 or held < 0 or begin + held > size:
                raise Implausible(
                    f"{what} {held:,} bytes from byte {begin:,} on, in a file of {size:,} bytes"
                )
            if column.max_repetition_level == 0 and chunk.num_values != group.num_rows:
                raise Implausible(f"{what} {chunk.num_values:,} values")


def read_footer(uri: str) -> pq.FileMetaData:
    """The metadata of a Parquet file.

    Raises:
        DataError: when the file is cut off, empty or no Parquet.
    """

    def read() -> pq.FileMetaData:
        filesystem, path = open_filesystem(uri)
        with filesystem.open_input_file(path) as file:
            metadata = pq.read_metadata(file)
            _check_claims(metadata, file.size())
            return metadata

    try:
        metadata = retry_read(uri, read)
        _ = metadata.schema.to_arrow_schema().names, metadata.schema.names  # may be no UTF-8
    except (pa.ArrowException, OSError, UnicodeDecodeError, Implausible) as error:
        raise DataError(
            f"not a whole Parquet file: {str(error).splitlines()[0]}",
            where=uri,
            expected=storage_hint(uri) + "a readable footer; the file may be cut off, or still being written",
            do="write or copy the file again, or remove it",
        ) from None
    return metadata


def _look(uri: str, form: Form) -> tuple[list[RowGroup], set[str], list[int]]:
    """A file's row groups; the sparse features that are lists in it (after the transforms); the groups that
    its footer accuses."""
    metadata, schema = read_footer(uri), form.schema
    arrow = metadata.schema.to_arrow_schema()
    check_present(arrow, form.columns, uri)
    arrow = select(arrow, form.columns)
    if form.transforms:
        arrow = apply_transforms(empty_table(arrow), form.transforms, uri, form.folder).schema
        check_present(arrow, schema.columns, f"{uri}, after data.transforms", fields=False)
    check_types(arrow, schema, uri)
    lists = {name for name in schema.sparse if is_list(arrow.field(schema.column_of(name)).type)}
    counts = (metadata.row_group(i).num_rows for i in range(metadata.num_row_groups))
    return [RowGroup(uri, i, rows) for i, rows in enumerate(counts) if rows], lists, accused(metadata, form)
