"""Types of Arrow columns, and whether a file's are what the schema says."""

from __future__ import annotations

import pyarrow as pa
from pyarrow import types

from raytrec.errors import DataError, did_you_mean
from raytrec.schema import Schema


def check_present(arrow: pa.Schema, columns: list[str], where: str) -> None:
    """Looks whether columns are there.

    Raises:
        DataError: one is missing; names the nearest there is.
    """
    for column in columns:
        if column not in arrow.names:
            near = did_you_mean(column, arrow.names)
            raise DataError(
                f"column '{column}' is missing",
                where=where,
                expected=f"what the schema and data.transforms read; there are {', '.join(arrow.names)}",
                do=f"did you mean '{near}'? Correct the schema" if near else "correct the schema or the data",
            )


def check_types(arrow: pa.Schema, schema: Schema, uri: str) -> None:
    """Looks at the types of the columns that the schema names.

    Raises:
        DataError: a column of the wrong type.
    """
    for column in schema.labels:
        _check_number(arrow.field(column).type, column, "label", uri)
    for column in schema.dense:
        _check_number(arrow.field(column).type, column, "dense column", uri)
    for feature, spec in schema.sparse.items():
        text_allowed = schema.tables[spec.table].out_of_range == "hash"
        _check_ids(arrow.field(schema.column_of(feature)).type, feature, spec.table, text_allowed, uri)
        if spec.weights:
            _check_weights(arrow.field(spec.weights).type, spec.weights, uri)


def _check_number(kind: pa.DataType, column: str, role: str, uri: str) -> None:
    if not (
        types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind) or types.is_decimal(kind)
    ):
        what = "a list" if is_list(kind) else str(kind)
        raise DataError(
            f"{role} '{column}' is {what} ({kind})"
            if is_list(kind)
            else f"{role} '{column}' is of type {kind}",
            where=f"{uri}, column {column}",
            expected="one number a row",
            do="convert the column, or list it under sparse",
        )


def _check_ids(kind: pa.DataType, feature: str, table: str, text_allowed: bool, uri: str) -> None:
    value = value_type(kind)
    if types.is_integer(value) or (is_text(value) and text_allowed):
        return
    raise DataError(
        f"sparse feature '{feature}' holds {value}",
        where=f"{uri}, column {feature}",
        expected="integer ids, or lists of them",
        do=f"for text, set tables.{table}.out_of_range to hash"
        if is_text(value)
        else "convert the column, or list it under dense",
    )


def _check_weights(kind: pa.DataType, column: str, uri: str) -> None:
    if not (is_list(kind) and (types.is_floating(kind.value_type) or types.is_integer(kind.value_type))):
        raise DataError(
            f"weights '{column}' are of type {kind}",
            where=f"{uri}, column {column}",
            expected="lists of numbers, one for each id",
        )


def is_list(kind: pa.DataType) -> bool:
    """Whether an Arrow type is any kind of list."""
    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def is_text(kind: pa.DataType) -> bool:
    """Whether an Arrow type is text or bytes."""
    return (
        types.is_string(kind)
        or types.is_large_string(kind)
        or types.is_binary(kind)
        or types.is_large_binary(kind)
    )


def value_type(kind: pa.DataType) -> pa.DataType:
    """The type of the ids inside lists and dictionaries."""
    while True:
        if is_list(kind) or types.is_dictionary(kind):
            kind = kind.value_type
        else:
            return kind
