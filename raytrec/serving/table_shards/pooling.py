"""Pool the rows of one stack for a request, from the replica's cache and the sums of the shards."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import numpy as np
import torch

from raytrec.serving.table_shards.messages import StackRequest
from raytrec.serving.table_shards.row_cache import RowCache, mix

PAGE_BYTES = 4096


def find_shards(rows_N: np.ndarray, row_bytes: int, shards: int) -> np.ndarray:
    """Return the shard of each row of a stack: int64 [N] → int64 [N].

    Blocks of rows that fill whole pages are distributed by a hash. A shard therefore reads only its own pages of the
    mapped files. Frequent rows, which are often neighbors, are distributed evenly.
    """
    return mix(rows_N // (PAGE_BYTES // gcd(PAGE_BYTES, row_bytes))) % shards


@dataclass(eq=False)
class ShardedStack:
    """Stack (tables of one dimension and precision, in order) whose rows are distributed over shards.

    Attributes:
        rows: Number of rows.
        dim: Embedding dimension.
        row_bytes: Size of a stored row in bytes.
        shards: Number of shards.
        cache: Cache of rows.
    """

    rows: int
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
        """Return the request for the rows of a shard. Call this method once per shard, before the methods below."""
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
        """Add the values of a shard's response, float32 [count_values]. Without this call, the vectors are 0."""
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
