"""Whether ids and rows are one to one over ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from raytrec.embeddings.hashing import hash_bits

CHUNK = 2**20  # rows that are hashed at a time
MASK = 2**64 - 1


@dataclass(frozen=True)
class Audit:
    """Counts and hashes of one rank's part of a map.

    Attributes:
        rank: whose part it is.
        ids: of this rank, that have a row.
        outside: those of them whose row ids cannot have.
        strangers: those of them that another rank owns.
        repeated: how many of them are there more than once.
        sum: Σ of the hashes of their rows, and of this rank's share of the rows that were never handed out,
            less those of its share of all rows; mod 2⁶⁴.
        left: rows of ids that have left, which are the same on all ranks.
        left_sum: Σ of their hashes, mod 2⁶⁴.
        unused: rows that were never handed out, of all ranks.
    """

    rank: int
    ids: int
    outside: int
    strangers: int
    repeated: int
    sum: int
    left: int
    left_sum: int
    unused: int

    @property
    def numbers(self) -> list[int]:
        """Integers of 64 bits that add up over ranks: what is wrong by itself, ids, sum."""
        signed = self.sum - 2**64 if self.sum >= 2**63 else self.sum
        return [self.outside + self.strangers + self.repeated, self.ids, signed]

    @property
    def free(self) -> tuple[int, int, int]:
        """The rows without an id, which all ranks know."""
        return self.left, self.left_sum, self.unused


def is_sound(mine: Audit, total: list[int], rows: int) -> bool:
    """Whether each row of a map has one id or is free, once.

    Rows that are there twice change the sum of hashes, but for a probability of 2⁻⁶⁴.

    Args:
        mine: of any rank, if `free` is the same on all.
        total: the sums of all ranks' `numbers`.
        rows: that ids can have.
    """
    wrong, ids, hashes = total
    return not wrong and ids + mine.left + mine.unused == rows and not (hashes + mine.left_sum) & MASK


def problems(audits: list[Audit], rows: int) -> list[str]:
    """What is wrong with a map, in words; nothing where it is sound.

    Args:
        audits: of all ranks.
        rows: that ids can have.
    """
    found, first = [], audits[0]
    for audit in audits:
        rank = audit.rank
        if audit.outside:
            found.append(f"rank {rank} has {audit.outside:,} ids with rows that they cannot have")
        if audit.strangers:
            found.append(f"rank {rank} has {audit.strangers:,} ids of other ranks")
        if audit.repeated:
            found.append(f"rank {rank} has {audit.repeated:,} ids more than once")
        if audit.free != first.free:
            found.append(f"rank {rank} knows of other free rows than rank {first.rank}")
    if found:
        return found
    ids = sum(audit.ids for audit in audits)
    if (counted := ids + first.left + first.unused) != rows:
        return [f"{ids:,} ids and {first.left + first.unused:,} free rows are {counted:,}, and not {rows:,}"]
    if (sum(audit.sum for audit in audits) + first.left_sum) & MASK:
        return ["there are rows that have two ids, or that have one and are free"]
    return []


def hash_sum(rows: torch.Tensor) -> int:
    """Σ of the hashes of rows [n], mod 2⁶⁴."""
    return int(hash_bits(rows.long()).sum()) & MASK if len(rows) else 0


def share_sum(first: int, end: int, rank: int, world: int, rows_of: Callable, device: torch.device) -> int:
    """Σ of the hashes of what `rows_of` makes of a rank's share of the numbers [first, end)."""
    count, total = end - first, 0
    begin, stop = first + count * rank // world, first + count * (rank + 1) // world
    for start in range(begin, stop, CHUNK):
        numbers = torch.arange(start, min(start + CHUNK, stop), device=device)
        total += hash_sum(rows_of(numbers))
    return total & MASK
