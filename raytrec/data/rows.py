"""The read task: decode one item's row groups, validate them, bring them into one form. No torch here.

The form is a table of few columns, so that later slicing and concatenating cost little:

    labels   fixed_size_list<float32>[labels]
    dense    fixed_size_list<float32>[dense]      (absent without dense columns)
    lengths  fixed_size_list<int32>[features]     ids of each feature in this row
    ids.0    list<int64>                          the ids of the first feature, and so on
    weights.0  list<float32>                      their weights (absent when the schema has none)
    present  bool                                 false: a row left out (only under data.on_error: skip)
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow.fs import FileInfo

from raytrec.data.columns import Place, bags, numbers
from raytrec.data.faults import Faults, retried
from raytrec.data.order import Item, Part
from raytrec.errors import DataError
from raytrec.schema import Schema
from raytrec.storage import open_filesystem

_last_footer: dict[str, Any] = {}
MOST_BAD_ROWS = 64  # of one row group that are looked for one by one; beyond them, what is left is left out


def read_item(item: Item, schema: Schema, faults: Faults | None = None) -> pa.Table:
    """The rows of an item in canonical form, shuffled if it has a seed; always as many as the item says.

    Raises:
        DataError: a row group that cannot be decoded, or a value that the schema does not allow; names file,
            row group, column and row. Under `faults.skip` those rows are not present instead.
    """
    faults = faults or Faults()
    pieces = []
    for (path, group), parts in groupby(item.parts, key=lambda part: (part.path, part.group)):
        pieces.append(_read_group(path, group, list(parts), schema, faults))
    table = pieces[0] if len(pieces) == 1 else pa.concat_tables(pieces).combine_chunks()
    if item.seed is not None:
        table = table.take(np.random.default_rng(item.seed).permutation(table.num_rows))
    return table.slice(item.skip) if item.skip else table


def _read_group(path: str, group: int, parts: list[Part], schema: Schema, faults: Faults) -> pa.Table:
    """The parts of one row group, which is decoded once."""
    try:
        table = _decode(path, group, max(part.first + part.rows for part in parts), schema.columns)
    except DataError as error:
        rows = sum(part.rows for part in parts)
        faults.leave_out(error, rows)
        return _absent(rows, schema)
    first, last = min(part.first for part in parts), max(part.first + part.rows for part in parts)
    table, place = table.slice(first, last - first), Place(path, group, first)
    whole = _present(table, schema, place, faults) if faults.skip else canonical(table, schema, place)
    if len(parts) == 1:
        return whole
    return pa.concat_tables([whole.slice(part.first - first, part.rows) for part in parts])


def _decode(path: str, group: int, rows: int, columns: list[str]) -> pa.Table:
    """A row group that has at least `rows` rows, those columns of it."""

    def read() -> pa.Table:
        filesystem, inner = open_filesystem(path)
        with filesystem.open_input_file(inner) as file:
            footer = _known_footer(path, filesystem.get_file_info(inner))
            reader = pq.ParquetFile(file, metadata=footer, pre_buffer=True, page_checksum_verification=True)
            _last_footer["metadata"] = reader.metadata
            return reader.read_row_group(group, columns=columns, use_threads=False)

    try:
        table = retried(path, read)
        if table.num_rows < rows:
            raise IndexError(f"it has {table.num_rows:,} rows, and had {rows:,} or more before")
        if missing := set(columns) - set(table.column_names):
            raise KeyError(f"column {', '.join(sorted(missing))} is gone")
    except (pa.ArrowException, OSError, IndexError, KeyError, UnicodeDecodeError) as error:
        raise DataError(
            f"cannot decode the row group: {(str(error).splitlines() or [type(error).__name__])[0]}",
            where=f"{path}, row group {group}",
            expected="a whole Parquet file that does not change while it is read",
            do="write or copy the file again, or go on without its rows: data.on_error=skip",
        ) from None
    return table


def _known_footer(path: str, info: FileInfo) -> pq.FileMetaData | None:
    """The footer of the file that this process read last, if it is this file, unchanged. (Parsed for each of
    many row groups, it would cost a good part of what decoding does.)"""
    file = path, info.size, info.mtime_ns
    if _last_footer.get("file") != file:
        _last_footer.clear()
        _last_footer["file"] = file
    return _last_footer.get("metadata")


def _present(
    table: pa.Table, schema: Schema, place: Place, faults: Faults, left: list | None = None
) -> pa.Table:
    """The canonical form with a column `present`: bad rows, found by halving, are empty and not present."""
    left = [MOST_BAD_ROWS] if left is None else left
    try:
        return canonical(table, schema, place).append_column("present", pa.array(np.ones(len(table), bool)))
    except DataError as error:
        if len(table) == 1 or not left[0]:
            left[0] -= left[0] > 0
            faults.leave_out(error, len(table))
            return _absent(len(table), schema)
    half = len(table) // 2
    after = Place(place.path, place.group, place.first + half)
    return pa.concat_tables(
        [
            _present(table.slice(0, half), schema, place, faults, left),
            _present(table.slice(half), schema, after, faults, left),
        ]
    )


def _absent(rows: int, schema: Schema) -> pa.Table:
    """Rows that are left out: nothing in them."""
    zeros = np.zeros(rows, np.float32)
    columns = {"labels": _matrix([zeros] * len(schema.labels), rows)}
    if schema.dense:
        columns["dense"] = _matrix([zeros] * len(schema.dense), rows)
    nothing = np.zeros(rows, np.int64), np.empty(0, np.int64), None
    columns |= _pack([nothing] * len(schema.sparse), schema.has_weights)
    return pa.table(columns | {"present": np.zeros(rows, bool)})


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


def _matrix(columns: list[np.ndarray], rows: int, dtype: type = np.float32) -> pa.FixedSizeListArray:
    """Columns of n values as n lists."""
    packed = np.empty((rows, len(columns)), dtype)
    for i, column in enumerate(columns):
        packed[:, i] = column
    return pa.FixedSizeListArray.from_arrays(packed.reshape(-1), len(columns))


def _pack(features: list[tuple], weighted: bool) -> dict[str, pa.Array]:
    """Features' (lengths [n], ids, weights or None) as a list column each, and all their lengths together."""
    rows = len(features[0][0])
    packed = {"lengths": _matrix([lengths for lengths, _, _ in features], rows, np.int32)}
    for f, (lengths, ids, per_id) in enumerate(features):
        offsets = np.zeros(len(lengths) + 1, np.int32)
        np.cumsum(lengths, out=offsets[1:])
        packed[f"ids.{f}"] = pa.ListArray.from_arrays(offsets, ids)
        if weighted:
            values = np.ones(len(ids), np.float32) if per_id is None else per_id
            packed[f"weights.{f}"] = pa.ListArray.from_arrays(offsets, values)
    return packed
