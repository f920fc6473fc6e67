"""Table rows whose managed id has changed since the previous delta."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from raytrec.common.collectives import Peers
from raytrec.data.batch import NewRows
from raytrec.embeddings.hashing import unhash_bits
from raytrec.embeddings.managed.row_map import RowMap


@dataclass(frozen=True)
class IdRowChanges:
    """Rows of a table and their current ids.

    Attributes:
        rows: Distinct rows, int64 [n], in host memory.
        ids: Their ids, int64 [n]; undefined for rows without an id.
        has_id: True for rows with an id, bool [n].
    """

    rows: torch.Tensor
    ids: torch.Tensor
    has_id: torch.Tensor


class IdChanges:
    """Rows with changed managed ids. Rank r of W publishes the rows ≡ r mod W.

    Every rank learns all assignments of rows to ids (IdExchange.train). Rows that have lost their id are those
    that have become free (FreeRows.left), which every rank knows as well.

    Args:
        maps: This rank's part of the map of each table with managed ids.
    """

    def __init__(self, maps: Mapping[str, RowMap]):
        self._maps, self._peers = maps, Peers()
        self._pending: dict[str, list[IdRowChanges]] = {name: [] for name in maps}
        self._free = {name: part.free.left for name, part in maps.items()}  # in the previous delta

    def add_assigned(self, new: Mapping[str, NewRows]) -> None:
        """Count rows that have been assigned to ids as changed; the host does not wait for a GPU."""
        for name, (rows, ids, _) in new.items():
            if len(rows):
                self._pending[name].append(IdRowChanges(rows, ids, torch.ones_like(rows, dtype=torch.bool)))

    def mark(self, table: str, rows: torch.Tensor) -> None:
        """Count rows, distinct int64 [n] in host memory and the same on all ranks, as changed.

        This is a collective operation: every rank must call it.
        """
        peers, entries = self._peers, self._maps[table].state().rows
        entry_rows = entries.fields["row"].long()
        chosen = torch.isin(entry_rows, rows.to(entry_rows.device))
        pairs = [entry_rows[chosen], unhash_bits(entries.keys[chosen])]
        owned_rows, ids = (each.cpu() for each in peers.send(pairs, pairs[0] % peers.world))
        free_rows = rows[rows % peers.world == peers.rank]
        free_rows = free_rows[~torch.isin(free_rows, owned_rows)]
        has_id = torch.arange(len(owned_rows) + len(free_rows)) < len(owned_rows)
        all_rows = torch.cat([owned_rows, free_rows])
        self._pending[table].append(IdRowChanges(all_rows, torch.cat([ids, free_rows]), has_id))

    def mark_all(self) -> None:
        """Count the ids of all rows as changed.

        This is a collective operation: every rank must call it.
        """
        for name, part in self._maps.items():
            self.mark(name, torch.arange(part.capacity))

    def take(self) -> dict[str, IdRowChanges]:
        """Return this rank's rows with changed ids, and count none as changed; no map may be ahead of its table."""
        taken = {}
        for name, part in self._maps.items():
            taken[name] = self._collect(self._pending[name], part.free.left.cpu(), self._free[name].cpu())
            self._pending[name], self._free[name] = [], part.free.left
        return taken

    def put_back(self, taken: Mapping[str, IdRowChanges]) -> None:
        """Count rows of an earlier `take` as changed, because they were not published."""
        for name, changes in taken.items():
            self._pending[name].insert(0, changes)

    def _collect(self, pending: list[IdRowChanges], free: torch.Tensor, previous: torch.Tensor) -> IdRowChanges:
        """Return the current ids of rows.

        Args:
            pending: Changes, oldest first.
            free: Rows without an id.
            previous: Rows without an id in the previous delta.
        """
        freed = free[~torch.isin(free, previous)]
        no_ids = IdRowChanges(freed, freed, torch.zeros_like(freed, dtype=torch.bool))
        rows, ids, has_id = (
            torch.cat([getattr(each, column).cpu() for each in [*pending, no_ids]])
            for column in ("rows", "ids", "has_id")
        )
        mine = (rows % self._peers.world == self._peers.rank).nonzero().squeeze(1)
        order = mine[rows[mine].argsort(stable=True)]  # of equal rows, the newest is last
        is_newest = torch.ones_like(order, dtype=torch.bool)
        is_newest[:-1] = rows[order][1:] != rows[order][:-1]
        newest = order[is_newest]
        return IdRowChanges(rows[newest], ids[newest], has_id[newest] & ~torch.isin(rows[newest], free))
