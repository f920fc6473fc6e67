"""One rank's part of a table's map from ids to rows, and whether ids and rows are one to one over ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from raytrec.embeddings.hashing import hash_bits, shares
from raytrec.embeddings.managed.key_map import MapState
from raytrec.embeddings.managed.row_maps import RowMaps

SAMPLE = 2**16  # slots that are looked at for the age of ids
CHUNK = 2**20  # rows that are hashed at a time
MASK = 2**64 - 1


class RowMap:
    """What `maps` have of one table.

    Args:
        table: its number.

    Attributes:
        capacity: rows that ids can have.
    """

    def __init__(self, maps: RowMaps, table: int):
        self._maps, self._table = maps, table
        self.capacity, self.device = maps.capacities[table], maps.device

    def __len__(self) -> int:
        return self._maps.rows.counts[self._table]

    @property
    def waiting(self) -> int:
        """Ids of this rank that have been seen, but not often enough."""
        return self._maps.waiting.counts[self._table]

    @property
    def counted(self) -> Mapping[str, int | torch.Tensor]:
        """Since it began, ids of this rank that were admitted and evicted; ids of batches that were looked
        up, those of the fallback among them (scalars on the device)."""
        maps, table = self._maps, self._table
        return {
            "admitted": maps.admitted[table],
            "evicted": maps.evicted[table],
            "lookups": maps.lookups_T[table],
            "fallback": maps.fallback_T[table],
        }

    def state(self) -> MapState:
        """This rank's part."""
        maps, table = self._maps, self._table
        return MapState(maps.rows.entries(table), maps.waiting.entries(table), maps.free[table])

    def load(self, state: MapState) -> None:
        """Takes its part of a state; the map has nothing yet.

        Args:
            state: of any ranks, whose keys this rank need not own. Keys that it owns come once.
        """
        maps, table = self._maps, self._table
        for map, entries in (maps.rows, state.rows), (maps.waiting, state.waiting):
            owners, _ = shares(entries.keys, maps.peers.world)
            own = entries[owners == maps.peers.rank].in_order()
            sizes = [len(own) * (number == table) for number in range(len(maps.free))]
            map.insert(torch.full_like(own.keys, table), sizes, own)
        maps.free[table] = state.free

    def ages(self, step: int) -> torch.Tensor:
        """Steps since the last sighting of some of this rank's ids, one of many: int64 [n]."""
        rows = self._maps.rows
        last = rows.at(rows.sample(self._table, SAMPLE)).fields["last"]
        return (step - last.long()).clamp(min=0)

    def audit(self) -> Audit:
        """What is needed to know whether ids and rows are one to one over all ranks."""
        maps, table, peers = self._maps, self._table, self._maps.peers
        free, entries = maps.free[table], maps.rows.entries(table)
        rows, (owners, _) = entries.fields["row"].long(), shares(entries.keys, peers.world)
        total = hash_sum(rows)
        part = peers.rank, peers.world
        handed_out = partial(maps.nth_row, table)
        total += share_sum(free.handed, self.capacity, *part, handed_out, self.device)
        total -= share_sum(0, self.capacity, *part, lambda numbers: numbers, self.device)
        return Audit(
            rank=peers.rank,
            ids=len(entries),
            outside=int(((rows < 0) | (rows >= self.capacity)).sum()),
            strangers=int((owners != peers.rank).sum()),
            repeated=len(entries) - len(entries.keys.unique()),
            sum=total & MASK,
            left=len(free.left),
            left_sum=hash_sum(free.left),
            unused=self.capacity - free.handed,
        )


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
