"""Hashes that stay the same between runs and machines. No torch here."""

from __future__ import annotations

import numpy as np
import pyarrow as pa


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
    unique, places = _distinct(flat)
    return (unique % np.uint64(rows)).astype(np.int64)[places]


def hash_text_bits(flat: pa.Array) -> np.ndarray:
    """Text or bytes [n], no nulls → uint64 [n]."""
    unique, places = _distinct(flat)
    return unique[places]


def _distinct(flat: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """(SipHash of each distinct value uint64, place of each value [n] among them)."""
    from pandas.util import hash_array

    encoded = flat.dictionary_encode()
    unique = np.array(encoded.dictionary.to_pylist(), dtype=object)
    hashes = hash_array(unique) if len(unique) else np.empty(0, np.uint64)
    return hashes, encoded.indices.to_numpy(zero_copy_only=False)
