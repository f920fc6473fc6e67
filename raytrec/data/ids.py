"""Read and check the ids of sparse features, hash ids, and compute group keys. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from raytrec.common.errors import DataError
from raytrec.common.formatting import format_count
from raytrec.config.schema import advise_transform
from raytrec.config.schema_parts import Sparse, Table
from raytrec.data.arrow import is_list, is_text, plain_array, to_plain_array, unnest
from raytrec.data.column_conversion import (
    FIRST_INEXACT_INTEGER,
    SKIP_ADVICE,
    Place,
    as_floats,
    check_finite,
    find_first_length_mismatch,
    find_first_null,
    find_first_true,
    make_row_lookup,
    to_float64,
)
from raytrec.data.read_plans import NO_MANAGED_ID

NULL_KEY = -(2**63)  # key of null; all nulls form one group

# Sparse feature → (number of ids brought into range by hashing or clamping, number of all ids).
ChangeCounts = dict[str, tuple[int, int]]


@dataclass(frozen=True)
class Feature:
    """Sparse feature of a decoded table, with the settings by which its ids are read.

    Attributes:
        name: Name of the feature.
        spec: Definition of the feature in the schema.
        table: Definition of the feature's table in the schema.
        place: Location of the table's first row, for messages.
        tally: Mapping that receives the id counts of the feature when its ids are read.
    """

    name: str
    spec: Sparse
    table: Table
    place: Place
    tally: ChangeCounts

    @property
    def column(self) -> str:
        """Return the name of the Parquet column that contains the ids."""
        return self.spec.column or self.name


def read_single_ids(table: pa.Table, feature: Feature, no_id: int) -> np.ndarray:
    """Return the ids of a feature with at most one id per row, [n] of any integer type; `no_id` for nulls.

    Text is hashed. Integers out of range are hashed or clamped if the table allows it; managed ids have no range.
    Whole floats are accepted as ids, NaN as null. The ids are counted in `feature.tally`.

    Raises:
        DataError: The column contains lists; a float has a fraction or a magnitude of 2**53 or more; or the table
            rejects an id out of range.
    """
    array = _read_ids(table, feature)
    if is_list(array.type):
        raise DataError(
            f"feature '{feature.name}' has lists of ids instead of one id per row",
            where=feature.place.of(feature.column),
            expected="the type that the files had when they were scanned; in requests, the type in the training data",
            do="do not modify files while they are read; let data.transforms return the same types for all tables",
        )
    if array.null_count == 0 and pa.types.is_integer(array.type):
        return _in_range(array.to_numpy(), feature, int)
    offsets, flat = unnest(array)
    ids = np.full(len(array), no_id, np.int64)
    ids[np.diff(offsets) > 0] = _ids(flat, feature, make_row_lookup(offsets))
    return ids


def bags(table: pa.Table, feature: Feature) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return the ids of a feature as bags, one bag of ids per row, with their weights; count the ids in its tally.

    Returns:
        Offsets, int32 [n + 1] from 0; ids, [offsets[n]] of any integer type, as in `read_single_ids`; weights,
        float32 [offsets[n]], or None if the feature has no weights. A null row is an empty bag.

    Raises:
        DataError: A list contains a null; a float has a fraction or a magnitude of 2**53 or more; the table rejects
            an id out of range; or the weights are not one finite number per id.
    """
    offsets, flat = unnest(_read_ids(table, feature))
    spec, rows = feature.spec, make_row_lookup(offsets)
    if (index := find_first_null(flat)) is not None:
        fill = advise_transform("fill_null", feature.column, value="ID")
        drop = f"{advise_transform('drop_null', feature.column)}; for candidates, {fill}"
        raise DataError(
            f"feature '{feature.name}' contains a null inside a list",
            where=feature.place.of(feature.column, rows(index)),
            expected="ids; an empty list or, except for candidates, null for a row without ids",
            do=fill if spec.weights or spec.side_features else drop,
        )
    ids = _ids(flat, feature, rows)
    if spec.weights is None:
        return offsets, ids, None
    id_weights = _align_with_ids(table, spec.weights, feature, offsets)
    id_weights = id_weights.cast(pa.float32(), safe=False).to_numpy(zero_copy_only=False)
    check_finite(id_weights, spec.weights, feature.place, rows)
    return offsets, ids, id_weights


def _read_ids(table: pa.Table, feature: Feature) -> pa.Array:
    """Return a feature's column as a plain array; a column of floats is converted to int64, and NaN to null.

    Raises:
        DataError: A float has a fraction, or its magnitude is 2**53 or more.
    """
    array = to_plain_array(table[feature.column])
    if not pa.types.is_floating(array.type):
        return array
    values = as_floats(array, np.float64)
    missing = np.isnan(values)
    exact = missing | ((np.abs(values) < FIRST_INEXACT_INTEGER) & (values == np.floor(values)))
    if (row := find_first_true(~exact)) is not None:
        is_large = np.isfinite(values[row]) and values[row] == np.floor(values[row])
        advice = f"{advise_transform('bucketize', feature.column, boundaries='[…]')}; or list finite values under dense"
        raise DataError(
            f"sparse feature '{feature.name}' contains the value {values[row]:.17g}",
            where=feature.place.of(feature.column, row),
            expected="ids; in a column of floats, whole numbers with a magnitude below 2**53",
            do=f"{'write the ids as integers' if is_large else advice}; or {SKIP_ADVICE}",
        )
    return pa.array(np.where(missing, 0, values).astype(np.int64), mask=missing)


def _align_with_ids(table: pa.Table, name: str, feature: Feature, offsets: np.ndarray) -> pa.Array:
    """Return the flat values of a list column with one value per id.

    Raises:
        DataError: A list's length differs from the number of ids in the row, or a value is null.
    """
    ends, flat = unnest(to_plain_array(table[name]))
    if mismatch := find_first_length_mismatch(ends, offsets):
        row, length, ids = mismatch
        raise DataError(
            f"column '{name}' has {format_count(length, 'value')} for {format_count(ids, 'id')} of '{feature.name}'",
            where=feature.place.of(name, row),
            expected="one value per id",
            do=f"correct the data, or transforms that drop nulls in lists; or {SKIP_ADVICE}",
        )
    if (index := find_first_null(flat)) is not None:
        raise DataError(
            f"column '{name}' contains a null inside a list",
            where=feature.place.of(name, make_row_lookup(offsets)(index)),
            expected=f"a value for each id of feature '{feature.name}'",
            do=f"correct the data; or {SKIP_ADVICE}",
        )
    return flat


def _ids(flat: pa.Array, feature: Feature, rows: Callable[[int], int]) -> np.ndarray:
    """Return ids as integers that the table accepts; text is hashed to table rows, or to 64 bits if ids are managed.

    Args:
        flat: Ids of all rows, integers or text without nulls.
        feature: Feature to which the ids belong.
        rows: Function from a position in `flat` to its row, for error messages.

    Raises:
        DataError: An id is out of range, and table.out_of_range is error.
    """
    table = feature.table
    if pa.types.is_null(flat.type):  # all rows, or lists, are empty
        flat = flat.cast(pa.int64())
    if not is_text(flat.type):
        return _in_range(flat.to_numpy(zero_copy_only=False), feature, rows)
    ids = _in_range(hash_text_bits(flat) if table.ids else hash_text(flat, table.rows), feature, rows)
    if not table.ids:  # text hashed to a table's rows counts as brought into range
        feature.tally[feature.name] = len(flat), len(flat)
    return ids


def _in_range(ids: np.ndarray, feature: Feature, rows: Callable[[int], int]) -> np.ndarray:
    """Return ids in [0, table.rows), clamped or hashed by table.out_of_range, and count them in the feature's tally.

    Managed ids are cast to int64; NO_MANAGED_ID is replaced by the next larger integer.

    Args:
        ids: Ids of any integer type.
        feature: Feature to which the ids belong.
        rows: Function from a position in `ids` to its row, for error messages.

    Raises:
        DataError: An id is out of range, and table.out_of_range is error.
    """
    name, table, tally = feature.name, feature.table, feature.tally
    tally[name] = 0, len(ids)
    if table.ids:
        return np.maximum(ids.astype(np.int64), NO_MANAGED_ID + 1)
    if not len(ids) or _all_below(ids, table.rows):
        return ids
    outside = (ids < 0) | (ids >= table.rows)
    tally[name] = int(outside.sum()), len(ids)
    if table.out_of_range == "error":
        index, key = int(outside.argmax()), f"tables.{feature.spec.table}"
        raise DataError(
            f"id {ids[index]} of feature '{name}' is out of range for table '{feature.spec.table}'",
            where=feature.place.of(feature.column, rows(index)),
            expected=f"0 ≤ id < {table.rows} ({key}.rows)",
            do=f"correct the data; unless the run is resumed, set {key}.out_of_range to clamp or hash; or in new runs, "
            f"correct {key}.rows or set {key}.ids to managed",
        )
    if table.out_of_range == "clamp":
        return np.clip(ids, 0, table.rows - 1).astype(np.int64)
    return np.where(outside, hash_integers(ids, table.rows), ids.astype(np.int64))


def _all_below(ids: np.ndarray, rows: int) -> bool:
    """Return True if all integers of an array [n], n ≥ 1, are in [0, rows)."""
    bits = 8 * ids.itemsize
    if ids.dtype.kind == "i" and rows <= 1 << (bits - 1):
        # One reduction instead of two: viewed as unsigned integers, negative ids are larger than all
        # others.
        ids = ids.view(f"uint{bits}")
        return int(np.maximum.reduce(ids)) < rows
    return int(ids.min()) >= 0 and int(ids.max()) < rows


def side_features(table: pa.Table, feature: Feature, offsets: np.ndarray) -> np.ndarray:
    """Return the side features of each id of a sequence, float64 [N, side features]; times in seconds (to_float64).

    Args:
        table: Decoded table.
        feature: Sequence feature.
        offsets: Offsets of the sequence's ids, int32 [n + 1] from 0.

    Raises:
        DataError: A row does not have one value per id, or a value is null, NaN or infinite.
    """
    names = feature.spec.side_features
    values = np.empty((int(offsets[-1]), len(names)))
    for number, column in enumerate(names):
        values[:, number] = to_float64(_align_with_ids(table, column, feature, offsets))
        check_finite(values[:, number], column, feature.place, make_row_lookup(offsets))
    return values


def hash_integers(ids: np.ndarray, rows: int) -> np.ndarray:
    """Return a hash of each integer in an array [n] of any integer type, int64 [n] in [0, rows)."""
    return (hash_bits(ids.astype(np.uint64)) % np.uint64(rows)).astype(np.int64)


def hash_bits(values: np.ndarray) -> np.ndarray:
    """Return the splitmix64 hash (Steele, Lea, Flood 2014) of each value in a uint64 array of any shape."""
    with np.errstate(over="ignore"):
        values = values + np.uint64(0x9E3779B97F4A7C15)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def hash_text(flat: pa.Array, rows: int) -> np.ndarray:
    """Return a hash of each text or bytes value in an array [n] without nulls, int64 [n] in [0, rows)."""
    return (hash_text_bits(flat) % np.uint64(rows)).astype(np.int64)


def hash_text_bits(flat: pa.Array) -> np.ndarray:
    """Return the SipHash of text or bytes [n] without nulls, uint64 [n]; each distinct value is hashed once."""
    from pandas.util import hash_array

    encoded = flat.dictionary_encode()
    distinct = np.array(encoded.dictionary.to_pylist(), dtype=object)
    hashes = hash_array(distinct) if len(distinct) else np.empty(0, np.uint64)
    return hashes[encoded.indices.to_numpy(zero_copy_only=False)]


def compute_group_keys(array: pa.Array) -> np.ndarray:
    """Return the group key of each value, int64 [n]; equal values of a type have equal keys.

    Null has the key NULL_KEY. Integers are their own keys (uint64 with the same bits). Booleans have keys 1 and
    0. The key of a date, time or duration is its integer value in its unit. Text (as UTF-8), bytes and decimals (as
    text) are hashed by SipHash; the probability of a collision among n values is about n² / 2⁶⁵, e.g. 3e-8 for a
    million. The key of a float is splitmix64 of its float64 bits, where all NaN are equal and -0.0 equals 0.0.

    Raises:
        TypeError: The type of the array is not supported.
    """
    array = plain_array(array)
    if len(array) and not array.null_count:
        return _keys(array)
    is_valid = array.is_valid().to_numpy(zero_copy_only=False)
    keys = np.full(len(array), NULL_KEY, np.int64)
    if is_valid.any():
        keys[is_valid] = _keys(array.drop_null())
    return keys


def compute_row_keys(columns: Sequence[pa.ChunkedArray], rows: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return the group keys of all values in each row, over several columns; nulls outside lists have no key.

    Args:
        columns: Columns of values or lists, of equal length.
        rows: Number of rows; only used if `columns` is empty.

    Returns:
        Number of keys in each row, int64 [rows], and the keys of all rows in order, int64.

    Raises:
        TypeError: A column or its lists have a type that `compute_group_keys` does not support.
    """
    key_rows, keys = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for column in columns:
        offsets, values = unnest(to_plain_array(column))
        rows = len(column)
        key_rows.append(np.repeat(np.arange(rows), np.diff(offsets)))
        keys.append(compute_group_keys(values))
    all_rows = np.concatenate(key_rows)
    order = np.argsort(all_rows, kind="stable")
    return np.bincount(all_rows, minlength=rows), np.concatenate(keys)[order]


def _keys(array: pa.Array) -> np.ndarray:
    kind = array.type
    if types.is_boolean(kind):
        array = array.cast(pa.int8())
    elif types.is_date32(kind) or types.is_time32(kind):
        array = array.cast(pa.int32())
    elif types.is_temporal(kind) and not types.is_interval(kind):
        array = array.cast(pa.int64())
    elif types.is_decimal(kind):
        array = pc.cast(array, pa.string())
    if types.is_integer(array.type):
        values = array.to_numpy()
        return values.view(np.int64) if values.dtype == np.uint64 else values.astype(np.int64, copy=False)
    if types.is_floating(array.type):
        values = array.cast(pa.float64()).to_numpy() + 0.0  # replaces -0.0 by 0.0
        values[np.isnan(values)] = np.nan
        return hash_bits(values.view(np.uint64)).view(np.int64)
    if is_text(array.type):
        return hash_text_bits(array).view(np.int64)
    raise TypeError(f"cannot compute group keys of a column of type {kind}")
