"""Parse partitions such as date=2026-11-07/hour=11 from folder names, and detect the folders of table formats.

A table format keeps records of which files contain current rows. This module does not import torch.
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
from raytrec.common.storage import extract_path
from raytrec.data.arrow import AmbiguousColumnError, find_column
from raytrec.data.read_plans import ResolvedReadPlan

PartitionBounds = tuple[str | None, str | None]  # first and last partition, both included; None: no bound
ALL_PARTITIONS: PartitionBounds = (None, None)
NULL_PARTITION_VALUE = "__HIVE_DEFAULT_PARTITION__"  # value in the folder name for rows without a value
INTEGER = re.compile(r"0|-?[1-9][0-9]{0,17}")  # at most 18 digits, canonical spelling: 04 and 4 are different texts
DIGITS = re.compile(r"-?[0-9]+")  # values compared as numbers, in any spelling


SPARK_CONVERSION = 'spark.read.format("{}").load("{{table}}").write.parquet("plain")'
# Table format → (pattern of its records' path below the table, code that writes current rows as Parquet).
TABLE_FORMATS = {
    "a Delta Lake table": (
        r"_delta_log",
        'pyarrow.dataset.write_dataset(deltalake.DeltaTable("{table}").to_pyarrow_dataset(), "plain", '
        'format="parquet"), or ' + SPARK_CONVERSION.format("delta"),
    ),
    "an Iceberg table": (
        r"metadata/(?:[^/]*\.metadata\.json(?:\.gz)?|version-hint\.text)",
        "pyarrow.parquet.write_table(pyiceberg.table.StaticTable.from_metadata(NEWEST_METADATA_JSON).scan()"
        '.to_arrow(), "plain.parquet"), or ' + SPARK_CONVERSION.format("iceberg"),
    ),
    "a Hudi table": (r"\.hoodie(?:_partition_metadata)?", SPARK_CONVERSION.format("hudi")),
    "a Paimon table": (r"snapshot/(?:snapshot-\d+|EARLIEST|LATEST)", SPARK_CONVERSION.format("paimon")),
    "a transactional Hive table": (
        r"(?:base_\d{7,}(?:_v\d+)?|(?:delete_)?delta_\d{7,}_\d{7,}(?:_\d+)?(?:_v\d+)?)",
        "INSERT OVERWRITE DIRECTORY 'plain' STORED AS PARQUET SELECT * FROM NAME in Hive",
    ),
    "the output of a Spark stream": (r"_spark_metadata", SPARK_CONVERSION.format("parquet")),
}
RECORD_FOLDERS = ("_delta_log", "metadata", ".hoodie", "snapshot", "_spark_metadata")  # folders of the records
_PATTERNS = {name: re.compile(rf"/{pattern}(?=/|$)") for name, (pattern, _) in TABLE_FORMATS.items()}


def compute_path_key(path: str) -> list[tuple]:
    """Return a sort key for a path, with which integers in key=value folders are compared as numbers."""
    return [_sort_key(part) for part in path.split("/")]


def _sort_key(part: str) -> tuple:
    key, equals, value = part.partition("=")
    is_integer = equals and DIGITS.fullmatch(value)
    return (key, 0, int(value), "") if is_integer else (key, 1, 0, _percent_decode(value))


def _percent_decode(text: str) -> str:
    """Return a key or value with percent-encoding decoded, or unchanged if the result is not UTF-8."""
    try:
        return unquote(text, errors="strict")
    except UnicodeDecodeError:
        return text


def select_partitions(paths: list[str], root: str, between: PartitionBounds, uri: str) -> list[str]:
    """Return the paths whose partitions are in a range.

    A bound names all partition keys or only the outermost ones; e.g. the upper bound `date=2026-11-07`
    includes every hour of that date.

    Args:
        paths: Paths of files below `root`; at least one.
        root: Path of the dataset's folder.
        between: First and last partition, both included; None: no bound.
        uri: Path or URI of the dataset's folder, for messages.

    Raises:
        DataError: A bound is not of the form key=value, the keys of a bound differ from those in the folder
            names, or no file is in the range.
    """
    first, last = (compute_path_key(_check_bound(bound)) if bound else [] for bound in between)
    chosen = []
    for path in paths:
        partition = "/".join(part for part in path.removeprefix(root).split("/")[:-1] if "=" in part)
        ranks = compute_path_key(partition)
        for rank, bound in ((first, between[0]), (last, between[1])):
            if [key for key, *_ in rank] != [key for key, *_ in ranks[: len(rank)]]:
                raise DataError(
                    f"the partition keys of a file ({partition or 'none'}) do not match data.partitions ({bound})",
                    where=f"{uri}, {path}",
                    expected="key=value folders with the keys in data.partitions, starting from the outermost folder",
                    do="correct data.partitions, or remove files outside such folders",
                )
        if first <= ranks[: len(first)] and ranks[: len(last)] <= last:
            chosen.append(path)
    if not chosen:
        raise DataError(
            f"no file is in a partition between {between[0] or 'the first'} and {between[1] or 'the last'}",
            where=f"data.partitions, {uri}",
            expected=f"a range with at least one file; the first file is {paths[0].removeprefix(root).lstrip('/')}",
        )
    return chosen


def _check_bound(bound: str) -> str:
    parts = bound.strip("/").split("/")
    if not all(re.fullmatch(r"[^=/]+=[^=/]+", part) for part in parts):
        raise DataError(
            f"'{bound}' is not a partition",
            where="data.partitions",
            expected="key=value, or several pairs separated by /, such as date=2026-11-07/hour=11",
        )
    return "/".join(parts)


def parse_folder_values(path: str) -> dict[str, str | None]:
    """Return the keys and values of the key=value folders in a path or URI; None for NULL_PARTITION_VALUE.

    The innermost folder of a key counts.
    """
    values = {}
    for part in extract_path(path).split("/")[:-1]:
        key, equals, value = part.partition("=")
        if equals and key:
            values[_percent_decode(key)] = None if value == NULL_PARTITION_VALUE else _percent_decode(value)
    return values


def find_folder_columns(arrow: pa.Schema, form: ResolvedReadPlan, uri: str) -> frozenset[str]:
    """Return the columns of a read plan that are keys of the file's folders and not in the file's schema `arrow`.

    A name shared by several columns or fields of the file counts as a column of the file.
    """
    folders = parse_folder_values(uri)
    return frozenset(name for name in form.columns if name in folders and not _has_column(arrow, name))


def _has_column(arrow: pa.Schema, name: str) -> bool:
    try:
        return find_column(arrow, name) is not None
    except AmbiguousColumnError:
        return True


def infer_folder_type(values: Iterable[str | None]) -> pa.DataType:
    """Return the type of values in folder names: int64 if all values except None match INTEGER, else string."""
    is_integer = all(value is None or INTEGER.fullmatch(value) for value in values)
    return pa.int64() if is_integer else pa.string()


def build_folder_column(path: str, name: str, kind: pa.DataType | None, rows: int) -> pa.Array:
    """Return a column of `rows` equal values: the value of folder key `name` in a path, as `kind` (None: string).

    Raises:
        DataError: The value cannot be converted to `kind`. Integers must be canonical, because 04 and 4 are different.
    """
    text, kind = parse_folder_values(path)[name], kind or pa.string()
    try:
        if text and pa.types.is_integer(kind) and str(int(text)) != text:
            raise ValueError("the value is not a canonical integer")
        return pa.repeat(pa.scalar(text, pa.string()).cast(kind), rows)
    except (pa.ArrowException, ValueError):
        raise DataError(
            f"the value '{text}' of the folder key '{name}' is not of type {kind}",
            where=path,
            expected=f"folders {name}=VALUE with values of type {kind}",
            do="rename the folder, or use other data",
        ) from None


def infer_folder_types(paths: Iterable[str], text: Container[str] = ()) -> dict[str, pa.DataType]:
    """Return a mapping from each key of key=value folders to the type of its values (`infer_folder_type`).

    Args:
        paths: Paths of files.
        text: Keys that are always text.
    """
    values = collect_folder_values(paths)
    return {key: pa.string() if key in text else infer_folder_type(texts) for key, texts in values.items()}


def collect_folder_values(paths: Iterable[str]) -> dict[str, set[str | None]]:
    """Return a mapping from each key of the files' key=value folders to all its values (`parse_folder_values`)."""
    values: dict[str, set[str | None]] = {}
    for folder in {extract_path(path).rpartition("/")[0] for path in paths}:
        for key, value in parse_folder_values(f"{folder}/").items():
            values.setdefault(key, set()).add(value)
    return values


def check_no_table_format(
    filesystem: fs.FileSystem, path: str, folder_entries: Iterable[str], where: str, prefix: str = ""
) -> None:
    """Check that neither a path nor any of its parents or subfolders is part of a table in a table format.

    Args:
        filesystem: Filesystem of the folder.
        path: Path of the folder or file in that filesystem.
        folder_entries: Paths of entries in the folder; hidden folders are listed without their contents.
        where: Config key and name of the folder, for messages.
        prefix: Scheme of the filesystem's URIs, such as s3://, for messages; default: local paths.

    Raises:
        DataError: Records of a table format exist in one of these folders.
    """
    ancestors = [str(folder) for folder in (PurePosixPath(path), *PurePosixPath(path).parents)]
    folders = [f"{folder.rstrip('/')}/{name}" for folder in ancestors for name in RECORD_FOLDERS]
    with ThreadPoolExecutor(16) as pool:
        entries = [path for paths in pool.map(partial(_list_entries, filesystem), folders) for path in paths]
    for entry in [path, *entries, *folder_entries]:
        for name, pattern in _PATTERNS.items():
            if match := pattern.search(entry):
                table = prefix + entry[: match.start()]
                raise DataError(
                    f"the path is part of, or contains, {name}: its files may contain rows that were removed, replaced "
                    "or never committed",
                    where=f"{where}, {table}{match.group()}",
                    expected="a folder of Parquet files that contain only current rows",
                    do="write the current rows as plain Parquet: " + TABLE_FORMATS[name][1].format(table=table),
                )


def _list_entries(filesystem: fs.FileSystem, folder: str) -> list[str]:
    """Return the paths of a folder's entries; [] if the folder does not exist or cannot be listed."""
    try:
        return [info.path for info in filesystem.get_file_info(fs.FileSelector(folder, allow_not_found=True))]
    except OSError:
        return []
