"""Access one rank's part of a table's map from managed ids to rows, and audit the map over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from raytrec.common.formatting import format_count
from raytrec.embeddings.hashing import find_key_owners, hash_bits
from raytrec.embeddings.managed.key_map import FreeRows, MapState
from raytrec.embeddings.managed.row_maps import RowMaps

AGE_SAMPLE_SLOTS = 2**16  # slots sampled to estimate the age of ids
HASH_BLOCK_ROWS = 2**20  # rows hashed at a time
HASH_MASK = 2**64 - 1


class RowMap:
    """View of one table's map within a RowMaps; its length is the number of this rank's ids that have a row.

    Args:
        maps: This rank's part of the maps of all tables.
        table: Number of the table.

    Attributes:
        capacity: Number of rows that can be assigned to ids, without fallback rows.
        device: Device of the maps.
    """

    def __init__(self, maps: RowMaps, table: int):
        self._maps, self._table = maps, table
        self.capacity, self.device = maps.capacities[table], maps.device

    def __len__(self) -> int:
        return self._maps.rows.counts[self._table]

    @property
    def counted(self) -> Mapping[str, int | torch.Tensor]:
        """Counts over the ids that this rank owns, since the start.

        "admitted" and "evicted" count ids. "lookups" counts occurrences of ids in training batches, and "fallback"
        counts occurrences that were replaced with a fallback row. The latter two are scalars on the device.
        """
        maps, table = self._maps, self._table
        return {
            "admitted": maps.admitted[table],
            "evicted": maps.evicted[table],
            "lookups": maps.lookups_T[table],
            "fallback": maps.fallback_T[table],
        }

    @property
    def free(self) -> FreeRows:
        """Rows without an id; the same on all ranks."""
        return self._maps.free[self._table]

    def state(self) -> MapState:
        """Return this rank's part of the table's map."""
        maps, table = self._maps, self._table
        return MapState(maps.rows.entries(table), maps.waiting.entries(table), maps.free[table])

    def load(self, state: MapState) -> None:
        """Replace this rank's part of the map with the entries of `state` that this rank owns, and the free rows.

        Args:
            state: State from any ranks. Keys that other ranks own are ignored. Keys that this rank owns must be
                distinct.
        """
        maps, table = self._maps, self._table
        for key_map, entries in (maps.rows, state.rows), (maps.waiting, state.waiting):
            owners, _ = find_key_owners(entries.keys, maps.peers.world)
            local_entries = entries[owners == maps.peers.rank].in_order()
            earlier = key_map.find_occupied_slots(table)
            key_map.remove(torch.full_like(earlier, table), maps.spread_over_tables([table], [len(earlier)]), earlier)
            sizes = maps.spread_over_tables([table], [len(local_entries)])
            key_map.insert(torch.full_like(local_entries.keys, table), sizes, local_entries)
        maps.free[table] = state.free

    def sample_ages(self, step: int) -> torch.Tensor:
        """Return the number of steps up to `step` since the last sighting of each id in a sample, int64 [n].

        The sample contains this rank's ids in about AGE_SAMPLE_SLOTS slots of the map of ids with a row.
        """
        rows = self._maps.rows
        last = rows.read_slots(rows.sample(self._table, AGE_SAMPLE_SLOTS)).fields["last"]
        return (step - last.long()).clamp(min=0)

    def audit(self) -> MapAudit:
        """Return this rank's counts, with which `is_one_to_one` checks the map from ids to rows over all ranks."""
        maps, table, peers = self._maps, self._table, self._maps.peers
        free, entries = maps.free[table], maps.rows.entries(table)
        rows, (owners, _) = entries.fields["row"].long(), find_key_owners(entries.keys, peers.world)
        total = sum_hashes(rows)
        part = peers.rank, peers.world
        handed_out = partial(maps.compute_nth_row, table)
        total += sum_share_hashes(free.handed, self.capacity, *part, handed_out, self.device)
        total -= sum_share_hashes(0, self.capacity, *part, lambda numbers: numbers, self.device)
        errors = {
            f"whose row is outside 0 to {self.capacity - 1:,}": int(((rows < 0) | (rows >= self.capacity)).sum()),
            "that another rank owns": int((owners != peers.rank).sum()),
            "in more than one slot": len(entries) - len(entries.keys.unique()),
        }
        return MapAudit(
            rank=peers.rank,
            ids=len(entries),
            errors=[f"rank {peers.rank} has {format_count(n, 'id')} {what}" for what, n in errors.items() if n],
            sum=total & HASH_MASK,
            free=(len(free.left), sum_hashes(free.left), self.capacity - free.handed),
        )


@dataclass(frozen=True)
class MapAudit:
    """Counts and hashes of one rank's part of a map.

    Attributes:
        rank: Rank whose part is audited.
        ids: Number of this rank's ids that have a row.
        errors: Descriptions of the errors that can be found in this rank's part alone.
        sum: Σ of the hashes of the ids' rows and of one n-th of the rows that have never been assigned, minus Σ of
            the hashes of one n-th of all rows; mod 2⁶⁴. With n ranks, each rank takes another n-th.
        free: Number of free rows whose ids have been removed, Σ of the hashes of these rows mod 2⁶⁴, and number of
            rows never assigned; the same on all ranks.
    """

    rank: int
    ids: int
    errors: list[str]
    sum: int
    free: tuple[int, int, int]

    @property
    def numbers(self) -> list[int]:
        """64-bit integers to be summed over ranks: number of local errors, number of ids, sum of hashes."""
        signed = self.sum - 2**64 if self.sum >= 2**63 else self.sum
        return [len(self.errors), self.ids, signed]


def is_one_to_one(any_audit: MapAudit, total: list[int], rows: int) -> bool:
    """Return True if each row of a table's map either has exactly one id or is free.

    Rows that occur twice change the sum of hashes, except with a probability of 2⁻⁶⁴.

    Args:
        any_audit: Audit of any rank; `free` must be the same on all ranks.
        total: Sum of `MapAudit.numbers` over all ranks.
        rows: Number of rows that can be assigned to ids (RowMap.capacity).
    """
    (wrong, ids, hashes), (left, left_hash_sum, unused) = total, any_audit.free
    return not wrong and ids + left + unused == rows and not (hashes + left_hash_sum) & HASH_MASK


def describe_audit_errors(audits: list[MapAudit], rows: int) -> list[str]:
    """Return descriptions of the errors in a map, or an empty list if there are none.

    Args:
        audits: Audits of all ranks.
        rows: Number of rows that can be assigned to ids (RowMap.capacity).
    """
    messages, first = [], audits[0]
    for audit in audits:
        messages += audit.errors
        if audit.free != first.free:
            messages.append(f"the free rows of rank {audit.rank} differ from those of rank {first.rank}")
    if messages:
        return messages
    left, left_hash_sum, unused = first.free
    ids = sum(audit.ids for audit in audits)
    if (counted := ids + left + unused) != rows:
        numbers = f"the numbers of ids ({ids:,}) and free rows ({left + unused:,}) sum to {counted:,}"
        return [f"{numbers}, but the table has {rows:,} rows for ids"]
    if (sum(audit.sum for audit in audits) + left_hash_sum) & HASH_MASK:
        return ["at least one row has several ids, or has an id although the row is free"]
    return []


def sum_hashes(rows: torch.Tensor) -> int:
    """Return the sum, modulo 2⁶⁴, of the hashes of row numbers, integers [n]."""
    return int(hash_bits(rows.long()).sum()) & HASH_MASK if len(rows) else 0


def sum_share_hashes(first: int, end: int, rank: int, world: int, rows_of: Callable, device: torch.device) -> int:
    """Return Σ mod 2⁶⁴ of the hashes of `rows_of(numbers)`, for part `rank` of [first, end) cut into `world` parts."""
    count, total = end - first, 0
    begin, stop = first + count * rank // world, first + count * (rank + 1) // world
    for start in range(begin, stop, HASH_BLOCK_ROWS):
        numbers = torch.arange(start, min(start + HASH_BLOCK_ROWS, stop), device=device)
        total += sum_hashes(rows_of(numbers))
    return total & HASH_MASK
