"""Folders key=value as partitions and columns, and folders that a table format owns.

The records of a table format name the files with current rows. No torch here.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import PurePosixPath
from urllib.parse import unquote

import pyarrow as pa
from pyarrow import fs

from raytrec.common.errors import DataError
from raytrec.data.arrow import Ambiguous, find_column
from raytrec.data.form import Form

Between = tuple[str | None, str | None]  # first and last partition, both included; None: no bound
ALL: Between = (None, None)
NO_VALUE = "__HIVE_DEFAULT_PARTITION__"  # the folder of rows without a value
INTEGER = re.compile(r"0|-?[1-9][0-9]{0,17}")  # one spelling of each number: 04 and 4 are different texts
DIGITS = re.compile(r"-?[0-9]+")  # compared as numbers, however they are spelled


PARENTS = 7  # a partition's keys, a folder such as data/, and the table
# Table format → (path of its records below the table, how the current rows are written as plain Parquet).
SPARK = 'spark.read.format("{}").load("{{table}}").write.parquet("plain")'
FORMATS = {
    "a Delta Lake table": (
        r"_delta_log",
        'pyarrow.dataset.write_dataset(deltalake.DeltaTable("{table}").to_pyarrow_dataset(), "plain", '
        'format="parquet"), or ' + SPARK.format("delta"),
    ),
    "an Iceberg table": (
        r"metadata/(?:[^/]*\.metadata\.json(?:\.gz)?|version-hint\.text)",
        "pyarrow.parquet.write_table(pyiceberg.table.StaticTable.from_metadata(NEWEST_METADATA_JSON).scan()"
        '.to_arrow(), "plain.parquet"), or ' + SPARK.format("iceberg"),
    ),
    "a Hudi table": (r"\.hoodie", SPARK.format("hudi")),
    "a Paimon table": (r"snapshot/(?:snapshot-\d+|EARLIEST|LATEST)", SPARK.format("paimon")),
    "a transactional Hive table": (
        r"(?:base_\d{7,}(?:_v\d+)?|(?:delete_)?delta_\d{7,}_\d{7,}(?:_\d+)?(?:_v\d+)?)",
        'spark.table(NAME).write.parquet("plain"), or CREATE TABLE … STORED AS PARQUET AS SELECT in Hive',
    ),
    "the output of a Spark stream": (r"_spark_metadata", SPARK.format("parquet")),
}
RECORDS = ("_delta_log", "metadata", ".hoodie", "snapshot", "_spark_metadata")  # where those records are
_PATTERNS = {name: re.compile(rf"/{pattern}(?=/|$)") for name, (pattern, _) in FORMATS.items()}


def in_order(path: str) -> list[tuple]:
    """Return a sort key of a path: text, except for whole numbers in key=value folders, which are numbers."""
    return [_rank(part) for part in path.split("/")]


def _rank(part: str) -> tuple:
    key, equals, value = part.partition("=")
    whole = equals and DIGITS.fullmatch(value)
    return (key, 0, int(value), "") if whole else (key, 1, 0, _decoded(value))


def _decoded(text: str) -> str:
    """Return a key or value without its percent-encoding; as it is where that is not UTF-8."""
    try:
        return unquote(text, errors="strict")
    except UnicodeDecodeError:
        return text


def within(paths: list[str], root: str, between: Between, uri: str) -> list[str]:
    """The paths whose partition is in a range.

    A bound names the first partition keys, or all: `date=2026-11-07` as the last takes in its every hour.

    Args:
        paths: of files below `root`.
        uri: the folder's name in messages.

    Raises:
        DataError: a bound that does not name the folders' keys, or nothing between the bounds.
    """
    first, last = (in_order(_checked(bound)) if bound else [] for bound in between)
    chosen = []
    for path in paths:
        partition = "/".join(part for part in path.removeprefix(root).split("/")[:-1] if "=" in part)
        ranks = in_order(partition)
        for rank, bound in ((first, between[0]), (last, between[1])):
            if [key for key, *_ in rank] != [key for key, *_ in ranks[: len(rank)]]:
                raise DataError(
                    f"a file's partition is {partition or 'none'}; data.partitions has {bound}",
                    where=path,
                    expected="folders key=value with data.partitions's keys, from the outermost on",
                    do="correct data.partitions, or remove files that are not in such folders",
                )
        if first <= ranks[: len(first)] and ranks[: len(last)] <= last:
            chosen.append(path)
    if not chosen:
        raise DataError(
            f"no partition between {between[0] or 'the first'} and {between[1] or 'the last'}",
            where=f"data.partitions, {uri}",
            expected=f"some of the {len(paths)} files there, such as {paths[0].removeprefix(root)}",
        )
    return chosen


def _checked(bound: str) -> str:
    parts = bound.strip("/").split("/")
    if not all(re.fullmatch(r"[^=/]+=[^=/]+", part) for part in parts):
        raise DataError(
            f"'{bound}' is not a partition",
            where="data.partitions",
            expected="key=value, or several with / between them: date=2026-11-07/hour=11",
        )
    return "/".join(parts)


def in_folders(path: str) -> dict[str, str | None]:
    """The values of the key=value folders on a file's path; the innermost of each key."""
    found = {}
    for part in path.split("/")[:-1]:
        key, equals, value = part.partition("=")
        if equals and key:
            found[_decoded(key)] = None if value == NO_VALUE else _decoded(value)
    return found


def find_in_folders(arrow: pa.Schema, form: Form, uri: str) -> frozenset[str]:
    """Return the columns that a file does not hold, and the folders that it is in do."""
    folders = in_folders(uri)
    return frozenset(name for name in form.columns if name in folders and not _holds(arrow, name))


def _holds(arrow: pa.Schema, name: str) -> bool:
    try:
        return find_column(arrow, name) is not None
    except Ambiguous:
        return True


def type_of_folders(values: Iterable[str | None]) -> pa.DataType:
    """Return the type of values in folders' names: int64 if all are whole numbers, else text."""
    whole = all(value is None or INTEGER.fullmatch(value) for value in values)
    return pa.int64() if whole else pa.string()


def folder_column(path: str, name: str, kind: pa.DataType | None, rows: int) -> pa.Array:
    """Return a column of a file's rows from the names of its folders, of a type; None: text."""
    text, kind = in_folders(path)[name], kind or pa.string()
    value = int(text) if text is not None and pa.types.is_integer(kind) else text
    return pa.repeat(pa.scalar(value, kind), rows)


def folder_types(paths: Iterable[str], text: Container[str] = ()) -> dict[str, pa.DataType]:
    """Return the type of each key of the folders that files are in.

    Args:
        paths: Paths of files.
        text: Keys that are text in any case.
    """
    values = folder_values(paths)
    return {key: pa.string() if key in text else type_of_folders(each) for key, each in values.items()}


def folder_values(paths: Iterable[str]) -> dict[str, set[str | None]]:
    """Return the values of each key of the folders that files are in; None: no value."""
    values: dict[str, set[str | None]] = {}
    for folder in {path.rpartition("/")[0] for path in paths}:
        for key, value in in_folders(f"{folder}/").items():
            values.setdefault(key, set()).add(value)
    return values


def check_no_table(filesystem: fs.FileSystem, path: str, inside: Iterable[str], where: str) -> None:
    """Check that no table format owns a folder, a folder above it or one inside of it.

    Args:
        filesystem: Filesystem of the folder.
        path: Path of the folder or file in that filesystem.
        inside: Paths in the folder that are not hidden, and hidden ones that are directly in those.
        where: Config key and name of the folder, for messages.

    Raises:
        DataError: The folder belongs to a table.
    """
    places = [str(folder) for folder in (PurePosixPath(path), *PurePosixPath(path).parents)][:PARENTS]
    asked = [f"{folder.rstrip('/')}/{name}" for folder in places for name in RECORDS]
    with ThreadPoolExecutor(16) as pool:
        above = [found for each in pool.map(partial(_entries, filesystem), asked) for found in each]
    for entry in [path, *above, *inside]:
        for name, pattern in _PATTERNS.items():
            if found := pattern.search(entry):
                table = entry[: found.start()]
                raise DataError(
                    f"the folder is {name} or part of one: its files also hold rows that were removed, "
                    "replaced or never committed",
                    where=f"{where}, {table}{found.group()}",
                    expected="a folder of Parquet files whose rows are all current",
                    do="write the current rows as plain Parquet: " + FORMATS[name][1].format(table=table),
                )


def _entries(filesystem: fs.FileSystem, folder: str) -> list[str]:
    """Return the paths in a folder, none where it does not exist or may not be listed."""
    try:
        return [info.path for info in filesystem.get_file_info(fs.FileSelector(folder, allow_not_found=True))]
    except OSError:
        return []
