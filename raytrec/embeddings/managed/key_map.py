"""Hash map for the keys of managed ids (hashing.py) of several tables, implemented in torch for any device.

Keys of all tables are found, inserted and removed together. The number of kernel launches and waits on a GPU
is therefore independent of the number of tables.

Keys are stored in buckets of 8 (one cache line), and each table has a range of buckets. A key's bucket is
proportional to the key's position in the span of keys that this rank owns. If that bucket is full, the key
goes into the next bucket with room. Every full bucket on the way counts the key, so a search ends at the
first bucket that no key has passed. Removing a key decrements these counts, so the map stays fast however
many keys come and go.

The content of a map does not depend on the slots of its keys: two maps with the same entries are equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from raytrec.common.collectives import to_device_tensor
from raytrec.embeddings.hashing import NO_KEY, find_key_owners, select_by_table, split_by_mask

BUCKET_SLOTS = 8  # slots per bucket
INITIAL_LOAD_FACTOR = 0.6  # share of slots filled when a map contains the expected number of entries
MAX_LOAD_FACTOR = 0.9  # share of filled slots above which a map grows


@dataclass(frozen=True)
class KeyEntries:
    """Distinct keys of one or several tables, and their fields.

    Attributes:
        keys: Keys, int64 [n].
        fields: Field name → integer of each key, [n].
    """

    keys: torch.Tensor
    fields: dict[str, torch.Tensor]

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, which: torch.Tensor) -> KeyEntries:
        return KeyEntries(self.keys[which], {name: values[which] for name, values in self.fields.items()})

    def in_order(self) -> KeyEntries:
        """Return the entries sorted by key."""
        return self[self.keys.argsort()]


@dataclass(frozen=True)
class FreeRows:
    """Rows of a table that are not assigned to an id; the same on all ranks.

    Attributes:
        handed: Number of rows that have been assigned at least once; rows that have never been assigned are free.
        left: Rows whose ids have been removed, int64 [n], in the order in which they will be reassigned.
    """

    handed: int
    left: torch.Tensor


@dataclass(frozen=True)
class MapState:
    """Content of a table's map from ids to rows, on one, some or all ranks.

    Attributes:
        rows: Keys with a row; their fields are row, sightings (occurrences in training) and last (last step with one).
        waiting: Keys not yet seen often enough for a row; their fields are sightings and last.
        free: Rows without an id.
    """

    rows: KeyEntries
    waiting: KeyEntries
    free: FreeRows


class KeyMap:
    """Map from the keys in one rank's span to integer fields.

    The argument `tables` of the methods, int64 [n], contains the table number of each of n keys, ascending. The
    argument `sizes` contains, for every table of the map, how many of these n keys belong to the table.

    Args:
        entries: Expected number of entries of each table; the map grows if a table gets more entries.
        dtypes: Field name → dtype.
        world: Number of ranks that share all keys.
        device: Device of the map.

    Attributes:
        fields: Field name → value in each slot, [slots]; undefined in slots without a key.
        counts: Number of keys of each table.
    """

    def __init__(self, entries: Sequence[int], dtypes: Mapping[str, torch.dtype], world: int, device: torch.device):
        self._world, self._device, self.counts = world, device, [0] * len(entries)
        self._buckets = [_count_buckets(count) for count in entries]
        total = sum(self._buckets)
        self._keys = torch.full((total, BUCKET_SLOTS), NO_KEY, dtype=torch.int64, device=device)
        self._passed = torch.zeros(total, dtype=torch.int32, device=device)
        self.fields = {
            name: torch.empty(total * BUCKET_SLOTS, dtype=dtype, device=device) for name, dtype in dtypes.items()
        }
        self._update_ranges()

    def _update_ranges(self) -> None:
        self._ends = list(accumulate(self._buckets))
        self._starts = [end - size for end, size in zip(self._ends, self._buckets, strict=True)]
        ranges = to_device_tensor([self._ends, self._buckets], self._device)
        self._end_T, self._buckets_T = ranges.unbind()
        self._start_T = self._end_T - self._buckets_T

    def find(self, tables: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Return the slot of each key, int64 [n]; -1 if the key is missing."""
        bucket_M = self._find_home_buckets(tables, keys)
        slots, pending = self._find_in_buckets(bucket_M, keys)
        place_M = pending  # keys that have not been found yet
        for _ in range(1, max(self._buckets)):
            if not len(pending):
                break
            bucket_M = self._find_next_buckets(tables[place_M], bucket_M[pending])
            found_M, pending = self._find_in_buckets(bucket_M, keys[place_M])
            slots.index_copy_(0, place_M, found_M)
            place_M = place_M[pending]
        return slots

    def _find_in_buckets(self, bucket_M: torch.Tensor, keys_M: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each key's slot (-1 if not in its bucket), and the indices of keys that may be in a later bucket."""
        column_M = _find_column(self._keys.index_select(0, bucket_M) == keys_M.unsqueeze(1))
        missing_M = column_M < 0
        continues_M = missing_M & (self._passed.index_select(0, bucket_M) > 0)
        slots_M = (bucket_M * BUCKET_SLOTS + column_M).masked_fill_(missing_M, -1)
        return slots_M, continues_M.nonzero().squeeze(1)

    def insert(self, tables: torch.Tensor, sizes: Sequence[int], entries: KeyEntries) -> None:
        """Insert distinct keys that are not in the map. If a table grows, slots found earlier become invalid."""
        for table, size in enumerate(sizes):
            needed = self.counts[table] + size
            if needed > MAX_LOAD_FACTOR * BUCKET_SLOTS * self._buckets[table]:
                self._grow(table, 2 * needed)
            self.counts[table] = needed
        self._insert_in_buckets(tables, entries)

    def _insert_in_buckets(self, tables: torch.Tensor, entries: KeyEntries) -> None:
        slots = self._take_slots(tables, entries.keys)
        for name, values in entries.fields.items():
            self.fields[name].index_copy_(0, slots, values.to(self.fields[name].dtype))

    def _grow(self, table: int, entries: int) -> None:
        """Enlarge a table's range of buckets for `entries` keys, and insert its keys again.

        Tensors are copied one after another, so that memory contains two copies of only one tensor at a time.
        """
        old_entries, start, end = self.entries(table), self._starts[table], self._ends[table]
        buckets = self._buckets[table] = _count_buckets(entries)

        def enlarge(values: torch.Tensor, content: int, width: int = 1) -> torch.Tensor:
            middle = values.new_full((buckets * width, *values.shape[1:]), content)
            return torch.cat([values[: start * width], middle, values[end * width :]])

        self._keys, self._passed = enlarge(self._keys, NO_KEY), enlarge(self._passed, 0)
        for name in self.fields:
            self.fields[name] = enlarge(self.fields[name], 0, BUCKET_SLOTS)
        self._update_ranges()
        self._insert_in_buckets(torch.full_like(old_entries.keys, table), old_entries)

    def _take_slots(self, tables: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Write keys into free slots, without their fields, and return the slots, int64 [n]."""
        slots = torch.empty_like(keys)
        bucket_M, place_M = self._find_home_buckets(tables, keys), torch.arange(len(keys), device=keys.device)
        while len(place_M):
            bucket_M, order = bucket_M.sort(stable=True)
            place_M = place_M[order]
            # Of the keys that need the same bucket, the n-th one takes the n-th free slot.
            nth_M = torch.arange(len(bucket_M), device=keys.device) - torch.searchsorted(bucket_M, bucket_M)
            free_M8 = self._keys.index_select(0, bucket_M) == NO_KEY
            taken_M8 = free_M8 & (free_M8.cumsum(1) == nth_M.unsqueeze(1) + 1)
            column_M = _find_column(taken_M8)
            placed, pending = split_by_mask(column_M >= 0)
            new_slots, new_places = bucket_M[placed] * BUCKET_SLOTS + column_M[placed], place_M[placed]
            slots.index_copy_(0, new_places, new_slots)
            self._keys.view(-1).index_copy_(0, new_slots, keys[new_places])
            self._count_overflows(bucket_M[pending], 1)
            place_M = place_M[pending]
            bucket_M = self._find_next_buckets(tables[place_M], bucket_M[pending])
        return slots

    def remove(self, tables: torch.Tensor, sizes: Sequence[int], slots: torch.Tensor) -> None:
        """Remove the keys in these distinct slots, int64 [n], whose table numbers are `tables`."""
        bucket = slots // BUCKET_SLOTS
        home = self._find_home_buckets(tables, self._keys.view(-1)[slots])
        while len(passed := (home != bucket).nonzero().squeeze(1)):
            bucket, home, tables = bucket[passed], home[passed], tables[passed]
            self._count_overflows(home, -1)
            home = self._find_next_buckets(tables, home)
        self._keys.view(-1).index_fill_(0, slots, NO_KEY)
        self.counts = [count - size for count, size in zip(self.counts, sizes, strict=True)]

    def find_occupied_slots(self, table: int) -> torch.Tensor:
        """Return the slots of a table that contain a key, int64 [n], ascending."""
        return self.sample(table, self._buckets[table] * BUCKET_SLOTS)

    def sample(self, table: int, max_slots: int) -> torch.Tensor:
        """Return those of about `max_slots` evenly spaced slots of a table that contain a key, int64 [n], ascending."""
        stride = max(1, self._buckets[table] * BUCKET_SLOTS // max_slots)
        taken = self._slice_table(table, self._keys.view(-1))[::stride] != NO_KEY
        return taken.nonzero().squeeze(1) * stride + self._starts[table] * BUCKET_SLOTS

    def find_below(self, tables: Sequence[int], field: str, limits: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Find the keys of some tables whose field is below the limit of their table.

        Args:
            tables: Distinct table numbers [T].
            field: Name of the field.
            limits: Limit of each of these tables.

        Returns:
            The index into `tables` and the slot of each key found, int64 [n] each, in the order of `tables` and
            then of slots.
        """
        values, keys = self.fields[field], self._keys.view(-1)
        parts = [
            (self._slice_table(table, values) < limit).logical_and_(self._slice_table(table, keys) != NO_KEY)
            for table, limit in zip(tables, limits, strict=True)
        ]
        starts = [self._starts[table] * BUCKET_SLOTS for table in tables]
        ends = list(accumulate(map(len, parts)))
        shifts = [start + len(part) - end for start, part, end in zip(starts, parts, ends, strict=True)]
        ends_P, shifts_P = to_device_tensor([ends, shifts], self._device)
        matches = torch.cat(parts).nonzero().squeeze(1)
        sizes_P = torch.searchsorted(matches, ends_P).diff(prepend=ends_P.new_zeros(1))
        which = torch.arange(len(tables), device=self._device)
        which = which.repeat_interleave(sizes_P, output_size=len(matches))
        return which, matches + select_by_table(shifts_P, which)

    def _slice_table(self, table: int, values: torch.Tensor) -> torch.Tensor:
        """Return the slots of a table from a tensor of all slots."""
        return values[self._starts[table] * BUCKET_SLOTS : self._ends[table] * BUCKET_SLOTS]

    def read_slots(self, slots: torch.Tensor) -> KeyEntries:
        """Return the entries in these slots, in this order; each slot must contain a key."""
        fields = {name: values.index_select(0, slots) for name, values in self.fields.items()}
        return KeyEntries(self._keys.view(-1).index_select(0, slots), fields)

    def entries(self, table: int) -> KeyEntries:
        """Return all entries of a table in no particular order."""
        return self.read_slots(self.find_occupied_slots(table))

    def _find_home_buckets(self, tables: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Return the home bucket of each key, in which the key is stored unless the bucket is full."""
        within = (find_key_owners(keys, self._world)[1] * select_by_table(self._buckets_T, tables)) >> 32
        return within.add_(select_by_table(self._start_T, tables))

    def _find_next_buckets(self, tables: torch.Tensor, buckets: torch.Tensor) -> torch.Tensor:
        """Return the bucket after each bucket; a table's last bucket is followed by its first."""
        following = buckets + 1
        return following.where(following < select_by_table(self._end_T, tables), select_by_table(self._start_T, tables))

    def _count_overflows(self, buckets: torch.Tensor, by: int) -> None:
        self._passed.index_add_(0, buckets, torch.full_like(buckets, by, dtype=self._passed.dtype))


def _count_buckets(entries: int) -> int:
    return max(1, -(-int(entries / INITIAL_LOAD_FACTOR) // BUCKET_SLOTS))


def _find_column(chosen_M8: torch.Tensor) -> torch.Tensor:
    """Return the chosen column of each row, int64 [M]; -1 if no column is chosen.

    As a 64-bit integer, a row of the mask is 256 to the power of its column. The product of this power and the
    constant has the column's number in its highest byte.

    Args:
        chosen_M8: bool [M, 8] with at most one True per row.
    """
    power_M = chosen_M8.view(torch.int64).squeeze(1)
    return (power_M * 0x0001020304050607 >> 56) - (power_M == 0).long()
