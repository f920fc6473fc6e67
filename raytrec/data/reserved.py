"""Columns that go along with rows, not trained on: one type in all files; values that folders' names hold.

No torch here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import unquote

import pyarrow as pa

from raytrec.common.errors import DataError
from raytrec.data import nested
from raytrec.data.columns import Place
from raytrec.data.form import Form, one_array

NO_VALUE = "__HIVE_DEFAULT_PARTITION__"  # the folder of rows without a value
INTEGER = re.compile(r"-?\d{1,18}")


def reserved_array(table: pa.Table, name: str, form: Form, place: Place) -> pa.Array:
    """A reserved column's values in the type that it has in all files.

    Raises:
        DataError: a value that this type does not hold.
    """
    kind = form.types.get(name)
    if name in form.from_folders:
        return pa.repeat(value_in_folders(in_folders(place.path)[name], kind), table.num_rows)
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
    """What the key=value folders on a file's path say; the innermost of each key."""
    found = {}
    for part in path.split("/")[:-1]:
        key, equals, value = part.partition("=")
        if equals and key:
            found[unquote(key)] = None if value == NO_VALUE else unquote(value)
    return found


def find_in_folders(arrow: pa.Schema, form: Form, uri: str) -> frozenset[str]:
    """Key columns and reserved ones that a file does not hold, and the folders that it is in do."""
    made, folders = {name for transform in form.transforms for name in transform.writes}, in_folders(uri)
    return frozenset(n for n in form.reserved if n in folders and n not in made and not _holds(arrow, n))


def _holds(arrow: pa.Schema, name: str) -> bool:
    try:
        return nested.find(arrow, name) is not None
    except nested.Ambiguous:
        return True


def type_of_folders(values: Iterable[str | None]) -> pa.DataType:
    """The type of what folders' names say: whole numbers, else text."""
    whole = all(value is None or INTEGER.fullmatch(value) for value in values)
    return pa.int64() if whole else pa.string()


def value_in_folders(text: str | None, kind: pa.DataType | None) -> pa.Scalar:
    """What a folder's name says, in the type of the column; None: text."""
    kind = kind or pa.string()
    return pa.scalar(int(text) if text is not None and pa.types.is_integer(kind) else text, kind)


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
        types: of those that are columns of it.
        from_folders: those that are not, but keys of the folders that it is in.
    """

    uri: str
    types: Mapping[str, pa.DataType]
    from_folders: frozenset[str]


def agree(
    files: Sequence[ReservedInFile], names: Sequence[str]
) -> tuple[dict[str, pa.DataType], frozenset[str], dict[str, DataError]]:
    """What columns are in all files together.

    A column that is in folders' names anywhere is read from there everywhere.

    Returns:
        (type of each; those that folders' names hold; file → what is wrong with it, of files that do not go
        with those before).
    """
    from_folders = frozenset(n for n in names if any(n in file.from_folders for file in files))
    types: dict[str, pa.DataType] = {}
    odd: dict[str, DataError] = {}
    values: list[dict[str, str | None]] = []
    for file in files:
        in_path = in_folders(file.uri)
        merged = {n: common_type(types.get(n), file.types[n]) for n in names if n not in from_folders}
        if missing := next((n for n in from_folders if n not in in_path), None):
            odd[file.uri] = _not_in_folder(missing, file.uri)
        elif other := next((n for n, kind in merged.items() if kind is None), None):
            odd[file.uri] = _other_type(other, file, types[other])
        else:
            types = merged
            values.append(in_path)
    types |= {name: type_of_folders(each[name] for each in values) for name in from_folders}
    return types, from_folders, odd


def _not_in_folder(name: str, uri: str) -> DataError:
    return DataError(
        f"column '{name}' is missing: other files are in folders {name}=…",
        where=uri,
        expected="all files in such folders",
        do=f"move the file into a folder {name}=VALUE, or leave {name} out of data.reserve_columns",
    )


def _other_type(name: str, file: ReservedInFile, known: pa.DataType) -> DataError:
    return DataError(
        f"reserved column '{name}' is {file.types[name]} here, and {known} in the files before",
        where=f"{file.uri}, column {name}",
        expected="one type in all files, or integers, or texts, of several widths",
        do="write the files with one type, or use data.transforms: {do: cast, …}",
    )
