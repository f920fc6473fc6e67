"""Matrices in requests: list columns `dense` and `ids`, which contain the values of many columns of the model.

Two matrices are faster to encode, send and decode than dozens of columns.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import pyarrow as pa
from pyarrow import types

from raytrec.common.errors import DataError
from raytrec.common.formatting import format_count
from raytrec.data.arrow import plain_array, to_plain_array, unnest

DENSE_MATRIX, ID_MATRIX = "dense", "ids"
Matrices = Mapping[str, np.ndarray]  # values of each matrix, [B, columns]
ROWS_PLACE = "the rows"  # place of a request's rows in error messages


def list_matrix_columns(columns: pa.Schema, dense: Collection[str]) -> dict[str, list[str]]:
    """Return the columns of each matrix, in the order of the matrix's values.

    Args:
        columns: Columns that rows must contain, with their types.
        dense: Dense columns of the schema.

    Returns:
        Matrix → columns. `dense` contains all dense columns and other floating-point columns, and `ids` contains all
        other columns with one integer per row. Columns of other types, such as text or lists, are in neither. The
        result is empty if a column has the name of a matrix.
    """
    matrices: dict[str, list[str]] = {DENSE_MATRIX: [], ID_MATRIX: []}
    if matrices.keys() & set(columns.names):
        return {}
    for field in columns:
        if field.name in dense or types.is_floating(field.type):
            matrices[DENSE_MATRIX].append(field.name)
        elif types.is_integer(field.type):
            matrices[ID_MATRIX].append(field.name)
    return matrices


def read_matrix(table: pa.Table, name: str, columns: Sequence[str]) -> pa.Array | None:
    """Return the values of a matrix, concatenated over rows, as an array of B · len(columns) values.

    The result is None if the table has no column of this name or has one of the matrix's columns, or if `columns` is
    empty. A column with the name of the matrix is then an additional column, which is ignored.

    Args:
        table: B rows of a request.
        name: Name of the matrix.
        columns: Columns of the matrix, in the order of its values.

    Raises:
        DataError: A row does not have one value for each column.
    """
    place = table.schema.get_field_index(name) if columns else -1
    if place < 0 or not set(columns).isdisjoint(table.schema.names):
        return None
    array = to_plain_array(table.column(place))
    if types.is_fixed_size_list(array.type) and array.type.list_size == len(columns) and not array.null_count:
        return plain_array(array.flatten())
    offsets, flat = unnest(array)
    wrong = np.diff(offsets) != len(columns)
    if wrong.any():
        row = int(wrong.argmax())
        raise DataError(
            f"matrix '{name}' has {format_count(offsets[row + 1] - offsets[row], 'value')} in row {row}",
            where=f"{ROWS_PLACE}, column {name}, row {row}",
            expected=f"{format_count(len(columns), 'value')}: {', '.join(columns)}",
        )
    return flat


def read_matrices(table: pa.Table, matrices: Mapping[str, Sequence[str]]) -> Matrices:
    """Return matrix → values, [B, columns]; {} if the table has columns other than the matrices, or has no rows.

    The dtype is that of the table's values; values with nulls become floating point with NaN.

    Args:
        table: Rows of a request.
        matrices: Result of `list_matrix_columns`.

    Raises:
        DataError: A row does not have one value for each column.
    """
    if not len(table) or table.num_columns > len(matrices) or not matrices.keys() >= set(table.schema.names):
        return {}
    flat = {name: read_matrix(table, name, columns) for name, columns in matrices.items() if columns}
    arrays = {name: array.to_numpy(zero_copy_only=False) for name, array in flat.items() if array is not None}
    return {name: array.reshape(len(table), -1) for name, array in arrays.items()}


def split_matrices(table: pa.Table, matrices: Mapping[str, Sequence[str]]) -> pa.Table:
    """Return a request's table to which the columns in its matrices, if any, are appended.

    Args:
        table: Rows of a request.
        matrices: Result of `list_matrix_columns`.

    Raises:
        DataError: A row does not have one value for each column.
    """
    for name, columns in matrices.items():
        if (flat := read_matrix(table, name, columns)) is not None:
            for place, column in enumerate(columns):
                table = table.append_column(column, flat[place :: len(columns)])
    return table
