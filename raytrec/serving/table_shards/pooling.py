"""Pool the rows of one stack for a request, from the replica's cache of frequent rows and the sums of the shards."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from threading import Lock

import numpy as np
import torch

from raytrec.serving.table_shards.messages import StackRequest

PAGE_BYTES = 4096
MIX = np.uint64(0x9E3779B97F4A7C15)  # multiplier of Fibonacci hashing
BYTES_PER_SLOT = 17  # size of a slot without its vector


def mix(numbers: np.ndarray) -> np.ndarray:
    """Return the hashes of numbers, in [0, 2^31): int64 [N] → int64 [N]."""
    return ((numbers.view(np.uint64) * MIX) >> np.uint64(33)).view(np.int64)


def find_shards(rows_N: np.ndarray, row_bytes: int, shards: int) -> np.ndarray:
    """Return the shard of each row of a stack: int64 [N] → int64 [N].

    Blocks of rows that fill whole pages are distributed by a hash. A shard therefore reads only its own pages of the
    mapped files. Frequent rows, which are often neighbors, are distributed evenly.
    """
    return mix(rows_N // (PAGE_BYTES // gcd(PAGE_BYTES, row_bytes))) % shards


class RowCache:
    """Direct-mapped cache of one stack's rows: each row has a single possible slot. All methods are thread-safe.

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
        """Insert rows that `find` has selected, unless `drop` has been called since `find` returned `drops`."""
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


@dataclass(eq=False)
class ShardedStack:
    """Stack (tables of one dimension and precision, in order) whose rows are distributed over shards.

    Attributes:
        dim: Embedding dimension.
        row_bytes: Size of a stored row in bytes.
        shards: Number of shards.
        cache: Cache of rows.
    """

    dim: int
    row_bytes: int
    shards: int
    cache: RowCache

    def find_shards(self, rows_N: np.ndarray) -> np.ndarray:
        """Return the shard of each row: int64 [N] → int64 [N]."""
        return find_shards(rows_N, self.row_bytes, self.shards)


class StackLookup:
    """Lookup and pooling of one stack's rows in one request.

    The shards pool bags of several rows, except for rows that are in the cache or will be inserted into the cache. The
    replica pools those rows, and adds the sums of the shards.

    Args:
        stack: Stack that contains the rows.
        rows_N: Rows of all bags, int64 [N].
        lengths_K: Number of rows in each bag, int64 [K].
        weights_N: Weight of each row, float32 [N]; None: 1.

    Attributes:
        found: Number of rows found in the cache.
        vector_bytes: Size of the vectors of all rows in bytes.
    """

    def __init__(self, stack: ShardedStack, rows_N: np.ndarray, lengths_K: np.ndarray, weights_N: np.ndarray | None):
        self._stack, self._rows, self._weights = stack, rows_N, weights_N
        self._bags = np.repeat(np.arange(len(lengths_K)), lengths_K)
        is_found_N, vectors, self._is_new, self._drops = stack.cache.find(rows_N)
        self._is_single = is_found_N | self._is_new | (lengths_K == 1)[self._bags]
        self._vector_places = self._is_single.cumsum() - 1  # of single rows
        self._vectors = np.zeros((int(self._is_single.sum()), stack.dim), np.float32)
        self._vectors[self._vector_places[is_found_N]] = vectors
        self._shards = stack.find_shards(rows_N)
        self._shards[is_found_N] = -1
        self.found, self._bag_count, self.vector_bytes = len(vectors), len(lengths_K), 4 * stack.dim * len(rows_N)
        self._has_one_row_each = bool((lengths_K == 1).all())
        self._parts: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # by shard: single rows, bags of pooled rows
        self._sums: list[tuple[np.ndarray, np.ndarray]] = []

    def request(self, shard: int) -> StackRequest:
        """Return the request for the rows of a shard. Call this method once, before `count_values` and `add`."""
        is_here = self._shards == shard
        single, pooled = (is_here & self._is_single).nonzero()[0], (is_here & ~self._is_single).nonzero()[0]
        bags = self._bags[pooled]
        starts = np.diff(bags, prepend=-1).nonzero()[0]
        self._parts[shard] = single, bags[starts]
        weights = self._weights[pooled] if self._weights is not None and len(pooled) else None
        return StackRequest(self._rows[np.concatenate([single, pooled])], np.diff(starts, append=len(bags)), weights)

    def count_values(self, shard: int) -> int:
        """Return the number of values in the shard's response."""
        return sum(map(len, self._parts[shard])) * self._stack.dim

    def add(self, shard: int, answer: np.ndarray) -> None:
        """Add the values of a shard's response, float32 [count_values]. Without this call, its vectors are 0."""
        single, bags = self._parts[shard]
        values = answer.reshape(-1, self._stack.dim)
        self._vectors[self._vector_places[single]] = values[: len(single)]
        self._sums.append((bags, values[len(single) :]))
        is_new = self._is_new[single]
        self._stack.cache.insert(self._rows[single[is_new]], values[: len(single)][is_new], self._drops)

    def pool(self) -> torch.Tensor:
        """Return the sums of all bags, float32 [K, dim]; 0 for empty bags."""
        vectors, bags = torch.from_numpy(self._vectors), self._bags[self._is_single]
        if self._weights is not None:
            vectors = vectors * torch.from_numpy(self._weights[self._is_single]).unsqueeze(1)
        if self._has_one_row_each:
            return vectors
        lengths = torch.from_numpy(np.bincount(bags, minlength=self._bag_count))
        sums_KD = torch.segment_reduce(vectors, "sum", lengths=lengths, unsafe=True)
        for places, sums in self._sums:
            sums_KD.numpy()[places] += sums
        return sums_KD
