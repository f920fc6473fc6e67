"""Stable hashes of ids, and keys for grouping rows. No torch here."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from raytrec.data.arrow import is_text, one_array, plain_array, unnest

NULL_KEY = -(2**63)  # of all nulls, which are one group


def hash_integers(ids: np.ndarray, rows: int) -> np.ndarray:
    """Integers [n] of any type → int64 [n] in [0, rows)."""
    return (hash_bits(ids.astype(np.uint64)) % np.uint64(rows)).astype(np.int64)


def hash_bits(values: np.ndarray) -> np.ndarray:
    """splitmix64 (Steele, Lea, Flood 2014): uint64 [n] → well-mixed uint64 [n]."""
    with np.errstate(over="ignore"):
        values = values + np.uint64(0x9E3779B97F4A7C15)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def hash_text(flat: pa.Array, rows: int) -> np.ndarray:
    """Text or bytes [n], no nulls → int64 [n] in [0, rows)."""
    return (hash_text_bits(flat) % np.uint64(rows)).astype(np.int64)


def hash_text_bits(flat: pa.Array) -> np.ndarray:
    """SipHash of text or bytes [n], no nulls → uint64 [n]; each distinct value is hashed once."""
    from pandas.util import hash_array

    encoded = flat.dictionary_encode()
    distinct = np.array(encoded.dictionary.to_pylist(), dtype=object)
    hashes = hash_array(distinct) if len(distinct) else np.empty(0, np.uint64)
    return hashes[encoded.indices.to_numpy(zero_copy_only=False)]


def group_keys(array: pa.Array) -> np.ndarray:
    """Each value's key, int64 [n]; equal values have equal keys.

    Integers are their own key (of uint64, the same bits), as are true and false (1 and 0), and dates and
    times in their own unit. Text and bytes are hashed (SipHash of their UTF-8), decimals as the text that
    they are written as, and floats by their bits (splitmix64; NaN is one value, and -0.0 is 0.0). Some two
    of n hashed values share a key with a probability of about n² / 2⁶⁵: 3e-8 for a million of them.

    Raises:
        TypeError: a type that is none of these.
    """
    array = plain_array(array)
    there = array.is_valid().to_numpy(zero_copy_only=False) if array.null_count else None
    if there is None:
        return _keys(array)
    keys = np.full(len(array), NULL_KEY, np.int64)
    if there.any():
        keys[there] = _keys(array.drop_null())
    return keys


def keys_of_rows(columns: Sequence[pa.ChunkedArray], rows: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return the group keys that each row has in columns of values or of lists of values; nulls have none.

    Args:
        columns: Columns of equal length.
        rows: Number of rows, for no columns.

    Returns:
        Number of keys of each row, int64 [rows]; and the keys, row after row, int64.
    """
    of, keys = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for column in columns:
        offsets, values = unnest(one_array(column))
        rows = len(column)
        of.append(np.repeat(np.arange(rows), np.diff(offsets)))
        keys.append(group_keys(values))
    whole = np.concatenate(of)
    order = np.argsort(whole, kind="stable")
    return np.bincount(whole, minlength=rows), np.concatenate(keys)[order]


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
        values = array.cast(pa.float64()).to_numpy() + 0.0  # of -0.0, too, 0.0
        values[np.isnan(values)] = np.nan
        return hash_bits(values.view(np.uint64)).view(np.int64)
    if is_text(array.type):
        return hash_text_bits(array).view(np.int64)
    raise TypeError(f"a column of {kind} has no keys")
