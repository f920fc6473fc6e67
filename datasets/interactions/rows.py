"""Make rows with histories and candidates from interactions that are divided into splits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from raytrec_datasets.interactions.candidates import draw_unmet, is_among
from raytrec_datasets.interactions.events import TEST, TRAIN, VALID, Interactions
from raytrec_datasets.writing import SplitWriter

from raytrec.common.errors import DataError

CHUNK_IDS = 1 << 23  # maximum number of ids in histories that are in memory at a time


@dataclass(frozen=True)
class Targets:
    """Users, items and histories of rows to write.

    Attributes:
        user: User of each row, int64 [n].
        item: Item of each row, int64 [n].
        label: 1 for an interaction of the user and the item, else 0; int8 [n].
        start: First position of the row's history in Past, int64 [n].
        end: Position after the row's history in Past, int64 [n].
        time: Time of the interaction. A candidate has the time of a row of the same user, so that the time
            does not reveal candidates. None if the source has no times.
    """

    user: np.ndarray
    item: np.ndarray
    label: np.ndarray
    start: np.ndarray
    end: np.ndarray
    time: np.ndarray | None

    def part(self, rows: slice | np.ndarray) -> Targets:
        """Return the selected rows, in the given order."""
        return Targets(*(None if v is None else v[rows] for v in vars(self).values()))

    def __len__(self) -> int:
        return len(self.user)


class Past:
    """Users, items and times of the m interactions selected by a mask, user after user, in chronological order.

    The interactions of user u are at positions offsets[u] to offsets[u + 1] - 1. `time` is None without times.
    """

    def __init__(self, data: Interactions, kept: np.ndarray):
        self.user, self.item = data.user[kept].astype(np.int64), data.item[kept]
        self.time = None if data.time is None else data.time[kept]
        counts = np.bincount(self.user, minlength=len(data.users))
        self.offsets = np.concatenate([[0], np.cumsum(counts)])  # [users + 1]

    def __len__(self) -> int:
        return len(self.user)


class Rows:
    """Rows of all splits.

    The history of a row in train contains the earlier items of the user in train. The history of a row in valid
    contains the user's items in train, and the history of a row in test also the user's items in valid. Each history
    is cut to its last `length` ids. All rows of a user in valid or test have the same history, so that they can
    be ranked against each other. With `rolling`, each history also contains the interactions of the row's own
    split before the row.

    Args:
        data: Interactions, sorted by Interactions.order.
        split: TRAIN, VALID or TEST for each interaction.
        length: Maximum number of ids in a history; 0: rows have no history.
        seed: Seed of the order of train and of drawn negatives.
        of_user: Side features of users: column → value for each id.
        of_item: Side features of items: column → value for each id.
        with_seen: True to add to rows of valid and test all earlier items of the user, regardless of
            `length`.
        with_valid: True to add the interactions of valid to train.
        rolling: True to extend the histories of valid and test up to each row; cannot be combined with
            candidates.
        by_user: True to write one row for each user in valid and test, with the list of held-out items,
            `right_items`; cannot be combined with candidates or `rolling`.

    Attributes:
        counts: Number of occurrences of each item in train, int64 [items].
    """

    def __init__(
        self,
        data: Interactions,
        split: np.ndarray,
        length: int,
        seed: int,
        of_user: dict[str, pa.Array] | None = None,
        of_item: dict[str, pa.Array] | None = None,
        with_seen: bool = False,
        with_valid: bool = False,
        rolling: bool = False,
        by_user: bool = False,
    ):
        self._data, self._split, self._length, self._seed = data, split, length, seed
        self._seen, self._rolling = with_seen, rolling
        self._sides = (of_user or {}, of_item or {})
        self._trained = split <= (VALID if with_valid else TRAIN)
        self._past = {
            TRAIN: Past(data, self._trained),
            VALID: Past(data, split < VALID + rolling),
            TEST: Past(data, split < TEST + rolling),
        }
        self._right = {part: Past(data, split == part) for part in (VALID, TEST)} if by_user else {}
        self.items = len(data.items)
        self.counts = np.bincount(self._past[TRAIN].item, minlength=self.items)
        self._met = self._keys(slice(None))

    def _keys(self, rows) -> np.ndarray:
        """Return the distinct keys, user · items + item, of the selected interactions; int64, sorted."""
        return np.unique(self._data.user[rows].astype(np.int64) * self.items + self._data.item[rows])

    def write_train(self, folder: Path, per_interaction: bool, negatives: int, advance: Callable[[int], None]) -> int:
        """Write train in random order, and return the number of rows.

        Args:
            folder: Folder of the split.
            per_interaction: True to write a row for each interaction; False to write a row for every `length`
                interactions of a user.
            negatives: Number of rows with label 0 for each row, drawn from items that are new to the user
                in train.
            advance: Function called with the number of rows with label 1 that have been written.
        """
        past, rng = self._past[TRAIN], np.random.default_rng([self._seed, 2])
        place = np.arange(len(past)) if per_interaction else self._ends(past)
        place = place[rng.permutation(len(place))]
        met = self._keys(self._trained) if negatives else None
        writer = self._writer(folder, TRAIN, len(place) * (1 + negatives))
        step = max(1, CHUNK_IDS // (self._length + 16) // (1 + negatives))
        for first in range(0, len(place), step):
            rows = self._of_train(past, place[first : first + step])
            if negatives:
                rows = self._with_drawn(rows, negatives, met, rng)
            writer.write(self.table(rows, TRAIN))
            advance(len(rows) // (1 + negatives))
        writer.close()
        return writer.rows

    def _ends(self, past: Past) -> np.ndarray:
        """Return positions with a history, `length` apart, backwards from each user's last interaction.

        Each interaction except a user's first is then a target once: as the item of a row, or in its history.
        """
        counts = np.diff(past.offsets)
        rows = np.where(counts > 0, np.maximum(1, -(-(counts - 1) // self._length)), 0)
        back = np.arange(rows.sum()) - np.repeat(np.cumsum(rows) - rows, rows)
        return np.repeat(past.offsets[1:] - 1, rows) - back * self._length

    def _of_train(self, past: Past, place: np.ndarray) -> Targets:
        user = past.user[place]
        start = np.maximum(past.offsets[user], place - self._length)
        time = None if past.time is None else past.time[place]
        return Targets(user, past.item[place].astype(np.int64), np.ones(len(place), np.int8), start, place, time)

    def _with_drawn(self, rows: Targets, count: int, met: np.ndarray, rng: np.random.Generator) -> Targets:
        """Return each row together with `count` rows with drawn items for the same user, all in random order."""
        drawn = draw_unmet(rows.user, count, self.items, met, rng)
        wide = rows.part(np.repeat(np.arange(len(rows)), 1 + count))
        first = np.arange(len(wide)) % (1 + count) == 0
        wide.item[~first], wide.label[~first] = drawn.ravel(), 0
        return wide.part(rng.permutation(len(wide)))

    def write_held_out(self, folder: Path, split: int, negatives: int, advance: Callable[[int], None]) -> int:
        """Write valid or test, user after user: held-out items, then candidates.

        Args:
            folder: Folder of the split.
            split: VALID or TEST.
            negatives: Number of candidates drawn for each user from items without an interaction of the user; in
                TEST, given candidates replace them. 0: no candidates are written, even if candidates are given.
            advance: Function called with the number of held-out rows that have been written.

        Returns:
            Number of rows in the split.
        """
        rows = self._held_out(split, negatives)
        writer = self._writer(folder, split, len(rows))
        of_seen = int(np.diff(self._past[split].offsets).max()) if self._seen else 0
        of_right = int(np.diff(self._right[split].offsets).max()) if self._right else 0
        step = max(1, CHUNK_IDS // (self._length + of_seen + of_right + 16))
        for first in range(0, len(rows), step):
            part = rows.part(slice(first, first + step))
            writer.write(self.table(part, split))
            advance(int(part.label.sum()))
        writer.close()
        return len(rows)

    def _held_out(self, split: int, negatives: int) -> Targets:
        mask = self._split == split
        user, item = self._data.user[mask].astype(np.int64), self._data.item[mask].astype(np.int64)
        others = self._candidates(split, user, item, negatives)
        users = np.concatenate([user, others[0]])
        order = np.argsort(users, kind="stable")
        past, label = self._past[split], np.repeat(np.int8([1, 0]), [len(user), len(others[0])])
        time = None
        if self._data.time is not None:
            time = self._data.time[mask]
            time = np.concatenate([time, time[_in_turn(user, others[0])]])
        end = np.flatnonzero(mask[self._split <= split]) if self._rolling else past.offsets[users + 1]
        start = np.maximum(past.offsets[users], end - self._length)
        if self._right:
            order = order[np.unique(users[order], return_index=True)[1]]
        return Targets(users, np.concatenate([item, others[1]]), label, start, end, time).part(order)

    def _candidates(
        self, split: int, user: np.ndarray, item: np.ndarray, negatives: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return (users, items) of the rows with label 0."""
        users, pairs = np.unique(user), self._data.candidates
        if not negatives:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        if split == TEST and pairs is not None:
            return self._given(users, user * self.items + item)
        drawn = draw_unmet(users, negatives, self.items, self._met, np.random.default_rng([self._seed, 3, split]))
        return np.repeat(users, negatives), drawn.ravel()

    def _given(self, users: np.ndarray, positive: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the distinct given candidates of users, without the users' held-out items."""
        pairs = self._data.candidates
        keys = np.unique(pairs.keys(self.items)[np.isin(pairs.user, users)])
        keys = keys[~is_among(keys, np.sort(positive))]
        if len(without := np.setdiff1d(users, pairs.user)):
            raise DataError(
                f"users of the test split without candidates: {len(without):,}, such as "
                f"{self._data.users[int(without[0])].as_py()!r}",
                where="--candidates, or the source's own candidates",
                expected="candidates for every user that has a row in test",
            )
        return keys // self.items, keys % self.items

    def table(self, rows: Targets, split: int) -> pa.Table:
        """Return rows of a split (TRAIN, VALID or TEST) as an Arrow table with the columns of the dataset."""
        past = self._past[split]
        columns: dict[str, object] = {
            "label": rows.label,
            "user": rows.user.astype(np.int32),
            "item": rows.item.astype(np.int32),
        }
        if self._length:
            lengths = rows.end - rows.start
            columns["history"] = slices(past.item, rows.start, lengths)
            if past.time is not None:
                columns["history_time"] = slices(past.time, rows.start, lengths, self._data.time_type)
        last = past.offsets[rows.user + 1] - 1
        columns["later"] = (last - rows.end if split == TRAIN else np.zeros(len(rows))).astype(np.int32)
        if past.time is not None:
            columns["time"] = pa.array(rows.time).cast(self._data.time_type)
        if self._seen and split != TRAIN:
            first = past.offsets[rows.user]
            columns["seen"] = slices(past.item, first, rows.end - first)
        if split in self._right:
            right = self._right[split]
            lengths = np.diff(right.offsets)[rows.user]
            columns["right_items"] = slices(right.item, right.offsets[rows.user], lengths)
        columns["item_count"] = np.maximum(self.counts[rows.item], 1)
        for ids, sides in zip((rows.user, rows.item), self._sides, strict=True):
            columns |= {name: values.take(pa.array(ids)) for name, values in sides.items()}
        return pa.table(columns)

    def _writer(self, folder: Path, split: int, rows: int) -> SplitWriter:
        no_ids = np.empty(0, np.int64)
        time = None if self._data.time is None else self._data.time[:0]
        empty = Targets(no_ids, no_ids, no_ids.astype(np.int8), no_ids, no_ids, time)
        return SplitWriter(folder, self.table(empty, split).schema, group_rows=_group_rows(rows))


def _in_turn(users: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return, for each entry of `others`, a position of the same user in `users`, in turn; both are sorted."""
    first = np.searchsorted(users, others)
    count = np.searchsorted(users, others, side="right") - first
    return first + (np.arange(len(others)) - np.searchsorted(others, others)) % count


def _group_rows(rows: int) -> int:
    """Return the number of rows in a row group; it is smaller for small data, so that several workers get groups."""
    return 512 if rows < 50_000 else 4_096 if rows < 1_000_000 else 16_384


def slices(
    values: np.ndarray, starts: np.ndarray, lengths: np.ndarray, kind: pa.DataType | None = None
) -> pa.ListArray:
    """Return the list values[start : start + length] of each row, of Arrow type `kind` (None: that of `values`)."""
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    index = np.repeat(starts - offsets[:-1], lengths) + np.arange(offsets[-1])
    inner = pa.array(values[index])
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), inner.cast(kind) if kind else inner)
