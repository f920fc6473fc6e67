"""Read the rows of a request in the same way as rows of files in training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import types

from raytrec.common.errors import DataError, get_first_line, shorten_repr
from raytrec.config.features import select_needed_transforms
from raytrec.config.schema import Schema
from raytrec.config.transforms import Transform
from raytrec.data.arrow import (
    empty_table,
    is_text,
    list_element_type,
    pick_columns,
    plain,
    to_plain_array,
    unnest,
    value_type,
)
from raytrec.data.canonical import canonical
from raytrec.data.column_conversion import Place
from raytrec.data.read_plans import ReadPlan, ResolvedReadPlan
from raytrec.data.row_slices import Rows
from raytrec.data.transform import apply_transforms
from raytrec.data.type_checks import check_present, check_types, format_names
from raytrec.scoring.matrices import ROWS_PLACE, list_matrix_columns

MISSING_ADVICE = "add {} to each row; null means no value, unless the column must have one"
TIME_UNITS = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}
ACCEPTED_KINDS = {("text", "time")}  # (sent, trained); transforms read times from ISO text


class RowReader:
    """Reader of rows that contain some or all of a model's features.

    Args:
        schema: Schema of the features.
        transforms: Transforms of the model; only transforms that the features need are applied.
        lists: Features whose columns are lists after the transforms.
        columns: Columns of the model's data, with their types.

    Attributes:
        form: Resolved read plan of the rows that `read` returns.
        columns: Columns that rows must contain, with the types to which values without a type (JSON) are converted.
        matrices: Matrix → columns; a request can contain the matrix instead of these columns (matrices.py).
    """

    def __init__(self, schema: Schema, transforms: Sequence[Transform], lists: Sequence[str], columns: pa.Schema):
        needed = select_needed_transforms(tuple(transforms), schema.inputs)
        feature_lists = frozenset(lists) & set(schema.sparse)
        self.form = ResolvedReadPlan(ReadPlan(schema, needed, read_labels=False), feature_lists)
        self.columns = pa.schema([columns.field(name) for name in self.form.columns])
        self.matrices = list_matrix_columns(self.columns, schema.dense)
        self._checked: pa.Schema | None = None  # schema of the last rows that passed the checks

    def read(self, table: pa.Table) -> Rows:
        """Return rows in their canonical form (data.canonical).

        Raises:
            DataError: A column is missing, appears twice or has another type than in training; a transform fails; or
                the schema does not allow a value (the error names its column and row).
        """
        schema, plan = table.schema, self.form.plan
        is_checked = schema == self._checked
        if not is_checked:
            self._check_names(schema)
        table = pick_columns(table, self.columns.names)
        try:
            if plan.transforms:
                table = apply_transforms(table, plan.transforms, ROWS_PLACE, plan.folder)
                place, names = f"{ROWS_PLACE}, after data.transforms", self.form.columns_after_transforms
                check_present(table.schema, names, place, self.form, fields=False)
            if plan.transforms or not is_checked:
                is_complete = self._check_kinds(table)
                check_types(table.schema, self.form, ROWS_PLACE)
                self._checked = schema if is_complete else None
            rows_read = canonical(table, self.form, Place(ROWS_PLACE, None, 0))
        except DataError as error:
            error.do = "correct the rows"  # the original advice refers to settings of a run
            raise
        columns = [column.combine_chunks() for column in rows_read.columns]
        return Rows.of(pa.RecordBatch.from_arrays(columns, schema=rows_read.schema))

    def _check_names(self, schema: pa.Schema) -> None:
        """Raise DataError if a column is missing or ambiguous."""
        try:
            check_present(schema, self.columns.names, ROWS_PLACE, self.form)
        except DataError as error:
            error.do = "give each column a unique name"  # the original advice refers to files
            if error.what.endswith("is missing"):
                error.expected = f"the columns {format_names(self.columns.names)}"
                error.do = MISSING_ADVICE.format("the column")
            raise

    @cached_property
    def _trained(self) -> pa.Schema:
        """Types of the columns in the training data, after the transforms."""
        plan = self.form.plan
        if not plan.transforms:
            return self.columns
        return apply_transforms(empty_table(self.columns), plan.transforms, ROWS_PLACE, plan.folder).schema

    def _check_kinds(self, table: pa.Table) -> bool:
        """Check that values, after the transforms, are of the kinds with which the model was trained.

        Tables with hashed or managed ids accept text as well as numbers, but the id 5 and the text '5' have
        different rows.

        Returns:
            True if all columns have been checked; False if a column of another kind has no values except nulls.

        Raises:
            DataError: A column has values of another kind.
        """
        is_complete = True
        for name in self.form.columns_after_transforms:
            sent, trained = table.schema.field(name).type, self._trained.field(name).type
            if _is_same_kind(sent, trained):
                continue
            _, values = unnest(to_plain_array(table[name]))  # values of lists count instead of the lists
            if len(values) > values.null_count:
                raise DataError(
                    f"column '{name}' has type {plain(sent)}, but {trained} in the training data",
                    where=f"{ROWS_PLACE}, column {name}",
                    expected=_describe_type(trained),
                )
            is_complete = False
        return is_complete


@lru_cache(maxsize=1024)
def _is_same_kind(sent: pa.DataType, trained: pa.DataType) -> bool:
    """Return True if values of type `sent` are accepted in a column of type `trained`.

    Text, times and numbers (including booleans) differ, but text is accepted for times. Lists are accepted only for
    lists. Null and all other types are accepted here; `check_types` rejects unsupported types.
    """
    if list_element_type(plain(sent)) is not None and list_element_type(trained) is None:
        return False
    kinds = _classify_type(sent), _classify_type(trained)
    return None in kinds or kinds[0] == kinds[1] or kinds in ACCEPTED_KINDS


def _classify_type(kind: pa.DataType) -> str | None:
    """Return text, time or number for a type of values or lists; None for null and for other types."""
    values = value_type(kind)
    if is_text(values):
        return "text"
    if types.is_temporal(values):
        return "time"
    is_number = types.is_integer(values) or types.is_floating(values) or types.is_decimal(values)
    return "number" if is_number or types.is_boolean(values) else None


@contextmanager
def name_rows(part: str) -> Iterator[None]:
    """Name the part of a request, `user` or `candidates`, in each DataError that the block raises."""
    try:
        yield
    except DataError as error:
        where = (error.where or "").replace(ROWS_PLACE, part, 1)
        error.where = where.removesuffix(", row 0") if part == "user" else where
        if part == "candidates" and error.do:
            error.do = error.do.replace("to each row", "to the user or to each candidate", 1)
        raise


@dataclass(frozen=True)
class ObjectRows:
    """Rows of a JSON request, which are converted to a table when they are scored.

    The conversion has a cost per column. Rows of requests that are scored together are therefore converted together.

    Attributes:
        rows: One mapping of columns to values per row, not yet checked.
        schema: Columns that the model reads, with the types of their values.
    """

    rows: list[Any]
    schema: pa.Schema

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, rows: slice) -> ObjectRows:
        return ObjectRows(self.rows[rows], self.schema)


def concat_rows(parts: Sequence[pa.Table | ObjectRows]) -> pa.Table:
    """Return the rows of several parts (at least one), which must have the same type and schema, as one table.

    Raises:
        DataError: A row is not a mapping or lacks a column, or a value does not match the type of its column.
    """
    objects = [part for part in parts if isinstance(part, ObjectRows)]
    if objects:
        return to_table([row for part in objects for row in part.rows], objects[0].schema)
    return parts[0] if len(parts) == 1 else pa.concat_tables(parts)


def to_table(rows: Any, columns: pa.Schema) -> pa.Table:
    """Return rows as a table.

    Args:
        rows: A pyarrow.Table or RecordBatch, a pandas.DataFrame, a mapping of columns to values (one row) or
            a list of mappings. Mappings must contain every column; None is a null.
        columns: Columns to read from mappings, with their types.

    Raises:
        DataError: The rows have another type, a mapping lacks a column, or a value has another type than its column.
    """
    if isinstance(rows, pa.Table):
        return rows
    if isinstance(rows, pa.RecordBatch):
        return pa.Table.from_batches([rows])
    if isinstance(rows, Mapping):
        rows = [rows]
    if isinstance(rows, list | tuple):
        values = _transpose(rows, columns)
        arrays = [to_column(*each) for each in zip(values, columns, strict=True)]
        return pa.table(arrays, schema=columns)
    try:
        try:
            return pa.Table.from_pandas(rows, preserve_index=False)
        except pa.ArrowException:  # e.g. lists as NumPy arrays of several dtypes: an empty array is float64
            schema = pa.schema([field for field in columns if field.name in rows.columns])
            return pa.Table.from_pandas(rows, schema, preserve_index=False)
    except (pa.ArrowException, AttributeError, TypeError, ValueError) as error:
        reason = f"their type is {type(rows).__name__}" if isinstance(error, AttributeError) else get_first_line(error)
        expected = "mappings of columns to values, a pandas.DataFrame, pyarrow.Table or pyarrow.RecordBatch"
        raise DataError(f"the rows cannot be read as a table: {reason}", where=ROWS_PLACE, expected=expected) from None


def repeat_users(candidates: pa.Table, users: pa.Table, names: Sequence[str], counts: Sequence[int]) -> pa.Table:
    """Return the candidates, to which columns of their users are appended.

    Args:
        candidates: Candidates of all users, in the order of the users.
        users: One row per user.
        names: Columns of the users to append.
        counts: Number of candidates of each user.
    """
    places = pa.array(np.repeat(np.arange(len(counts)), counts))
    for name in names:
        candidates = candidates.append_column(users.schema.field(name), users[name].take(places))
    return candidates


def _transpose(rows: Sequence[Any], columns: pa.Schema) -> list[Sequence[Any]]:
    """Return the values of each column of mappings; raise DataError if a row is not a mapping or lacks a column."""
    names = columns.names
    if not rows or not names:
        return [[] for _ in names]
    try:
        if len(names) == 1:  # itemgetter of a single name returns values instead of tuples
            return [[row[names[0]] for row in rows]]
        return list(zip(*map(itemgetter(*names), rows), strict=True))
    except (KeyError, TypeError, IndexError):
        for at, row in enumerate(rows):
            if not isinstance(row, Mapping):
                what, expected = f"the row is not a mapping: {shorten_repr(row)}", "a mapping of columns to values"
                raise _make_type_error(what, at, None, expected) from None
            for field in columns:
                if field.name not in row:
                    what, do = f"column '{field.name}' is missing", MISSING_ADVICE.format(field.name)
                    raise _make_type_error(what, at, field.name, _describe_type(field.type), do) from None
        raise


def to_column(values: Sequence[Any], field: pa.Field) -> pa.Array:
    """Return Python values as a column. Times may be text, as in JSON.

    Raises:
        DataError: A value does not match the type of the column.
    """
    name = field.name
    try:
        return to_array(values, field.type)
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        invalid = (i for i, value in enumerate(values) if not _is_convertible(value, field.type))
        # If every single value can be converted, some times are text and others are numbers.
        not_text = (i for i, value in enumerate(values) if not isinstance(value, str | None))
        at = next(chain(invalid, not_text))
        value, inner = values[at], list_element_type(field.type)
        if inner is not None and isinstance(value, list):  # name the first wrong element of a long list
            value = next((element for element in value if not _is_convertible(element, inner)), value)
        what = f"column '{name}' has the invalid value {shorten_repr(value)}"
        raise _make_type_error(what, at, name, _describe_type(field.type)) from None


def to_array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Return Python values as an array of a type. Times may be text, as in JSON.

    Raises:
        ArrowException, OverflowError, TypeError, ValueError: A value does not match the type.
    """
    element = list_element_type(kind)
    if element and str in set(map(type, values)):  # Arrow would read text as a list of characters
        raise TypeError("a value is text instead of a list")
    if types.is_temporal(element or kind):
        return _to_times(values, kind, element or kind)
    array = pa.array(values, kind)
    if types.is_integer(element or kind):  # Arrow would truncate fractions
        flat = chain.from_iterable(each for each in values if each is not None) if element else values
        if float in set(map(type, flat)):
            raise TypeError("a value has a decimal point instead of being a whole number")
    return array


def _to_times(values: Sequence[Any], kind: pa.DataType, element: pa.DataType) -> pa.Array:
    """Return times, or lists of times, as an array; `element` is the type of the times. Errors as in `to_array`."""
    lists = [values] if element == kind else [each for each in values if each is not None]
    kinds = set(map(type, chain.from_iterable(lists)))
    if float in kinds or (kinds & {int, bool} and not types.is_duration(element)):
        raise TypeError("a time is a number with a decimal point or without a known unit")
    if str not in kinds:
        return pa.array(values, kind)
    array = pa.array(values, pa.string() if element == kind else pa.list_(pa.string()))
    if types.is_timestamp(element) and element.unit in ("s", "ms"):  # clients write six digits of a second
        finer = pa.timestamp("us", element.tz)
        array = array.cast(finer if element == kind else pa.list_(finer))
    return array.cast(kind)


def _is_convertible(value: Any, kind: pa.DataType) -> bool:
    try:
        to_array([value], kind)
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        return False
    return True


def _make_type_error(what: str, row: int, column: str | None, expected: str, do: str = "correct the rows") -> DataError:
    column_text = "" if column is None else f", column {column}"
    return DataError(what, where=f"{ROWS_PLACE}{column_text}, row {row}", expected=expected, do=do)


def _describe_type(kind: pa.DataType) -> str:
    """Return a noun phrase that describes the JSON values of a type."""
    inner = list_element_type(kind)
    if inner is not None:
        return f"a list of values, each {_describe_type(inner)}"
    if types.is_integer(kind):
        return "a whole number below 2⁶³, without a decimal point" if kind == pa.int64() else f"a whole number ({kind})"
    if types.is_floating(kind):
        return "a number"
    if types.is_timestamp(kind):
        offset, end = ("with", "Z") if kind.tz else ("without", "")
        example = f"such as 2026-05-31T12:00:00{end}, exact to {TIME_UNITS[kind.unit]}"
        return f"a time in ISO 8601 {offset} an offset, {example}"
    if types.is_duration(kind):
        return f"a whole number of {TIME_UNITS[kind.unit]}"
    if types.is_temporal(kind):
        return f"a time in ISO 8601 ({kind})"
    return {pa.bool_(): "true or false", pa.string(): "text"}.get(kind, str(kind))


def widen_type(kind: pa.DataType) -> pa.DataType:
    """Return the type to which untyped values (JSON) of a column are converted.

    Integers become int64 (uint64 stays), floating-point numbers and decimals float64, large text text, also in lists.
    """
    kind = plain(kind)
    inner = list_element_type(kind)
    if inner is not None:
        return pa.list_(widen_type(inner))
    if types.is_integer(kind):
        return pa.uint64() if kind == pa.uint64() else pa.int64()
    if types.is_floating(kind) or types.is_decimal(kind):
        return pa.float64()
    if types.is_large_string(kind):
        return pa.string()
    return kind
