"""Hashes that stay the same between runs and machines. No torch here."""

from __future__ import annotations

import numpy as np
import pyarrow as pa


def hash_integers(ids: np.ndarray, rows: int) -> np.ndarray:
    """Integers [n] of any type → int64 [n] in [0, rows)."""
    return (_mix(ids.astype(np.uint64)) % np.uint64(rows)).astype(np.int64)


def _mix(values: np.ndarray) -> np.ndarray:
    """splitmix64 (Steele, Lea, Flood 2014): uint64 [n] → well-mixed uint64 [n]."""
    with np.errstate(over="ignore"):
        values = values + np.uint64(0x9E3779B97F4A7C15)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def hash_text(flat: pa.Array, rows: int) -> np.ndarray:
    """Text or bytes [n], no nulls → int64 [n] in [0, rows); each distinct value is hashed once (SipHash)."""
    from pandas.util import hash_array

    encoded = flat.dictionary_encode()
    unique = np.array(encoded.dictionary.to_pylist(), dtype=object)
    hashes = hash_array(unique) % np.uint64(rows) if len(unique) else np.empty(0, np.uint64)
    return hashes.astype(np.int64)[encoded.indices.to_numpy(zero_copy_only=False)]
