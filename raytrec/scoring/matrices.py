"""Matrices in requests: list columns `dense` and `ids` that hold the values of many columns of the model.

Two matrices cost less to encode, send and decode than dozens of columns.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import pyarrow as pa
from pyarrow import types

from raytrec.common.errors import DataError
from raytrec.data.arrow import to_plain_array, unnest

DENSE, IDS = "dense", "ids"
ROWS_PLACE = "the rows"


def list_matrix_columns(columns: pa.Schema, dense: Collection[str]) -> dict[str, list[str]]:
    """Return the columns of each matrix, in the order of the matrix's values.

    Args:
        columns: Columns that rows must contain, with their types.
        dense: Dense columns of the schema.

    Returns:
        dense: dense columns and other numbers that may have fractions. ids: other columns with one integer a
        row. Text and lists are in neither. The result is empty if a column has the name of a matrix.
    """
    matrices: dict[str, list[str]] = {DENSE: [], IDS: []}
    if matrices.keys() & set(columns.names):
        return {}
    for field in columns:
        if field.name in dense or types.is_floating(field.type):
            matrices[DENSE].append(field.name)
        elif types.is_integer(field.type):
            matrices[IDS].append(field.name)
    return matrices


def read_matrix(table: pa.Table, name: str, columns: Sequence[str]) -> pa.Array | None:
    """Return the values of a matrix, row after row.

    The result is None if the table has no column of this name, or has one of the matrix's columns; the matrix
    is then an additional column, which is ignored.

    Raises:
        DataError: A row does not have one value for each column.
    """
    names = table.column_names
    if names.count(name) != 1 or not columns or not set(names).isdisjoint(columns):
        return None
    offsets, flat = unnest(to_plain_array(table.column(name)))
    wrong = np.diff(offsets) != len(columns)
    if wrong.any():
        row = int(wrong.argmax())
        raise DataError(
            f"'{name}' has {offsets[row + 1] - offsets[row]:,} values",
            where=f"{ROWS_PLACE}, column {name}, row {row}",
            expected=f"{len(columns)} values: {', '.join(columns)}",
        )
    return flat


def split_matrices(table: pa.Table, matrices: Mapping[str, Sequence[str]]) -> pa.Table:
    """Return a table with the columns of its matrices.

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
