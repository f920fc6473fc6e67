"""One rank's part of a table's map from ids to rows."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from raytrec.embeddings.hashing import shares
from raytrec.embeddings.managed.audit import MASK, Audit, hash_sum, share_sum
from raytrec.embeddings.managed.key_map import MapState
from raytrec.embeddings.managed.row_maps import RowMaps

SAMPLE = 2**16  # slots that are looked at for the age of ids


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
