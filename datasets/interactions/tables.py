"""Read interactions in batches from Parquet, from CSV with named columns, and from lines of text.

FILE.txt contains a user and its items in each line:

1 17 4 23          S3-Rec: items in chronological order. LightGCN: train.txt and test.txt, unordered
2 5 8
"""

from __future__ import annotations

import csv as plain_csv
import gzip
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as csv
import pyarrow.parquet as pq
from raytrec_datasets.interactions.events import TRAIN, Columns, InteractionBuilder

from raytrec.common.errors import ConfigError, DataError, format_suggestion
from raytrec.common.formatting import format_count
from raytrec.data.files.listing import PARQUET_MAGIC

BATCH_ROWS, BLOCK_BYTES = 1 << 18, 1 << 24
SUFFIXES = (".parquet", ".csv", ".tsv", ".csv.gz", ".tsv.gz", ".inter", ".txt")
NUMBER = r"^[0-9]{1,18}$"
Batch = tuple[pa.Array, pa.Array, pa.Array | None]


def find_suffix(name: str) -> str:
    """Return the suffix of SUFFIXES, in lower case, with which a name ends, or ""."""
    return next((suffix for suffix in SUFFIXES if name.lower().endswith(suffix)), "")


def suffix_of(path: Path) -> str:
    """Return the suffix that determines how a file is read, or "" if the format is unknown.

    It is the suffix of the name (`find_suffix`), or .parquet if the file begins with Parquet's magic bytes.
    """
    if suffix := find_suffix(path.name):
        return suffix
    try:
        with path.open("rb") as file:
            return ".parquet" if file.read(4) in PARQUET_MAGIC else ""
    except OSError:
        return ""


def read(files: list[Path], columns: Columns, builder: InteractionBuilder, split: int = TRAIN) -> dict[str, bool]:
    """Add the interactions in files of one layout, and return {"of_all": …}, an attribute of Interactions.

    Raises:
        ConfigError: A column is missing or has an unsupported type.
        DataError: A file cannot be read, a row is invalid, or files have different types.
    """
    of_all = True
    for path in files:
        for users, items, times in batches(path, columns):
            _check_types(users, items, times, builder, path)
            builder.add(users, items, times, split)
        suffix = suffix_of(path)
        of_all &= suffix != ".txt" and not (suffix == ".parquet" and has_lists(path, columns))
    return {"of_all": of_all}


def _check_types(
    users: pa.Array, items: pa.Array, times: pa.Array | None, builder: InteractionBuilder, path: Path
) -> None:
    """Check that a file has the types of the files before; integers and floats as times can be mixed.

    Raises:
        DataError: A type differs, or only some files have times.
    """
    time = "none" if times is None else str(times.type)
    types = str(users.type), str(items.type), "number" if time in ("int64", "double") else time
    builder.types = builder.types or types
    if types != builder.types:
        raise DataError(
            f"users, items and times have the types {', '.join(types)}, but {', '.join(builder.types)} in other files",
            where=str(path),
            expected="the same types in all files of the source, and times in all files or in none",
            do="write the files again with the same types",
        )


def batches(path: Path, columns: Columns) -> Iterator[Batch]:
    """Return an iterator over the users, items and times in a file of any layout, a batch at a time.

    Users and items are int64 or string arrays without empty values; times are an array without nulls, or None.

    Raises:
        ConfigError: A column is missing or has an unsupported type; raised by the iterator, like all errors.
        DataError: The file cannot be read, or a row or line is invalid.
    """
    kinds = {".parquet": parquet_batches, ".txt": text_batches}
    return kinds.get(suffix_of(path), csv_batches)(path, columns)


def has_lists(path: Path, columns: Columns) -> bool:
    """Return True if the column of items in a Parquet file contains lists. The file must be valid (`batches`)."""
    return pa.types.is_nested(pq.read_schema(path).field(columns.item).type)


def parquet_batches(path: Path, columns: Columns) -> Iterator[Batch]:
    """Yield the users, items and times in a Parquet file; a list of items is one interaction per item.

    Errors are those of `batches`.
    """
    try:
        file = pq.ParquetFile(path)
        required = [name for name in (columns.user, columns.item, columns.time) if name]
        check_columns(required, file.schema_arrow.names, path)
        done = 0
        for batch in file.iter_batches(BATCH_ROWS, columns=required):
            yield _batch(batch, columns, f"{path}, rows from {done:,}")
            done += len(batch)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"cannot read the file: {error}", where=str(path)) from None


def csv_batches(path: Path, columns: Columns) -> Iterator[Batch]:
    """Yield the users, items and times in a CSV file. Fields in .tsv and .inter are separated by tabs.

    Users and items are read as text; the type of times is inferred. Errors are those of `batches`.
    """
    suffix = suffix_of(path)
    divider = "\t" if suffix in (".tsv", ".tsv.gz", ".inter") else ","
    parse = csv.ParseOptions(delimiter=divider, newlines_in_values=True)
    reading = csv.ReadOptions(block_size=BLOCK_BYTES)
    try:
        names = csv.open_csv(path, reading, parse).schema.names
        columns = _of_inter(columns, names) if suffix == ".inter" else columns
        required = [name for name in (columns.user, columns.item, columns.time) if name]
        check_columns(required, names, path)
        types = {name: pa.string() for name in (columns.user, columns.item)}
        options = csv.ConvertOptions(include_columns=required, column_types=types)
        with csv.open_csv(path, reading, parse, options) as reader:
            if columns.time and pa.types.is_string(reader.schema.field(columns.time).type):
                raise _broken(path, divider, columns.time, f"{columns.time} is text")
            done = 0
            for batch in reader:
                yield _batch(batch, columns, f"{path}, lines from {done + 2:,}")
                done += len(batch)
    except (pa.ArrowException, OSError) as error:
        raise _broken(path, divider, columns.time, str(error)) from None


def text_batches(path: Path, columns: Columns) -> Iterator[Batch]:
    """Yield (users, items, None) for about 16 MiB of text at a time, with the user of each item; int64.

    A line with only a user has no items. `columns` is not used.

    Raises:
        DataError: A line is empty or contains something other than numbers; the error names the file and the
            line.
    """
    first = 1
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES) + file.readline():
            text = block.decode("utf-8", "replace").removesuffix("\n").split("\n")
            split = pc.utf8_split_whitespace(pc.utf8_trim_whitespace(pa.array(text, pa.large_string())))
            words, ends = split.flatten(), split.offsets.to_numpy()
            if bad := _first_bad(words):
                line = int(np.searchsorted(ends, bad - 1, side="right")) - 1
                raise DataError(
                    f"line {first + line} contains {words[bad - 1].as_py()!r}",
                    where=f"{path}: {text[line][:60]!r}",
                    expected="a user and items in each line, whole numbers separated by spaces",
                )
            numbers = words.cast(pa.int64()).to_numpy()
            starts = ends[:-1]
            users = np.repeat(numbers[starts], np.diff(ends) - 1)
            is_item = np.ones(len(numbers), bool)
            is_item[starts] = False
            yield pa.array(users), pa.array(numbers[is_item]), None
            first += len(text)


def _first_bad(words: pa.Array) -> int:
    """Return the position, from 1, of the first word that is not a number, or 0 if all words are numbers."""
    return pc.index(pc.match_substring_regex(words, NUMBER), pa.scalar(False)).as_py() + 1


def _of_inter(columns: Columns, names: list[str]) -> Columns:
    """Return the columns as named in a .inter file (name:type), with RecBole's own names as a fallback."""
    by_name = {name.partition(":")[0]: name for name in names}
    user, item = (by_name.get(name if name in by_name else f"{name}_id", name) for name in (columns.user, columns.item))
    return Columns(user, item, by_name.get(columns.time or "timestamp", columns.time))


def check_columns(required_columns: list[str], available_columns: list[str], path: Path) -> None:
    """Check that a file contains the required columns.

    Args:
        required_columns: Names of the required columns.
        available_columns: Names of the columns in the file.
        path: Path of the file.

    Raises:
        ConfigError: A column is missing; the error suggests the nearest name.
    """
    for name in required_columns:
        if name not in available_columns:
            raise ConfigError(
                f"there is no column '{name}'" + format_suggestion(name, available_columns),
                where=str(path),
                expected=f"one of {', '.join(available_columns)}",
                do="name the columns with --user, --item and --time, or rename the column in the file",
            )


def _batch(batch: pa.RecordBatch, columns: Columns, where: str) -> Batch:
    user, item = _whole(batch.column(columns.user)), batch.column(columns.item)
    time, rows = batch.column(columns.time) if columns.time else None, np.arange(len(user))
    if pa.types.is_list(item.type) or pa.types.is_large_list(item.type):
        lengths = pc.list_value_length(item).fill_null(0)
        if time is not None and lengths != _lengths(time, columns, where):
            raise DataError(
                f"the lists of {columns.time} and {columns.item} have different lengths",
                where=where,
                expected="a time for each item of a list",
            )
        rows = np.repeat(rows, lengths.to_numpy(zero_copy_only=False))
        user = user.take(pa.array(rows))
        item, time = item.flatten(), None if time is None else time.flatten()
    keys = _keys(user, columns.user, where, rows), _keys(item, columns.item, where, rows)
    return *keys, None if time is None else _times(time, columns.time, where, rows)


def _lengths(time: pa.Array, columns: Columns, where: str) -> pa.Array:
    if not pa.types.is_list(time.type) and not pa.types.is_large_list(time.type):
        raise ConfigError(
            f"{columns.item} contains lists, but {columns.time} does not",
            where=where,
            expected="a time for each item of a list",
        )
    return pc.list_value_length(time).fill_null(0)


def _whole(values: pa.Array) -> pa.Array:
    return values.dictionary_decode() if pa.types.is_dictionary(values.type) else values


def _keys(values: pa.Array, name: str, where: str, rows: np.ndarray) -> pa.Array:
    """Return whole numbers as int64 and text as string; raise an error for other types and empty values.

    `rows` contains the row of each value in the batch, for messages.
    """
    values = _whole(values)
    if pa.types.is_integer(values.type):
        values = values.cast(pa.int64())
    elif pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
        values = values.cast(pa.string())
    else:
        raise ConfigError(
            f"{name} has the unsupported type {values.type}",
            where=where,
            expected="whole numbers or text, or, for items, lists of them",
        )
    empty = values.is_null() if pa.types.is_integer(values.type) else pc.equal(values.fill_null(""), "")
    _refuse(empty, name, where, rows)
    return values


def _times(values: pa.Array, name: str, where: str, rows: np.ndarray) -> pa.Array:
    """Return whole numbers as int64, other numbers as float64 and dates as timestamps.

    Other types and missing values raise an error.
    """
    values, kind = _whole(values), values.type
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        values = values.cast(pa.int64() if pa.types.is_integer(kind) else pa.float64())
    elif pa.types.is_date(kind):
        values = values.cast(pa.timestamp("s"))
    elif not pa.types.is_timestamp(kind):
        raise ConfigError(
            f"{name} has the unsupported type {kind}",
            where=where,
            expected="numbers, dates or timestamps such as 2026-11-02",
        )
    _refuse(values.is_null(nan_is_null=True), name, where, rows)
    return values


def _refuse(empty: pa.Array, name: str, where: str, rows: np.ndarray) -> None:
    if (place := pc.index(empty, pa.scalar(True)).as_py()) >= 0:
        before, _, start = where.rpartition(" ")
        raise DataError(
            f"{name} is empty",
            where=f"{before.removesuffix(' from').removesuffix('s')} {int(start.replace(',', '')) + rows[place]:,}",
            do="remove the row, or fill it",
        )


def _broken(path: Path, divider: str, time: str | None, why: str) -> DataError:
    """Return the error for a CSV file that cannot be parsed.

    The error names the first line with an unexpected number of fields or an invalid time, if there is any.
    """
    expected = "the same number of fields in each line" + f", and a number or timestamp as {time}" * bool(time)
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            lines = plain_csv.reader(file, delimiter=divider)
            names = next(lines, [])
            for line in filter(None, lines):
                problem = None
                if len(line) != len(names):
                    problem = f"the line has {format_count(len(line), 'field')} instead of {len(names)}"
                elif time and not _is_time(line[names.index(time)]):
                    problem = f"column {time} contains {line[names.index(time)]!r}"
                if problem:
                    where = f"{path}, line {lines.line_num}"
                    return DataError(problem, where=where, expected=expected, do="correct the file")
    except (OSError, ValueError):
        pass  # pyarrow's message is enough
    return DataError(f"cannot parse the file: {why}", where=str(path), expected=expected)


def _is_time(text: str) -> bool:
    for kind in (pa.float64(), pa.timestamp("us")):
        try:
            return bool(pa.array([text]).cast(kind)[0].is_valid)
        except pa.ArrowInvalid:
            continue
    return False
