"""The read task: decode one item's row groups, validate them, bring them into one form. No torch here.

The form is a table of few columns, so that later slicing and concatenating cost little:

    labels   fixed_size_list<float32>[labels]
    dense    fixed_size_list<float32>[dense]      (absent without dense columns)
    lengths  fixed_size_list<int32>[features]     ids of each feature in this row
    ids      list<int64>                          the ids of all features, one feature after the other
    weights  list<float32>                        their weights (absent when the schema has none)
"""

from __future__ import annotations

from itertools import groupby

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from raytrec.data.columns import Place, bags, numbers
from raytrec.data.order import Item, Part
from raytrec.errors import DataError
from raytrec.schema import Schema
from raytrec.storage import open_filesystem


def read_item(item: Item, schema: Schema) -> pa.Table:
    """The rows of an item in canonical form, shuffled if it has a seed.

    Raises:
        DataError: a row group that cannot be decoded, or a value that the schema does not allow; names file,
            row group, column and row.
    """
    pieces = []
    for (path, group), parts in groupby(item.parts, key=lambda part: (part.path, part.group)):
        pieces.append(_read_group(path, group, list(parts), schema))
    table = pa.concat_tables(pieces).combine_chunks()
    if item.seed is not None:
        table = table.take(np.random.default_rng(item.seed).permutation(table.num_rows))
    return table.slice(item.skip) if item.skip else table


def _read_group(path: str, group: int, parts: list[Part], schema: Schema) -> pa.Table:
    """The parts of one row group, which is decoded once."""
    filesystem, inner = open_filesystem(path)
    try:
        with filesystem.open_input_file(inner) as file:
            reader = pq.ParquetFile(file, pre_buffer=True)
            table = reader.read_row_group(group, columns=schema.columns, use_threads=False)
    except (pa.ArrowException, OSError, IndexError) as error:
        raise DataError(
            f"cannot decode the row group: {str(error).splitlines()[0]}",
            where=f"{path}, row group {group}",
            expected="a whole Parquet file that does not change while it is read",
            do="write or copy the file again",
        ) from None
    if len(parts) == 1:
        part = parts[0]
        return canonical(table.slice(part.first, part.rows), schema, Place(path, group, part.first))
    whole = canonical(table, schema, Place(path, group, 0))
    return pa.concat_tables([whole.slice(part.first, part.rows) for part in parts])


def canonical(table: pa.Table, schema: Schema, place: Place) -> pa.Table:
    """A decoded table in canonical form.

    Args:
        table: any table with the schema's columns.
        place: where its first row lies, for errors.
    """
    columns = {"labels": _matrix([_label(table, name, place) for name in schema.labels], table.num_rows)}
    if schema.dense:
        columns["dense"] = _matrix(
            [numbers(table[name], name, place) for name in schema.dense], table.num_rows
        )
    features = []
    for name, spec in schema.sparse.items():
        weights = table[spec.weights] if spec.weights else None
        size = schema.tables[spec.table]
        features.append(bags(table[schema.column_of(name)], weights, name, spec, size, place))
    columns |= _pack(features, schema.has_weights)
    return pa.table(columns)


def _label(table: pa.Table, name: str, place: Place) -> np.ndarray:
    values = numbers(table[name], name, place)
    wrong = (values < 0) | (values > 1)
    if wrong.any():
        row = int(wrong.argmax())
        raise DataError(
            f"label '{name}' is {values[row]:g}",
            where=place.of(name, row),
            expected="a number in [0, 1]",
            do="map the label to 0 and 1",
        )
    return values


def _matrix(columns: list[np.ndarray], rows: int) -> pa.FixedSizeListArray:
    """Columns of n values as n lists."""
    packed = np.empty((rows, len(columns)), columns[0].dtype)
    for i, column in enumerate(columns):
        packed[:, i] = column
    return pa.FixedSizeListArray.from_arrays(packed.reshape(-1), len(columns))


def _pack(features: list[tuple], weighted: bool) -> dict[str, pa.Array]:
    """Features' (lengths [n], ids, weights or None) as lists that hold a row's ids of all features."""
    lengths_NF = np.stack([lengths for lengths, _, _ in features], axis=1).astype(np.int32)
    ends = np.cumsum(lengths_NF.reshape(-1), dtype=np.int64).reshape(lengths_NF.shape)
    starts_NF = ends - lengths_NF
    total = int(ends[-1, -1]) if ends.size else 0
    ids = np.empty(total, np.int64)
    weights = np.ones(total, np.float32) if weighted else None
    for f, (lengths, values, per_id) in enumerate(features):
        if (lengths == 1).all():
            target = starts_NF[:, f]
        else:
            first = np.cumsum(lengths) - lengths
            target = np.repeat(starts_NF[:, f] - first, lengths) + np.arange(len(values))
        ids[target] = values
        if per_id is not None:
            weights[target] = per_id
    offsets = np.concatenate([[0], ends[:, -1]]).astype(np.int32)
    packed = {
        "lengths": pa.FixedSizeListArray.from_arrays(lengths_NF.reshape(-1), len(features)),
        "ids": pa.ListArray.from_arrays(offsets, ids),
    }
    if weighted:
        packed["weights"] = pa.ListArray.from_arrays(offsets, weights)
    return packed
