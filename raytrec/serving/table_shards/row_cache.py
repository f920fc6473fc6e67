"""Cache of the rows that a replica looks up most often."""

from __future__ import annotations

from threading import Lock

import numpy as np

MIX = np.uint64(0x9E3779B97F4A7C15)  # multiplier of Fibonacci hashing
BYTES_PER_SLOT = 17  # size of a slot without its vector


def mix(numbers: np.ndarray) -> np.ndarray:
    """Return the hashes of numbers, in [0, 2^31): int64 [N] → int64 [N]."""
    return ((numbers.view(np.uint64) * MIX) >> np.uint64(33)).view(np.int64)


class RowCache:
    """Direct-mapped cache of rows of one stack, in which a row has only one possible slot. All methods are thread-safe.

    A missed row is inserted if the previous miss in its slot was a miss of the same row, unless the row in the slot has
    been found since the last attempt to replace it.

    Args:
        rows: Number of rows of the stack.
        dim: Number of values in a vector.
        capacity_bytes: Maximum size in bytes; if not even one row fits, no row is kept.
    """

    def __init__(self, rows: int, dim: int, capacity_bytes: int):
        capacity = capacity_bytes // (4 * dim + BYTES_PER_SLOT)
        self._is_whole = capacity >= rows  # each row has its own slot
        slots = rows if self._is_whole else 1 << capacity.bit_length() >> 1
        self._rows, self._missed = np.full(slots, -1, np.int64), np.full(slots, -1, np.int64)
        self._is_used, self._vectors = np.zeros(slots, bool), np.empty((slots, dim), np.float32)
        self._lock, self._drops = Lock(), 0

    def _find_slots(self, rows_N: np.ndarray) -> np.ndarray:
        return rows_N if self._is_whole else mix(rows_N) & (len(self._rows) - 1)

    def find(self, rows_N: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
        """Look up rows, int64 [N].

        Returns:
            True for each row found, bool [N]; the vectors of these rows, float32 [found, dim]; True for each
            missed row that should be inserted, bool [N]; and the argument `drops` of `insert`.
        """
        if not len(self._rows):
            none_N = np.zeros(len(rows_N), bool)
            return none_N, self._vectors, none_N, 0
        slots_N = self._find_slots(rows_N)
        with self._lock:
            is_found_N = self._rows[slots_N] == rows_N
            is_new_N = ~is_found_N & (self._missed[slots_N] == rows_N)
            found, missed, new = slots_N[is_found_N], slots_N[~is_found_N], slots_N[is_new_N]
            self._missed[missed] = rows_N[~is_found_N]
            is_new_N[is_new_N] = ~self._is_used[new]
            self._is_used[new], self._is_used[found] = False, True
            return is_found_N, self._vectors[found], is_new_N, self._drops

    def insert(self, rows_N: np.ndarray, vectors_ND: np.ndarray, drops: int) -> None:
        """Insert rows that `find` has selected, unless `drop` has been called since then (`drops`)."""
        slots_N = self._find_slots(rows_N)
        with self._lock:
            if drops == self._drops:
                self._rows[slots_N], self._vectors[slots_N] = rows_N, vectors_ND  # in equal slots, the last row stays

    def drop(self, rows_N: np.ndarray) -> None:
        """Remove rows whose vectors have changed, int64 [N]. Vectors that are being looked up are not inserted."""
        if not len(self._rows):
            return
        slots_N = self._find_slots(rows_N)
        with self._lock:
            self._rows[slots_N[self._rows[slots_N] == rows_N]] = -1
            self._drops += 1
