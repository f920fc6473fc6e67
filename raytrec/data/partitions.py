"""Reserved columns, and folders key=value as partitions and columns.

No torch here.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import unquote

import pyarrow as pa

from raytrec.common.errors import DataError
from raytrec.data.arrow import Ambiguous, find_column, one_array
from raytrec.data.columns import Place
from raytrec.data.form import Form

Between = tuple[str | None, str | None]  # first and last partition, both included; None: no bound
ALL: Between = (None, None)
NO_VALUE = "__HIVE_DEFAULT_PARTITION__"  # the folder of rows without a value
INTEGER = re.compile(r"0|-?[1-9][0-9]{0,17}")  # one spelling of each number: 04 and 4 are different texts
DIGITS = re.compile(r"-?[0-9]+")  # compared as numbers, however they are spelled


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


def reserved_array(table: pa.Table, name: str, form: Form, place: Place) -> pa.Array:
    """A reserved column's values in the type that it has in all files.

    Raises:
        DataError: a value that this type does not hold.
    """
    kind = form.types.get(name)
    array = one_array(table[name])
    if kind is None or array.type == kind:
        return array
    try:
        return array.cast(kind)
    except pa.ArrowInvalid as error:
        raise DataError(
            f"reserved column '{name}' is {array.type} here and {kind} in all files together: "
            f"{str(error).splitlines()[0]}",
            where=place.of(name),
            expected=f"values that {kind} holds",
            do="write the files with one type, or use data.transforms: {do: cast, …}",
        ) from None


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


def common_type(known: pa.DataType | None, other: pa.DataType) -> pa.DataType | None:
    """The type that holds the values of both, such as int64 of int32 and int64; None: there is none."""
    if known is None or known == other:
        return other
    both = [pa.schema([("x", kind)]) for kind in (known, other)]
    try:
        return pa.unify_schemas(both, promote_options="permissive").field(0).type
    except (pa.ArrowTypeError, pa.ArrowInvalid):
        return None


@dataclass(frozen=True)
class ReservedInFile:
    """The key columns and reserved ones of a file.

    Attributes:
        types: of these columns.
        from_folders: columns of any kind that it does not hold, but the folders that it is in.
    """

    uri: str
    types: Mapping[str, pa.DataType]
    from_folders: frozenset[str]


def agree(
    files: Sequence[ReservedInFile], names: Sequence[str], kinds: Mapping[str, pa.DataType]
) -> tuple[dict[str, pa.DataType], frozenset[str], dict[str, DataError]]:
    """What columns are in all files together.

    A column that is in folders' names anywhere is read from there everywhere.

    Args:
        files: Reserved columns of each file.
        names: Reserved columns.
        kinds: Types of the folders' keys (folder_types).

    Returns:
        (type of each; those that folders' names hold; file → what is wrong with it, of files that do not go
        with those before).
    """
    from_folders = frozenset().union(*(file.from_folders for file in files))
    types: dict[str, pa.DataType] = {}
    odd: dict[str, DataError] = {}
    for file in files:
        in_path = in_folders(file.uri)
        merged = {n: common_type(types.get(n), file.types[n]) for n in names if n not in from_folders}
        if name := next((n for n in from_folders if n not in in_path), None):
            odd[file.uri] = DataError(
                f"column '{name}' is missing: other files are in folders {name}=…",
                where=file.uri,
                expected="all files in such folders",
                do=f"move the file into a folder {name}=VALUE, or name another column",
            )
        elif name := next((n for n, kind in merged.items() if kind is None), None):
            odd[file.uri] = DataError(
                f"reserved column '{name}' is {file.types[name]} here, and {types[name]} in the files before",
                where=f"{file.uri}, column {name}",
                expected="one type in all files, or integers, or texts, of several widths",
                do="write the files with one type, or use data.transforms: {do: cast, …}",
            )
        else:
            types = merged
    types |= {name: kinds[name] for name in from_folders}
    return types, from_folders, odd
