"""A hash map of keys in torch, on any device. Keys are found, put in and removed many at a time.

Keys stand in buckets of 8, a cache line each. A key's bucket is its place within the span of keys that this
rank owns; where that bucket is full, the key is in the next one with room, and each bucket that it had to
pass counts it, so that a search ends at the first bucket that no key has passed. Removing a key takes it out
of those counts again, so that the map stays as quick as it was however many keys come and go.

What is in a map does not depend on which slots keys have: two maps with the same entries are equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from raytrec.embeddings.hashing import NO_KEY, shares

BUCKET = 8  # slots
LOAD = 0.6  # of slots that are filled when a map is as full as it was made for
MOST_FILLED = 0.9  # of slots that may be filled before it grows


@dataclass(frozen=True)
class Entries:
    """Keys, each once, and what belongs to them.

    Attributes:
        keys: int64 [n].
        fields: name → integers [n].
    """

    keys: torch.Tensor
    fields: dict[str, torch.Tensor]

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, which: torch.Tensor) -> Entries:
        return Entries(self.keys[which], {name: values[which] for name, values in self.fields.items()})

    def joined(self, other: Entries) -> Entries:
        """These, then the others."""
        fields = {name: torch.cat([values, other.fields[name]]) for name, values in self.fields.items()}
        return Entries(torch.cat([self.keys, other.keys]), fields)

    def in_order(self) -> Entries:
        """In the order of keys."""
        return self[self.keys.argsort()]


@dataclass(frozen=True)
class Free:
    """Rows without an id; the same on all ranks.

    Attributes:
        handed: the number of rows that have been handed out once.
        left: int64 [n], those whose ids have left, in the order in which they are handed out again.
    """

    handed: int
    left: torch.Tensor


@dataclass(frozen=True)
class MapState:
    """The contents of a map, of all ranks or of some.

    Attributes:
        rows: keys with a row: row, sightings, last (the step of the last one).
        waiting: keys that have been seen, but not often enough: sightings, last.
        free: rows without an id.
    """

    rows: Entries
    waiting: Entries
    free: Free


class KeyMap:
    """Keys of one rank's span, and integers that belong to each.

    Args:
        entries: how many it is made for; it grows where there are more.
        dtypes: name → dtype of what belongs to a key.
        world: number of ranks that share all keys.

    Attributes:
        fields: name → values of all slots, [slots]; what is in a slot without a key has no meaning.
        count: keys that it has.
    """

    def __init__(self, entries: int, dtypes: Mapping[str, torch.dtype], world: int, device: torch.device):
        self._world, self._device, self._dtypes = world, device, dict(dtypes)
        self._make(entries)

    def _make(self, entries: int) -> None:
        self.count, self._buckets = 0, max(1, -(-int(entries / LOAD) // BUCKET))
        buckets = self._buckets
        self._keys = torch.full((buckets, BUCKET), NO_KEY, dtype=torch.int64, device=self._device)
        self._passed = torch.zeros(buckets, dtype=torch.int32, device=self._device)
        self.fields = {
            name: torch.empty(buckets * BUCKET, dtype=dtype, device=self._device)
            for name, dtype in self._dtypes.items()
        }

    @property
    def slots(self) -> int:
        """How many keys there is memory for."""
        return self._buckets * BUCKET

    def find(self, keys: torch.Tensor) -> torch.Tensor:
        """The slot of each key [n], -1 where it is not there: int64 [n]."""
        bucket_M = self._home(keys)
        slots, rest = self._find_in(bucket_M, keys)
        place_M = rest  # which of the keys are still looked for
        for _ in range(1, self._buckets):
            if not len(rest):
                break
            bucket_M = (bucket_M[rest] + 1) % self._buckets
            found_M, rest = self._find_in(bucket_M, keys[place_M])
            slots.index_copy_(0, place_M, found_M)
            place_M = place_M[rest]
        return slots

    def _find_in(self, bucket_M: torch.Tensor, keys_M: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(the slot of each key, -1 where it is not in its bucket; which of these may be in the next one)."""
        column_M = _column(self._keys.index_select(0, bucket_M) == keys_M.unsqueeze(1))
        missing_M = column_M < 0
        goes_on_M = missing_M & (self._passed.index_select(0, bucket_M) > 0)
        slots_M = (bucket_M * BUCKET + column_M).masked_fill_(missing_M, -1)
        return slots_M, goes_on_M.nonzero().squeeze(1)

    def insert(self, entries: Entries) -> None:
        """Puts keys in, none of which is there. Slots that were found before may be others afterwards."""
        needed = self.count + len(entries)
        if needed > MOST_FILLED * self.slots:
            self._grow(2 * needed)
        slots = self._take_slots(entries.keys)
        for name, values in entries.fields.items():
            self.fields[name].index_copy_(0, slots, values.to(self.fields[name].dtype))
        self.count = needed

    def _grow(self, entries: int) -> None:
        everything = self.entries()
        self._make(entries)
        self.insert(everything)

    def _take_slots(self, keys: torch.Tensor) -> torch.Tensor:
        """Writes keys into free slots: int64 [n]."""
        slots = torch.empty_like(keys)
        bucket_M, place_M = self._home(keys), torch.arange(len(keys), device=keys.device)
        while len(place_M):
            bucket_M, order = bucket_M.sort(stable=True)
            place_M = place_M[order]
            # The n-th of the keys that want the same bucket takes the n-th free slot of it.
            nth_M = torch.arange(len(bucket_M), device=keys.device) - torch.searchsorted(bucket_M, bucket_M)
            free_M8 = self._keys.index_select(0, bucket_M) == NO_KEY
            taken_M8 = free_M8 & (free_M8.cumsum(1) == nth_M.unsqueeze(1) + 1)
            column_M = _column(taken_M8)
            which, rest = (column_M >= 0).nonzero().squeeze(1), (column_M < 0).nonzero().squeeze(1)
            found, its_place = bucket_M[which] * BUCKET + column_M[which], place_M[which]
            slots.index_copy_(0, its_place, found)
            self._keys.view(-1).index_copy_(0, found, keys[its_place])
            self._count_passing(bucket_M[rest], 1)
            place_M, bucket_M = place_M[rest], (bucket_M[rest] + 1) % self._buckets
        return slots

    def remove(self, slots: torch.Tensor) -> None:
        """Takes keys out by their slots [n], each once."""
        bucket = slots // BUCKET
        home = self._home(self._keys.view(-1)[slots])
        while len(passed := home[home != bucket]):
            self._count_passing(passed, -1)
            bucket = bucket[home != bucket]
            home = (passed + 1) % self._buckets
        self._keys.view(-1)[slots] = NO_KEY
        self.count -= len(slots)

    def occupied(self, which: torch.Tensor | None = None) -> torch.Tensor:
        """The slots that have a key: int64 [n], ascending.

        Args:
            which: bool [slots], those that are looked at; default: all.
        """
        taken = self._keys.view(-1) != NO_KEY
        return (taken if which is None else taken.logical_and_(which)).nonzero().squeeze(1)

    def sample(self, most: int) -> torch.Tensor:
        """Some of the slots that have a key, of no more than so many, which lie evenly: int64 [n]."""
        stride = max(1, self.slots // most)
        return (self._keys.view(-1)[::stride] != NO_KEY).nonzero().squeeze(1) * stride

    def at(self, slots: torch.Tensor) -> Entries:
        """What is in these slots, each of which has a key."""
        fields = {name: values.index_select(0, slots) for name, values in self.fields.items()}
        return Entries(self._keys.view(-1).index_select(0, slots), fields)

    def entries(self) -> Entries:
        """All there are, in no particular order."""
        return self.at(self.occupied())

    def _home(self, keys: torch.Tensor) -> torch.Tensor:
        """The bucket in which each key is, unless that is full."""
        return (shares(keys, self._world)[1] * self._buckets) >> 32

    def _count_passing(self, buckets: torch.Tensor, by: int) -> None:
        change = torch.full_like(buckets, by, dtype=self._passed.dtype)
        self._passed.index_add_(0, buckets, change)


def _column(chosen_M8: torch.Tensor) -> torch.Tensor:
    """Which of a bucket's slots is chosen, -1 where none is: int64 [M].

    Args:
        chosen_M8: bool, at most one of each row. Its eight bytes are one integer of 64 bits, 256 to the power
            of the column; this power moves the column's number into the highest byte of a constant.
    """
    power_M = chosen_M8.view(torch.int64).squeeze(1)
    return (power_M * 0x0001020304050607 >> 56) - (power_M == 0).long()
