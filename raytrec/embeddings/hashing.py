"""Hashes of integers, initial values derived from hashes, and keys of managed ids, on any device.

int64 arithmetic wraps around on CPU and GPU, and hashes involve no rounding, so both devices produce the same
bits. data/ids.py computes the same hashes in NumPy.

Managed ids get table rows during training. The key of a managed id is its splitmix64 hash, a bijection of the
64-bit integers. Keys are spread evenly even if ids are not, and an id can be recovered from its key (`unhash_bits`;
`ids_to_keys` describes an exception). Ranks own equal spans of keys, in rank order, so sorting on each rank sorts the
keys of all ranks.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt

import numpy as np
import torch

GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # 64-bit constants as torch's signed integers
MULTIPLIER_1, MULTIPLIER_2 = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
INVERSE_MULTIPLIER_1, INVERSE_MULTIPLIER_2 = 0x96DE1B173F119089 - 2**64, 0x319642B2D24D8EC3  # their inverses
NO_KEY = -(2**63)  # marks an empty slot of a KeyMap
VALUES_PER_BLOCK = 2**19  # values computed at once: a block fits a CPU's cache and keeps a GPU busy
_OWNER_BITS = 32  # number of high bits of a key that determine the rank that owns it


def hash_bits(values: torch.Tensor) -> torch.Tensor:
    """Return the splitmix64 hash (Steele, Lea, Flood 2014) of each integer, int64 [...]; a bijection."""
    bits = values + GOLDEN
    bits ^= _shift_right(bits, 30)
    bits *= MULTIPLIER_1
    bits ^= _shift_right(bits, 27)
    bits *= MULTIPLIER_2
    bits ^= _shift_right(bits, 31)
    return bits


def unhash_bits(hashed: torch.Tensor) -> torch.Tensor:
    """Return the integers that `hash_bits` maps to these hashes, int64 [...]."""
    bits = _invert_xorshift(hashed, 31) * INVERSE_MULTIPLIER_2
    bits = _invert_xorshift(bits, 27) * INVERSE_MULTIPLIER_1
    return _invert_xorshift(bits, 30) - GOLDEN


def _invert_xorshift(bits: torch.Tensor, count: int) -> torch.Tensor:
    """Return x, given x ^ (x shifted right by `count` bits), for a count from 22 to 31."""
    return bits ^ _shift_right(bits, count) ^ _shift_right(bits, 2 * count)


def _shift_right(bits: torch.Tensor, count: int) -> torch.Tensor:
    """Return the bits shifted right and filled with zeros; torch's >> operator repeats the sign bit."""
    return (bits >> count).bitwise_and_(2 ** (64 - count) - 1)


def compute_initial_values(seed: int, table: str, ids: torch.Tensor, columns: range, rows: int) -> torch.Tensor:
    """Return the initial values of the ids' rows, uniform in ±1/√rows, on the device of the ids.

    Each value depends only on (seed, table, id, column, rows), with the same bits on CPU and GPU. An id
    seeds a splitmix64 sequence, and each number of this sequence provides 32 bits for each of two columns.
    The highest 25 of the 32 bits, with the lowest of the 25 set to 1, form an integer that float32 represents
    exactly. Only the final multiplication rounds.

    Args:
        seed: run.seed.
        table: Name of the table.
        ids: Ids of any value, int64 [n]; row numbers if the table's ids are not managed.
        columns: Range of the table's columns to compute.
        rows: Number of rows of the whole table, which determines the bound.

    Returns:
        float32 [n, len(columns)].
    """
    digest = hashlib.blake2b(f"{seed}/{table}".encode(), digest_size=8).digest()
    starts_N = hash_bits(ids + int.from_bytes(digest, "big", signed=True))
    first, last = columns.start // 2, -(-columns.stop // 2)
    outputs_P = torch.arange(first, last, device=ids.device) * GOLDEN
    halves = hash_bits(starts_N.unsqueeze(1) + outputs_P).view(torch.int32)
    halves = halves[:, columns.start - 2 * first : columns.stop - 2 * first]
    scale = float(np.float32(1 / sqrt(rows) / 2**24))
    return (halves >> 7).bitwise_or_(1).to(torch.float32).mul_(scale)


def ids_to_keys(ids: torch.Tensor) -> torch.Tensor:
    """Return the key of each managed id, int64 [...]; no id has the key NO_KEY.

    Two of the 2⁶⁴ ids share the key NO_KEY + 1, so only one of the two can be recovered; all other keys are unique.
    """
    return hash_bits(ids).clamp_(min=NO_KEY + 1)


def find_key_owners(keys: torch.Tensor, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rank that owns each key, and the key's position in that rank's span, scaled to 0 … 2³² - 1.

    Both are int64 [...]. For ascending keys, (rank, position) never descends.
    """
    scaled = ((keys >> _OWNER_BITS) + 2 ** (_OWNER_BITS - 1)) * world
    return scaled >> _OWNER_BITS, scaled & (2**_OWNER_BITS - 1)


def assign_fallback_rows(keys: torch.Tensor, first: int | torch.Tensor, rows: int | torch.Tensor) -> torch.Tensor:
    """Return the fallback row of each key, int64 [n].

    Ids without a separate row share the last rows of their table, the fallback rows.

    Args:
        keys: Keys, int64 [n].
        first: First fallback row, for all keys or for each key (int64 [n]).
        rows: Number of fallback rows, for all keys or for each key (int64 [n]).
    """
    return first + keys.remainder(rows)


@dataclass(frozen=True)
class DistinctKeys:
    """Distinct keys of managed ids, sorted by the number of their table, then by key.

    Attributes:
        tables: Table number of each distinct key, int64 [n].
        keys: Distinct keys, int64 [n].
        counts: Number of occurrences of each distinct key, int64 [n].
        places: Index into `keys` for each of the N keys passed to `from_keys`, int64 [N].
    """

    tables: torch.Tensor
    keys: torch.Tensor
    counts: torch.Tensor
    places: torch.Tensor

    @classmethod
    def from_keys(
        cls, tables: torch.Tensor, keys: torch.Tensor, count: int, counts: torch.Tensor | None = None
    ) -> DistinctKeys:
        """Return the distinct (table, key) pairs among N keys.

        Args:
            tables: Table number of each key, int64 [N], ascending.
            keys: Keys, int64 [N].
            count: Number of tables.
            counts: Number of occurrences of each key, int64 [N], summed over equal keys; default: 1 each.
        """
        if count == 1:  # faster on a CPU
            distinct, places = torch.unique(keys, return_inverse=True)
            distinct_tables = torch.zeros_like(distinct)
        else:
            sorted_keys, order = sort_within_tables(tables, keys)
            is_first = torch.ones_like(keys, dtype=torch.bool)
            is_first[1:] = (sorted_keys[1:] != sorted_keys[:-1]).logical_or_(tables[1:] != tables[:-1])
            starts = is_first.nonzero().squeeze(1)
            places = torch.empty_like(order).scatter_(0, order, is_first.cumsum(0) - 1)
            distinct, distinct_tables = sorted_keys.index_select(0, starts), tables.index_select(0, starts)
        counts = torch.ones_like(keys) if counts is None else counts
        totals = torch.zeros_like(distinct).index_add_(0, places, counts)
        return cls(distinct_tables, distinct, totals, places)


def count_by_owner(tables: torch.Tensor, keys: torch.Tensor, count: int, world: int) -> torch.Tensor:
    """Return the number of keys of each table that each rank owns, int64 [count, world].

    Args:
        tables: Table number of each key, int64 [n], ascending.
        keys: Keys, int64 [n], ascending within each table.
        count: Number of tables.
        world: Number of ranks.
    """
    return count_tables(tables * world + find_key_owners(keys, world)[0], count * world).view(count, world)


def count_tables(tables: torch.Tensor, count: int) -> torch.Tensor:
    """Return the number of occurrences of each table number below `count`, int64 [count].

    Unlike torch.bincount, this function does not make the host wait for the GPU.

    Args:
        tables: Table numbers, int64 [n], ascending.
        count: Number of tables.
    """
    return torch.searchsorted(tables, torch.arange(count + 1, device=tables.device)).diff()


def sort_within_tables(tables: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys sorted within each table, and the index of each sorted key in `keys`, int64 [n] each.

    Args:
        tables: Table number of each key, int64 [n], ascending.
        keys: Keys, int64 [n].
    """
    if keys.device.type != "cpu":
        sorted_keys, order = keys.sort()
        by_table = tables[order].argsort(stable=True)
        return sorted_keys[by_table], order[by_table]
    if not len(keys) or tables[0] == tables[-1]:
        sorted_keys, order = keys.sort()
        return sorted_keys, order
    # On a CPU, which launches no kernels, sorting table by table is faster.
    starts = torch.searchsorted(tables, torch.arange(int(tables[-1]) + 2)).tolist()
    parts = [keys[start:end].sort() for start, end in pairwise(starts)]
    orders = [order.add_(start) for (_, order), start in zip(parts, starts, strict=False)]
    return torch.cat([sorted_keys for sorted_keys, _ in parts]), torch.cat(orders)


def split_by_mask(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the indices at which a mask, bool [n], is True, and the indices at which it is False.

    If the mask is on a GPU, the host synchronizes with the device once.
    """
    chosen = mask.nonzero().squeeze(1)
    return chosen, torch.nonzero_static(~mask, size=len(mask) - len(chosen)).squeeze(1)


def select_by_table(values_T: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
    """Return the value of each entry's table, [n]; if there is only one table, return `values_T`, which broadcasts.

    Args:
        values_T: Value of each table, [T].
        tables: Table number of each entry, int64 [n].
    """
    return values_T.index_select(0, tables) if len(values_T) > 1 else values_T
