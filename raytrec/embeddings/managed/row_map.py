"""One rank's part of a table's map from ids to rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd, sqrt

import torch

from raytrec.common.collectives import Peers
from raytrec.config.managed import ManagedIds
from raytrec.embeddings.hashing import fallback_of, shares
from raytrec.embeddings.managed.audit import MASK, Audit, hash_sum, share_sum
from raytrec.embeddings.managed.key_map import Entries, Free, KeyMap, MapState
from raytrec.embeddings.managed.policy import admission_scores, horizon, lowest, rows_to_free, scores

SAMPLE = 2**16  # slots that are looked at for the age of ids
KEPT_SHARE = 8  # of the ids that wait for a row, this part leaves when there are too many


@dataclass(frozen=True)
class Sighting:
    """The ids that a step brings to this rank.

    Attributes:
        step: its number.
        keys: int64 [n], ascending, each once. counts: int64 [n], how often each is in the global batch.
        rows: int64 [n], the row of each; -1 where it has none.
        wanted: int64 [m], places of those that are to be admitted. sightings: int64 [m], theirs so far.
    """

    step: int
    keys: torch.Tensor
    counts: torch.Tensor
    rows: torch.Tensor
    wanted: torch.Tensor
    sightings: torch.Tensor


class RowMap:
    """This rank's part of the map from the ids of a table to its rows.

    The map after a step is a function of the map before it and of the ids of the global batch, each with its
    number of occurrences: ids are dealt with in the order of their keys, whichever rank has brought them.

    1. `sight`: ids with a row keep it. Of the others, those are to be admitted that the policy takes.
    2. `admit`: expired ids leave. If rows are missing, the ids with the lowest scores leave, those of this
       batch excepted. Then ids get rows; where there are too few, those that were seen most often. At first
       each row is handed out once, in an order that spreads over the table, later those of ids that have
       left.

    Args:
        rows: of the table, those of the fallback included.
        policy: which ids get a row, and which lose theirs.
        seed: of draws.

    Attributes:
        capacity: rows that ids can have.
        counted: since it began, ids of this rank that were admitted and evicted; ids of batches that were
            looked up, those of the fallback among them (scalars on the device).
    """

    def __init__(self, rows: int, policy: ManagedIds, seed: int, peers: Peers, device: torch.device):
        self.capacity, self.policy, self.device = rows - policy.fallback_rows, policy, device
        self._seed, self._peers = seed, peers
        share = -(-self.capacity // peers.world)
        row = torch.int32 if rows <= 2**31 else torch.int64
        fields = {"row": row, "sightings": torch.int64, "last": torch.int32}
        self._rows = KeyMap(share, fields, peers.world, device)
        del fields["row"]
        self._waiting = KeyMap(share if policy.admit_after > 1 else 0, fields, peers.world, device)
        self._free = Free(0, torch.empty(0, dtype=torch.int64, device=device))
        self._stride = _stride(self.capacity)
        self.counted: dict[str, int | torch.Tensor] = dict.fromkeys(
            ("admitted", "evicted", "lookups", "fallback"), 0
        )

    def __len__(self) -> int:
        return self._rows.count

    @property
    def waiting(self) -> int:
        """Ids of this rank that have been seen, but not often enough."""
        return self._waiting.count

    def state(self) -> MapState:
        """This rank's part."""
        return MapState(self._rows.entries(), self._waiting.entries(), self._free)

    def load(self, state: MapState) -> None:
        """Takes its part of a state; the map has nothing yet.

        Args:
            state: of any ranks, whose keys this rank need not own. Keys that it owns come once.
        """
        for map, entries in (self._rows, state.rows), (self._waiting, state.waiting):
            owners, _ = shares(entries.keys, self._peers.world)
            map.insert(entries[owners == self._peers.rank].in_order())
        self._free = state.free

    def ages(self, step: int) -> torch.Tensor:
        """Steps since the last sighting of some of this rank's ids, one of many: int64 [n]."""
        last = self._rows.at(self._rows.sample(SAMPLE)).fields["last"]
        return (step - last.long()).clamp(min=0)

    def audit(self) -> Audit:
        """What is needed to know whether ids and rows are one to one over all ranks."""
        peers, free, entries = self._peers, self._free, self._rows.entries()
        rows, (owners, _) = entries.fields["row"].long(), shares(entries.keys, peers.world)
        total = hash_sum(rows)
        part = peers.rank, peers.world
        total += share_sum(free.handed, self.capacity, *part, self._nth_row, self.device)
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

    def look_up(self, keys: torch.Tensor) -> torch.Tensor:
        """The row of each key [n], -1 where it has none; changes nothing."""
        slots = self._rows.find(keys)
        rows = self._rows.fields["row"].index_select(0, slots.clamp(min=0)).long()
        return torch.where(slots >= 0, rows, -1)

    def fallback(self, keys: torch.Tensor) -> torch.Tensor:
        """The row that each key [n] has as long as it has no own row."""
        return fallback_of(keys, self.capacity, self.policy.fallback_rows)

    def sight(self, step: int, keys: torch.Tensor, counts: torch.Tensor) -> Sighting:
        """Counts the ids of a global batch that this rank owns.

        Args:
            step: of the run, from 0.
            keys, counts: as in Sighting.
        """
        slots = self._rows.find(keys)
        known, wanted = (slots >= 0).nonzero().squeeze(1), (slots < 0).nonzero().squeeze(1)
        before = self._see(self._rows, slots[known], counts[known], step)
        rows = torch.full_like(keys, -1).index_copy_(0, known, before.fields["row"].long())
        if self.policy.admit_after > 1:
            sightings = self._see_waiting(keys[wanted], counts[wanted], step)
            enough = sightings >= self.policy.admit_after
        else:
            sightings = counts[wanted]
            enough = torch.ones_like(sightings, dtype=torch.bool)
        return Sighting(step, keys, counts, rows, wanted[enough], sightings[enough])

    def admit(
        self, seen: Sighting, wanted: Sequence[int], waiting: int
    ) -> tuple[torch.Tensor, torch.Tensor, Sequence[int]]:
        """Gives rows to ids; a collective.

        Args:
            seen: of `sight`.
            wanted: of each rank, how many of its ids are to be admitted.
            waiting: ids of all ranks that have been seen, but not often enough.

        Returns:
            (the row of each of `seen.keys`, -1 where it has none; places of those that got a new one; of each
            rank, how many these are).
        """
        if (oldest := horizon(self.policy.ttl_steps, seen.step)) is not None:
            self._give_back(self._rows.occupied(self._rows.fields["last"] < oldest))
        if waiting > self.capacity:
            self._trim_waiting(waiting - self.capacity + self.capacity // KEPT_SHARE, seen.step)
        missing = sum(wanted) - self._available
        if missing > 0 and self.policy.eviction != "none":
            self._evict(missing, seen.step)
        chosen, of_ranks = self._choose(seen, wanted)
        rows, places = seen.rows, seen.wanted[chosen]
        if given := sum(of_ranks):
            first = sum(of_ranks[: self._peers.rank])
            new_rows = self._take(given)[first : first + len(places)]
            rows = self._enter(seen, places, seen.sightings[chosen], new_rows)
        # As numbers of the device, which the host would wait for.
        self.counted["lookups"] = self.counted["lookups"] + seen.counts.sum()
        self.counted["fallback"] = self.counted["fallback"] + (seen.counts * (rows < 0)).sum()
        return rows, places, of_ranks

    def _choose(self, seen: Sighting, wanted: Sequence[int]) -> tuple[torch.Tensor, Sequence[int]]:
        """(which of `seen.wanted` get a row; of each rank, how many these are); a collective."""
        which, refused = torch.arange(len(seen.wanted), device=self.device), sum(wanted) - self._available
        if refused <= 0:
            return which, wanted
        keys = seen.keys[seen.wanted]
        of_keys = admission_scores(keys, seen.sightings, seen.step, self._seed)
        which = which[~torch.isin(which, lowest(of_keys, keys, refused, self._peers))]
        count = torch.full((1,), len(which), device=self.device)
        return which, self._peers.stack(count).squeeze(1).tolist()

    def _see(self, map: KeyMap, slots: torch.Tensor, counts: torch.Tensor, step: int) -> Entries:
        """Counts keys, each once: what the map had of them before."""
        before = map.at(slots)
        map.fields["sightings"].index_copy_(0, slots, before.fields["sightings"] + counts)
        map.fields["last"].index_fill_(0, slots, step)
        return before

    def _see_waiting(self, keys: torch.Tensor, counts: torch.Tensor, step: int) -> torch.Tensor:
        """Counts ids without a row: the sightings of each so far."""
        slots = self._waiting.find(keys)
        known, unknown = (slots >= 0).nonzero().squeeze(1), (slots < 0).nonzero().squeeze(1)
        before = self._see(self._waiting, slots[known], counts[known], step)
        sightings = counts.index_add(0, known, before.fields["sightings"])
        new = Entries(keys, {"sightings": counts, "last": torch.full_like(keys, step)})[unknown]
        self._waiting.insert(new)
        return sightings

    def _enter(
        self, seen: Sighting, places: torch.Tensor, sightings: torch.Tensor, new_rows: torch.Tensor
    ) -> torch.Tensor:
        """Ids get these rows: the row of each of `seen.keys`."""
        keys = seen.keys[places]
        last = torch.full_like(keys, seen.step)
        self._rows.insert(Entries(keys, {"row": new_rows, "sightings": sightings, "last": last}))
        if self.policy.admit_after > 1:
            self._waiting.remove(self._waiting.find(keys))
        rows = seen.rows.clone()
        rows[places] = new_rows
        self.counted["admitted"] += len(keys)
        return rows

    @property
    def _available(self) -> int:
        return self.capacity - self._free.handed + len(self._free.left)

    def _take(self, count: int) -> torch.Tensor:
        """The next rows without an id: int64 [count], the same on all ranks."""
        free, device = self._free, self._free.left.device
        fresh = min(count, self.capacity - free.handed)
        numbers = torch.arange(free.handed, free.handed + fresh, device=device)
        again = count - fresh
        self._free = replace(free, handed=free.handed + fresh, left=free.left[again:])
        return torch.cat([self._nth_row(numbers), free.left[:again]])

    def _nth_row(self, numbers: torch.Tensor) -> torch.Tensor:
        """The rows that are handed out as the n-th, when each is for the first time."""
        return numbers * self._stride % self.capacity

    def _evict(self, missing: int, step: int) -> None:
        """Frees rows, some of them for the steps to come."""
        slots, entries = self._unseen(self._rows, step)
        fields = entries.fields
        of_entries = scores(self.policy.eviction, fields["sightings"], fields["last"])
        count = rows_to_free(self.policy.eviction, missing, self.capacity)
        self._give_back(slots[lowest(of_entries, entries.keys, count, self._peers)])

    def _trim_waiting(self, count: int, step: int) -> None:
        """Forgets those that were not seen for longest."""
        slots, entries = self._unseen(self._waiting, step)
        slots = slots[lowest(entries.fields["last"].long() + 1, entries.keys, count, self._peers)]
        self._waiting.remove(slots)

    def _unseen(self, map: KeyMap, step: int) -> tuple[torch.Tensor, Entries]:
        """The slots that have not been seen at this step, and what is in them."""
        slots = map.occupied(map.fields["last"] < step)
        return slots, map.at(slots)

    def _give_back(self, slots: torch.Tensor) -> None:
        """Ids lose their rows, which come to the end of those to be handed out in the order of keys; a
        collective."""
        rows = self._rows.at(slots).in_order().fields["row"].long()
        self._rows.remove(slots)
        sizes = self._peers.stack(torch.full((1,), len(rows), device=rows.device)).squeeze(1).tolist()
        left = torch.cat([self._free.left, self._peers.concatenate(rows, sizes)])
        self._free = replace(self._free, left=left)
        self.counted["evicted"] += len(rows)


def _stride(rows: int) -> int:
    """How far apart rows are that are handed out one after the other: near the golden section of the table,
    of which any number of them in a row divides it evenly, and without a common divisor, so that all come."""
    stride = max(1, round(min(rows, 2**62 // max(rows, 1)) * (sqrt(5) - 1) / 2))
    while gcd(stride, rows) > 1:
        stride += 1
    return stride
