"""One rank's part of the maps from managed ids to table rows, for all tables together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from raytrec.common.collectives import Peers, to_device_tensor
from raytrec.config.schema_parts import ManagedIds
from raytrec.embeddings.hashing import (
    DistinctKeys,
    assign_fallback_rows,
    count_tables,
    select_by_table,
    sort_within_tables,
    split_by_mask,
)
from raytrec.embeddings.managed.key_map import FreeRows, KeyEntries, KeyMap
from raytrec.embeddings.managed.policy import (
    MAX_SIGHTINGS,
    choose_row_stride,
    compute_admission_scores,
    compute_eviction_scores,
    count_rows_to_free,
    find_expiry_step,
    find_lowest_keys,
)

TRIM_DIVISOR = 8  # if too many ids wait for a row, the excess and 1/8 of the capacity are removed


class RowMaps:
    """This rank's part of the maps from managed ids to table rows. Tables are numbered from 0.

    Each id is owned by one rank, whose part contains the id if it has a row or waits for one. The last rows of a
    table are fallback rows, which ids without a row share.

    A step's result depends only on the previous maps and on the ids of the global batch with their counts.
    Ids are processed in key order, regardless of the rank that has read them. The numbers of collectives and
    of waits for a GPU are independent of the number of tables.

    1. Ids of the batch that have a row keep the row. Of the other ids, the policy selects candidates for a row.
    2. Expired ids lose their rows. If there are still too few free rows, ids that are not in the batch also lose
       their rows, those with the lowest scores first (unless the table's eviction is "none").
    3. The candidates get rows. If there are too few rows, candidates with more sightings take precedence. Rows that
       have never been assigned are used first, in an order that spreads over the table, then rows of removed ids.

    Args:
        rows: Number of rows of each table, including fallback rows.
        policies: Admission and eviction policy of each table.
        seed: Seed of the draws that decide which of several equally frequent ids get rows.
        peers: Ranks that share the maps.
        device: Device of the maps.

    Attributes:
        capacities: Number of rows of each table that can be assigned to ids, without fallback rows.
        rows: Map of the ids owned by this rank that have a row.
        waiting: Map of the ids owned by this rank that have not yet been seen often enough for a row.
        free: Rows without an id, for each table; the same on all ranks.
        admitted, evicted: Number of ids owned by this rank that got or lost a row since the start, for each table.
        lookups_T, fallback_T: Occurrences in training batches of the ids that this rank owns, and of those of them that
            were replaced with a fallback row, for each table; int64 [T] on the device.
    """

    def __init__(
        self, rows: Sequence[int], policies: Sequence[ManagedIds], seed: int, peers: Peers, device: torch.device
    ):
        self.policies, self.seed, self.peers, self.device = policies, seed, peers, device
        self.capacities = [count - policy.fallback_rows for count, policy in zip(rows, policies, strict=True)]
        self._strides = [choose_row_stride(capacity) for capacity in self.capacities]
        shares = [-(-capacity // peers.world) for capacity in self.capacities]
        row = torch.int32 if max(rows) <= 2**31 else torch.int64
        fields = {"row": row, "sightings": torch.int64, "last": torch.int32}
        self.rows = KeyMap(shares, fields, peers.world, device)
        del fields["row"]
        room = [share * (policy.admit_after > 1) for share, policy in zip(shares, policies, strict=True)]
        self.waiting = KeyMap(room, fields, peers.world, device)
        self._any_waits = any(room)
        self.free = [FreeRows(0, torch.empty(0, dtype=torch.int64, device=device)) for _ in rows]
        self.admitted, self.evicted = ([0] * len(rows) for _ in range(2))
        self.lookups_T, self.fallback_T = torch.zeros(2, len(rows), dtype=torch.int64, device=device)
        numbers = [
            (capacity, policy.fallback_rows, policy.admit_after, 0 if policy.eviction == "lru" else MAX_SIGHTINGS)
            for capacity, policy in zip(self.capacities, policies, strict=True)
        ]
        columns = to_device_tensor(numbers, device).T.contiguous()
        self._capacity_T, self._fallback_T, self._admit_after_T, self._counted_T = columns

    def compute_nth_row(self, table: int, numbers: torch.Tensor) -> torch.Tensor:
        """Return the row of a table that is assigned n-th (from 0) for the first time, for each n in `numbers`.

        `numbers` and the result are int64 [m].
        """
        return numbers * self._strides[table] % self.capacities[table]

    def look_up(self, ids: DistinctKeys) -> torch.Tensor:
        """Return, without changing the maps, the row of each id that this rank owns, int64 [n]; -1: no row."""
        slots = self.rows.find(ids.tables, ids.keys)
        rows = self.rows.fields["row"].index_select(0, slots.clamp(min=0)).long()
        return torch.where(slots >= 0, rows, -1)

    def find_fallback_rows(self, tables: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Return the fallback row of each key, int64 [n], given the table number of each key, int64 [n]."""
        first, rows = (select_by_table(each_T, tables) for each_T in (self._capacity_T, self._fallback_T))
        return assign_fallback_rows(keys, first, rows)

    def train(self, step: int, ids: DistinctKeys) -> tuple[torch.Tensor, torch.Tensor, list[list[int]]]:
        """Count a global batch's ids, expire and evict ids, and assign rows to new ids. All ranks must call it.

        Args:
            step: Step of the run, from 0.
            ids: Ids of the global batch that this rank owns.

        Returns:
            The row of each id, or -1, int64 [n]; the indices of ids that got a row in this step, int64 [m]; and the
            number of such ids of all ranks, [ranks][tables].
        """
        rows, candidates, sightings = self._count_ids(step, ids)
        candidates_T = count_tables(ids.tables[candidates], len(self.policies))
        sizes = torch.stack([candidates_T, to_device_tensor(self.waiting.counts, self.device)])
        candidates_WT, waiting_WT = zip(*self.peers.stack(sizes).tolist(), strict=True)
        self._expire(step)
        self._trim_waiting(_sum_over_ranks(waiting_WT), step)
        self._evict(_sum_over_ranks(candidates_WT), step)
        chosen, admitted_WT = self._choose_admitted(step, ids, candidates, sightings, list(candidates_WT))
        places = candidates[chosen]
        if any(_sum_over_ranks(admitted_WT)):
            rows = rows.index_copy(0, places, self._assign_rows(step, ids, places, sightings[chosen], admitted_WT))
        # The counts stay on the device, because the host would wait for them.
        self.lookups_T.index_add_(0, ids.tables, ids.counts)
        self.fallback_T.index_add_(0, ids.tables, ids.counts * (rows < 0))
        return rows, places, admitted_WT

    def _count_ids(self, step: int, ids: DistinctKeys) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Count sightings, and return each id's row (-1: none), and the indices and sightings of row candidates."""
        slots = self.rows.find(ids.tables, ids.keys)
        mapped, candidates = split_by_mask(slots >= 0)
        counts = ids.counts.index_select(0, mapped)
        previous = _record_sightings(self.rows, slots.index_select(0, mapped), counts, step)
        rows = torch.full_like(ids.keys, -1).index_copy_(0, mapped, previous.fields["row"].long())
        sightings = ids.counts[candidates]
        if self._any_waits:
            enough_at = self._admit_after_T[ids.tables[candidates]]
            waits = (enough_at > 1).nonzero().squeeze(1)
            sightings[waits] = self._count_waiting(ids, candidates[waits], step)
            enough = (sightings >= enough_at).nonzero().squeeze(1)
            candidates, sightings = candidates[enough], sightings[enough]
        return rows, candidates, sightings

    def _count_waiting(self, ids: DistinctKeys, which: torch.Tensor, step: int) -> torch.Tensor:
        """Count the ids at indices `which` as waiting for a row, and return their sightings, including this step."""
        tables, keys, counts = ids.tables[which], ids.keys[which], ids.counts[which]
        slots = self.waiting.find(tables, keys)
        present, absent = split_by_mask(slots >= 0)
        previous = _record_sightings(self.waiting, slots[present], counts[present], step)
        new = KeyEntries(keys, {"sightings": counts, "last": torch.full_like(keys, step)})[absent]
        tables = tables[absent]
        self.waiting.insert(tables, count_tables(tables, len(self.policies)).tolist(), new)
        return counts.index_add(0, present, previous.fields["sightings"])

    def _expire(self, step: int) -> None:
        expiry_steps = (find_expiry_step(policy.ttl_steps, step) for policy in self.policies)
        due = {table: oldest for table, oldest in enumerate(expiry_steps) if oldest is not None}
        if due:
            self._release_rows(list(due), *self.rows.find_below(list(due), "last", list(due.values())))

    def _trim_waiting(self, waiting: Sequence[int], step: int) -> None:
        """Remove the least recently seen waiting ids of each table with more waiting ids than rows for ids."""
        counts = {
            table: count - capacity + capacity // TRIM_DIVISOR
            for table, (count, capacity) in enumerate(zip(waiting, self.capacities, strict=True))
            if count > capacity
        }
        if counts:
            nothing_T = torch.zeros_like(self._counted_T)
            which, slots = self._select_lowest(self.waiting, counts, nothing_T, step)
            sizes = count_tables(which, len(counts)).tolist()
            self.waiting.remove(self._to_table_numbers(counts)[which], self.spread_over_tables(counts, sizes), slots)

    def _evict(self, requested: Sequence[int], step: int) -> None:
        """Free rows of tables that evict ids and have too few free rows, including some for later steps."""
        counts = {
            table: count_rows_to_free(self.policies[table].eviction, missing, self.capacities[table])
            for table, missing in self._count_missing_rows(requested).items()
            if self.policies[table].eviction != "none"
        }
        if counts:
            self._release_rows(list(counts), *self._select_lowest(self.rows, counts, self._counted_T, step))

    def _count_missing_rows(self, requested: Sequence[int]) -> dict[int, int]:
        """Return the number of missing rows for each table with fewer free rows than requested."""
        free_counts = (
            capacity - free.handed + len(free.left) for capacity, free in zip(self.capacities, self.free, strict=True)
        )
        missing = (count - available for count, available in zip(requested, free_counts, strict=True))
        return {table: count for table, count in enumerate(missing) if count > 0}

    def _select_lowest(
        self, key_map: KeyMap, counts: Mapping[int, int], counted_T: torch.Tensor, step: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the index into the tables of `counts` and the slot of each id with one of the lowest scores.

        This is a collective operation: every rank must call it. Ids seen at the current step are excluded.

        Args:
            key_map: Map that contains the ids.
            counts: Table number → number of ids to select on all ranks together.
            counted_T: Argument `counted` of `policy.compute_eviction_scores`, for each table.
            step: Current step.
        """
        which, slots = key_map.find_below(list(counts), "last", [step] * len(counts))
        entries = key_map.read_slots(slots)
        counted = select_by_table(counted_T[self._to_table_numbers(counts)], which)
        id_scores = compute_eviction_scores(counted, entries.fields["sightings"], entries.fields["last"])
        chosen = find_lowest_keys(which, id_scores, entries.keys, list(counts.values()), self.peers)
        return which[chosen], slots[chosen]

    def _release_rows(self, tables: Sequence[int], which: torch.Tensor, slots: torch.Tensor) -> None:
        """Remove ids from the map, and append their rows in key order to the free rows of their tables.

        This is a collective operation: every rank must call it. The slots belong to ids of `tables`; `which` is each
        slot's index into `tables`.
        """
        entries = self.rows.read_slots(slots)
        rows = entries.fields["row"][sort_within_tables(which, entries.keys)[1]].long()
        sizes_WP = self.peers.stack(count_tables(which, len(tables))).tolist()
        mine = sizes_WP[self.peers.rank]
        self.rows.remove(self._to_table_numbers(tables)[which], self.spread_over_tables(tables, mine), slots)
        for table, freed, count in zip(tables, self.peers.join(rows, sizes_WP), mine, strict=True):
            free = self.free[table]
            self.free[table] = replace(free, left=torch.cat([free.left, freed]))
            self.evicted[table] += count

    def _choose_admitted(
        self,
        step: int,
        ids: DistinctKeys,
        candidates: torch.Tensor,
        sightings: torch.Tensor,
        candidates_WT: list[list[int]],
    ) -> tuple[torch.Tensor, list[list[int]]]:
        """Return the indices of the admitted candidates, and their number for each rank and table, [W][T]."""
        shortages = self._count_missing_rows(_sum_over_ranks(candidates_WT))
        if not shortages:
            return torch.arange(len(candidates), device=self.device), candidates_WT
        tables, keys = ids.tables[candidates], ids.keys[candidates]
        number_T = torch.full_like(self._capacity_T, -1)
        number_T[self._to_table_numbers(shortages)] = torch.arange(len(shortages), device=self.device)
        numbers = number_T[tables]
        which = (numbers >= 0).nonzero().squeeze(1)
        numbers, contested = numbers[which], keys[which]
        key_scores = compute_admission_scores(contested, sightings[which], step, self.seed)
        rejected = find_lowest_keys(numbers, key_scores, contested, list(shortages.values()), self.peers)
        is_admitted = torch.ones_like(tables, dtype=torch.bool).index_fill_(0, which[rejected], False)
        chosen = is_admitted.nonzero().squeeze(1)
        return chosen, self.peers.stack(count_tables(tables[chosen], len(self.policies))).tolist()

    def _assign_rows(
        self, step: int, ids: DistinctKeys, places: torch.Tensor, sightings: torch.Tensor, admitted_WT: list[list[int]]
    ) -> torch.Tensor:
        """Assign the next free rows to the ids at the indices `places`, and return the rows, int64 [n]."""
        tables, keys, sizes = ids.tables[places], ids.keys[places], admitted_WT[self.peers.rank]
        rows, last = self._take_free_rows(admitted_WT), torch.full_like(keys, step)
        self.rows.insert(tables, sizes, KeyEntries(keys, {"row": rows, "sightings": sightings, "last": last}))
        if self._any_waits:
            slots = self.waiting.find(tables, keys)
            waiting = (slots >= 0).nonzero().squeeze(1)
            counts = [n * (policy.admit_after > 1) for n, policy in zip(sizes, self.policies, strict=True)]
            self.waiting.remove(tables[waiting], counts, slots[waiting])
        self.admitted = [count + size for count, size in zip(self.admitted, sizes, strict=True)]
        return rows

    def _take_free_rows(self, admitted_WT: list[list[int]]) -> torch.Tensor:
        """Remove the next free rows of each table, and return this rank's part of them, table by table, int64 [n]."""
        rank, parts = self.peers.rank, []
        for table, counts in enumerate(zip(*admitted_WT, strict=True)):
            free, count = self.free[table], sum(counts)
            fresh = min(count, self.capacities[table] - free.handed)
            first, end = sum(counts[:rank]), sum(counts[: rank + 1])
            numbers = range(free.handed + min(first, fresh), free.handed + min(end, fresh))
            if numbers:
                parts.append(self.compute_nth_row(table, torch.arange(numbers.start, numbers.stop, device=self.device)))
            parts.append(free.left[max(first - fresh, 0) : max(end - fresh, 0)])
            self.free[table] = FreeRows(free.handed + fresh, free.left[count - fresh :])
        return torch.cat(parts)

    def _to_table_numbers(self, tables: Sequence[int] | Mapping[int, int]) -> torch.Tensor:
        return to_device_tensor(list(tables), self.device)

    def spread_over_tables(self, tables: Sequence[int] | Mapping[int, int], values: Sequence[int]) -> list[int]:
        """Return a list with `values` at the indices `tables`, and 0 for all other tables."""
        by_table = dict(zip(tables, values, strict=True))
        return [by_table.get(table, 0) for table in range(len(self.policies))]


def _record_sightings(map: KeyMap, slots: torch.Tensor, counts: torch.Tensor, step: int) -> KeyEntries:
    """Add `counts` to the sightings of the keys in distinct slots, and return the previous entries."""
    previous = map.read_slots(slots)
    map.fields["sightings"].index_copy_(0, slots, previous.fields["sightings"] + counts)
    map.fields["last"].index_fill_(0, slots, step)
    return previous


def _sum_over_ranks(sizes_WT: Sequence[Sequence[int]]) -> list[int]:
    return [sum(of_ranks) for of_ranks in zip(*sizes_WT, strict=True)]
