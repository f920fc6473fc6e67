"""Hashes of integers, initial values that follow from them, and ids as keys of tables, on any device.

Arithmetic of int64 wraps around on CPU and GPU, and nothing is rounded, so both give the same bits.
data/ids.py does the same in NumPy.

The key of an id is its hash by splitmix64, which maps the integers of 64 bits one to one, so that keys are
spread evenly whatever the ids are, and an id is found again from its key (`unhash_bits`). Ranks own equal
spans of keys in their order: what is in the order of keys on each rank is so over all ranks, however many
there are.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt

import numpy as np
import torch

GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # constants of 64 bits as torch's signed integers have them
FIRST, SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
UNDO_FIRST, UNDO_SECOND = 0x96DE1B173F119089 - 2**64, 0x319642B2D24D8EC3  # their inverses
NO_KEY = -(2**63)  # in the place of a key where there is none
BLOCK_VALUES = 2**19  # made at once: few enough for a processor's cache, enough to keep a GPU busy
_BITS = 32  # of a key that decide on its owner


def hash_bits(values: torch.Tensor) -> torch.Tensor:
    """splitmix64 (Steele, Lea, Flood 2014): int64 [...] → well-mixed int64 [...], one to one."""
    bits = values + GOLDEN
    bits ^= _shifted(bits, 30)
    bits *= FIRST
    bits ^= _shifted(bits, 27)
    bits *= SECOND
    bits ^= _shifted(bits, 31)
    return bits


def unhash_bits(hashed: torch.Tensor) -> torch.Tensor:
    """What `hash_bits` has made these of: int64 [...] → int64 [...]."""
    bits = _unshifted(hashed, 31) * UNDO_SECOND
    bits = _unshifted(bits, 27) * UNDO_FIRST
    return _unshifted(bits, 30) - GOLDEN


def _unshifted(bits: torch.Tensor, count: int) -> torch.Tensor:
    """x of x ^ (x shifted by 22 to 31 bits)."""
    return bits ^ _shifted(bits, count) ^ _shifted(bits, 2 * count)


def _shifted(bits: torch.Tensor, count: int) -> torch.Tensor:
    """To the right, with zeros from the left: torch's own shift repeats the sign."""
    return (bits >> count).bitwise_and_(2 ** (64 - count) - 1)


def initial_values(seed: int, table: str, ids: torch.Tensor, columns: range, rows: int) -> torch.Tensor:
    """Return the initial values of the rows of ids, uniform in ±1/√rows, made on the device of the ids.

    Each is a function of (seed, table, id, column) alone, with the same bits on CPU and GPU: an id starts a
    sequence of splitmix64, and each number of it gives 32 bits to two columns. The first 25 of those, the
    last one set, are a whole number that float32 can hold; only its one multiplication is rounded.

    Args:
        ids: int64 [n], any values; row numbers, where a table's rows are its ids.
        columns: of the table, [start, stop).
        rows: of the whole table; the bound follows from them.

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


def keys_of(ids: torch.Tensor) -> torch.Tensor:
    """The keys of ids: int64 [...] → int64 [...], none of them NO_KEY.

    Of the 2⁶⁴ ids two have the same key, that of NO_KEY's neighbour; all others have different keys.
    """
    return hash_bits(ids).clamp_(min=NO_KEY + 1)


def shares(keys: torch.Tensor, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(the rank that owns each key, where in that rank's span of keys it is: 0 to 2³² - 1); both int64, and
    both together ascend with the keys."""
    scaled = ((keys >> _BITS) + 2 ** (_BITS - 1)) * world
    return scaled >> _BITS, scaled & (2**_BITS - 1)


def fallback_of(keys: torch.Tensor, first: int | torch.Tensor, rows: int | torch.Tensor) -> torch.Tensor:
    """The row that each key [n] has as long as it has no own row: int64 [n].

    Args:
        first: of the fallback's rows. rows: how many there are. Of all keys, or of each: int64 [n].
    """
    return first + keys.remainder(rows)


@dataclass(frozen=True)
class Distinct:
    """Keys without repetitions, ascending by their table's number, then by key.

    Attributes:
        tables, keys: int64 [n]. counts: int64 [n], occurrences of each.
        places: int64 [N], which of them each key was that this was made of.
    """

    tables: torch.Tensor
    keys: torch.Tensor
    counts: torch.Tensor
    places: torch.Tensor

    @classmethod
    def of(
        cls, tables: torch.Tensor, keys: torch.Tensor, count: int, counts: torch.Tensor | None = None
    ) -> Distinct:
        """Of N keys, the tables of which ascend.

        Args:
            count: of tables.
            counts: occurrences, which add up where keys are equal; default: of each one.
        """
        if count == 1:  # quicker on a CPU
            distinct, places = torch.unique(keys, return_inverse=True)
            of_distinct = torch.zeros_like(distinct)
        else:
            ordered, order = in_order(tables, keys)
            first = torch.ones_like(keys, dtype=torch.bool)
            first[1:] = (ordered[1:] != ordered[:-1]).logical_or_(tables[1:] != tables[:-1])
            starts = first.nonzero().squeeze(1)
            places = torch.empty_like(order).scatter_(0, order, first.cumsum(0) - 1)
            distinct, of_distinct = ordered.index_select(0, starts), tables.index_select(0, starts)
        counts = torch.ones_like(keys) if counts is None else counts
        totals = torch.zeros_like(distinct).index_add_(0, places, counts)
        return cls(of_distinct, distinct, totals, places)


def count_by_owner(tables: torch.Tensor, keys: torch.Tensor, count: int, world: int) -> torch.Tensor:
    """How many of these keys each rank owns of each table: int64 [count, world].

    Args:
        tables: int64 [n], of each key, ascending; keys ascend within a table. count: of tables.
    """
    return count_tables(tables * world + shares(keys, world)[0], count * world).view(count, world)


def count_tables(tables: torch.Tensor, count: int) -> torch.Tensor:
    """How many there are of each number below `count`: int64 [count]; not by bincount, for which the host
    would wait.

    Args:
        tables: int64 [n], ascending.
    """
    return torch.searchsorted(tables, torch.arange(count + 1, device=tables.device)).diff()


def in_order(tables: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(keys in their order within each table, the places of them): int64 [n] each.

    Args:
        tables: int64 [n], ascending. keys: int64 [n].
    """
    if keys.device.type != "cpu":
        ordered, order = keys.sort()
        by_table = tables[order].argsort(stable=True)
        return ordered[by_table], order[by_table]
    if not len(keys) or tables[0] == tables[-1]:
        ordered, order = keys.sort()
        return ordered, order
    # Tables one by one, which is quicker where nothing has to be launched.
    starts = torch.searchsorted(tables, torch.arange(int(tables[-1]) + 2)).tolist()
    parts = [keys[start:end].sort() for start, end in pairwise(starts)]
    orders = [order.add_(start) for (_, order), start in zip(parts, starts, strict=False)]
    return torch.cat([ordered for ordered, _ in parts]), torch.cat(orders)


def of_table(values_T: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
    """The value of each table in its place: [n], or [1], which is as good, where there is one table.

    Args:
        values_T: of each table. tables: int64 [n].
    """
    return values_T.index_select(0, tables) if len(values_T) > 1 else values_T
