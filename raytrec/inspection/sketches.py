"""Sketches of columns in bounded memory, which count frequent ids and estimate numbers of distinct values."""

from __future__ import annotations

import numpy as np

MAX_ID_COUNTERS = 65_536  # maximum number of ids with a counter
TOP_ID_COUNTS = (1, 10, 100, 1_000, 10_000)
MAX_KEPT_HASHES = 65_536  # counts of distinct values are exact below this number, and accurate to about 0.4 % above


class SmallestHashes:
    """The MAX_KEPT_HASHES smallest distinct hashes of a column's values; see `count_distinct`."""

    def __init__(self) -> None:
        self._hashes = np.empty(0, np.uint64)
        self._new: list[np.ndarray] = []  # not merged yet
        self._new_count = 0

    def add(self, hashes: np.ndarray) -> None:
        """Add the hashes of values, uint64 [n]."""
        if len(self._hashes) == MAX_KEPT_HASHES:
            hashes = hashes[hashes < self._hashes[-1]]
        self._new.append(hashes)
        self._new_count += len(hashes)
        if self._new_count >= MAX_KEPT_HASHES:  # not per row group, because sorting is slower than reading
            self._merge()

    def _merge(self) -> None:
        self._hashes = np.unique(np.concatenate([self._hashes, *self._new]))[:MAX_KEPT_HASHES]
        self._new, self._new_count = [], 0

    def values(self) -> np.ndarray:
        """Return the smallest distinct hashes, uint64 [n], ascending; n ≤ MAX_KEPT_HASHES."""
        if self._new:
            self._merge()
        return self._hashes


def count_distinct(hashes: np.ndarray) -> int:
    """Estimate the number of distinct values from their k = MAX_KEPT_HASHES smallest hashes.

    The estimate is (k − 1) ÷ U, where U is the k-th smallest hash ÷ 2⁶⁴ (Beyer et al., "On Synopses for
    Distinct-Value Estimation Under Multiset Operations", 2007).

    Args:
        hashes: Smallest distinct hashes of the values, uint64 [n], ascending. If n is less than MAX_KEPT_HASHES, they
            must be the hashes of all values, and the result is n.
    """
    if len(hashes) < MAX_KEPT_HASHES:
        return len(hashes)
    return round((MAX_KEPT_HASHES - 1) / (float(hashes[MAX_KEPT_HASHES - 1]) / 2**64))


class HotIds:
    """Counters of frequent ids, by the method of Misra and Gries (1982).

    With more than MAX_ID_COUNTERS ids, the largest count outside the MAX_ID_COUNTERS most frequent ids is subtracted
    from all counts. Ids without a remaining count are removed. `counts` adds the subtracted amount again. Counts are
    exact for ids that have kept a counter since the first subtraction. Other counts are too large, by at most the
    subtracted amount. After n lookups, this amount is at most n ÷ MAX_ID_COUNTERS.
    """

    def __init__(self) -> None:
        self._ids, self._counts = np.empty(0, np.uint64), np.empty(0, np.int64)
        self._new: list[tuple[np.ndarray, np.ndarray]] = []  # not merged yet
        self._new_count = self._taken = self._all = 0

    def add(self, hashes: np.ndarray, counts: np.ndarray) -> None:
        """Add lookups of ids.

        Args:
            hashes: Ids, or hashes of ids, uint64 [n].
            counts: Number of lookups of each id, int64 [n].
        """
        self._all += int(counts.sum())
        self._new.append((hashes, counts))
        self._new_count += len(hashes)
        if self._new_count >= MAX_ID_COUNTERS:  # not per row group, because sorting is slower than reading
            self._merge()

    def _merge(self) -> None:
        hashes, counts = (np.concatenate(each) for each in zip((self._ids, self._counts), *self._new, strict=True))
        self._new, self._new_count = [], 0
        ids, places = np.unique(hashes, return_inverse=True)
        sums = np.bincount(places, counts, len(ids)).astype(np.int64)
        if len(ids) > MAX_ID_COUNTERS:
            place = len(sums) - MAX_ID_COUNTERS - 1
            least = int(np.partition(sums, place)[place])
            self._taken += least
            ids, sums = ids[sums > least], sums[sums > least] - least
        self._ids, self._counts = ids, sums

    def counts(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids with a counter, uint64 [n], ascending, and their (possibly too large) counts, int64 [n]."""
        if self._new:
            self._merge()
        return self._ids, self._counts + self._taken

    def shares(self) -> list[float]:
        """Return the shares of all lookups that go to the 1, 10, 100, 1,000 and 10,000 most frequent ids.

        Of these numbers, only those below the number of ids with a counter have a share in the list.
        """
        counts = np.sort(self.counts()[1])[::-1]
        sums = np.cumsum(counts) / max(1, self._all)
        return [round(min(1.0, float(sums[power - 1])), 5) for power in TOP_ID_COUNTS if power < len(counts)]
