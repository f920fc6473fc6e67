"""Interactions of users and items, and their division into train, valid and test."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raytrec.common.errors import ConfigError, DataError
from raytrec.common.formatting import format_count

TRAIN, VALID, TEST = 0, 1, 2
VALID_NAMES = ("valid", "validation", "val", "dev")  # names of the valid split in sources
LEAVE_ONE_OUT, BY_TIME, RANDOM = "leave-one-out", "time", "random"
MIN_USER_INTERACTIONS = 3  # minimum per user for leave-one-out: one for test, one for valid, one for train


class Vocabulary:
    """Mapping from keys to ids, to which each call of `ids` adds new keys.

    Attributes:
        keys: Key of each id, with the type of the first values: int64 or string. None before the first call.
    """

    def __init__(self) -> None:
        self.keys: pa.Array | None = None

    def ids(self, values: pa.Array) -> np.ndarray:
        """Return the id of each key, int32 [n]; new keys get new ids, and null keys are not allowed."""
        encoded = pc.dictionary_encode(values)
        distinct = encoded.dictionary
        if self.keys is None:
            self.keys = distinct.slice(0, 0)
        indices = pc.index_in(distinct, value_set=self.keys)
        new = pc.is_null(indices).to_numpy(zero_copy_only=False)
        ids = indices.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int32)
        ids[new] = len(self.keys) + np.arange(new.sum(), dtype=np.int32)
        self.keys = pa.concat_arrays([self.keys, distinct.filter(pa.array(new))])
        return ids[encoded.indices.to_numpy(zero_copy_only=False)]

    def known_ids(self, values: pa.Array) -> np.ndarray:
        """Return the id of each key, or -1 for unknown keys; int32 [n]. `values` must have the type of `keys`."""
        indices = pc.index_in(values, value_set=self.keys).fill_null(-1)
        return indices.to_numpy(zero_copy_only=False).astype(np.int32)


@dataclass(frozen=True)
class Columns:
    """Names of the columns of users, items and times, for layouts with named columns; `time` None: no times."""

    user: str = "user"
    item: str = "item"
    time: str | None = None


@dataclass(frozen=True)
class Pairs:
    """Pairs of users and items, given by their ids: int32 [n] each."""

    user: np.ndarray
    item: np.ndarray

    def keys(self, items: int) -> np.ndarray:
        """Return a unique key for each pair, user · items + item; int64 [n]."""
        return self.user.astype(np.int64) * items + self.item


@dataclass(frozen=True)
class Interactions:
    """All interactions of a source.

    Attributes:
        user: User id of each interaction, from 0; int32 [n].
        item: Item id of each interaction, from 0; int32 [n].
        time: Time of each interaction, int64 or float64 [n]; None if the source has no times.
        time_type: Arrow type of the times in files; None if the source has no times.
        users: Key in the source for each user id.
        items: Key in the source for each item id.
        split: TRAIN, VALID or TEST for each interaction, int8 [n]; None if the source has no splits.
        candidates: Given candidates for test users; None if there are none.
        in_order: True if the interactions of each user are in chronological order.
        of_all: True if the interactions of all users together are in chronological order.
    """

    user: np.ndarray
    item: np.ndarray
    time: np.ndarray | None
    time_type: pa.DataType | None
    users: pa.Array
    items: pa.Array
    split: np.ndarray | None = None
    candidates: Pairs | None = None
    in_order: bool = True
    of_all: bool = True

    def __len__(self) -> int:
        return len(self.user)

    def only(self, selected_rows: np.ndarray) -> Interactions:
        """Return the interactions selected by a mask, or by positions in their order; ids do not change."""
        some = {name: getattr(self, name) for name in ("user", "item", "time", "split")}
        return replace(self, **{name: None if v is None else v[selected_rows] for name, v in some.items()})

    def order(self) -> np.ndarray:
        """Return the positions sorted by user, then by time; ties keep the order of the source."""
        return np.lexsort((self.user,) if self.time is None else (self.time, self.user))


class InteractionBuilder:
    """Builder that combines the parts of a source into one Interactions.

    Attributes:
        users: Ids of the users added so far.
        items: Ids of the items added so far.
        types: Types of users, items and times in files (tables.read); None before the first file.
    """

    def __init__(self) -> None:
        self.users, self.items = Vocabulary(), Vocabulary()
        self.types: tuple[str, str, str] | None = None
        self._parts: list[tuple[np.ndarray, ...]] = []
        self._time_type: pa.DataType | None = None

    def add(self, users: pa.Array, items: pa.Array, times: pa.Array | None = None, split: int = TRAIN) -> None:
        """Add interactions. All calls must have the same types; only integers and floats as times can be mixed.

        Args:
            users: Key of each interaction's user, without nulls.
            items: Key of each interaction's item, without nulls.
            times: Time of each interaction; None if the source has no times.
            split: Split of the interactions: TRAIN, VALID or TEST.
        """
        user, item = self.users.ids(users), self.items.ids(items)
        parts = [user, item, np.full(len(user), split, np.int8)]
        if times is not None:
            is_mixed = self._time_type is not None and times.type != self._time_type
            self._time_type = pa.float64() if is_mixed else times.type
            plain = times if pa.types.is_floating(times.type) else times.cast(pa.int64())
            parts.append(plain.to_numpy(zero_copy_only=False))
        self._parts.append(tuple(parts))

    def finish(self, where: str, **more: object) -> Interactions:
        """Return all added interactions; `more` contains further attributes of Interactions.

        Raises:
            DataError: No interactions were added.
        """
        if not sum(len(part[0]) for part in self._parts):
            raise DataError(
                "the source contains no interactions", where=where, expected="a user and an item in each row"
            )
        user, item, split, *time = (np.concatenate(parts) for parts in zip(*self._parts, strict=True))
        attributes = {"split": split} if split.any() else {}
        return Interactions(
            user,
            item,
            time[0] if time else None,
            self._time_type,
            self.users.keys,
            self.items.keys,
            **attributes | more,
        )


def keep_core(data: Interactions, least: int) -> Interactions:
    """Remove users and items with fewer than `least` interactions until all others have at least `least`.

    The remaining ids are renumbered in the order of the old ids.

    Raises:
        DataError: No interactions are left.
    """
    while len(data):
        users = np.bincount(data.user, minlength=1)[data.user]
        items = np.bincount(data.item, minlength=1)[data.item]
        mask = (users >= least) & (items >= least)
        if mask.all():
            break
        data = data.only(mask)
    if not len(data):
        raise DataError(
            f"no users and items with at least {least} interactions remain",
            where=f"--min-interactions {least}",
            do="lower --min-interactions",
        )
    user_ids, user = np.unique(data.user, return_inverse=True)
    item_ids, item = np.unique(data.item, return_inverse=True)
    return replace(
        data,
        user=user.astype(np.int32),
        item=item.astype(np.int32),
        users=data.users.take(pa.array(user_ids)),
        items=data.items.take(pa.array(item_ids)),
        candidates=_renumbered(data.candidates, user_ids, item_ids),
    )


def _renumbered(pairs: Pairs | None, users: np.ndarray, items: np.ndarray) -> Pairs | None:
    """Return pairs with new ids, without pairs of removed ids; None if `pairs` is None."""
    if pairs is None:
        return None
    mask = np.isin(pairs.user, users) & np.isin(pairs.item, items)
    new = np.searchsorted(users, pairs.user[mask]), np.searchsorted(items, pairs.item[mask])
    return Pairs(*(ids.astype(np.int32) for ids in new))


def divide(data: Interactions, order: np.ndarray, split_method: str | None, seed: int, lenient: bool) -> np.ndarray:
    """Return TRAIN, VALID or TEST for each interaction, int8 [n].

    leave-one-out: the last of each user's interactions is test, and the next-to-last is valid. time: the last
    tenth of all interactions is test, and the tenth before is valid. random: the same sizes, drawn with the
    seed. The source's own splits are kept. If the source has splits but no valid split, one train interaction
    of each user with two or more becomes valid: the last if the interactions are in order, else a random one.

    Args:
        data: All interactions of a source.
        order: Positions of the interactions, user after user (Interactions.order).
        split_method: leave-one-out, time or random; None: the source's own splits, else leave-one-out.
        seed: Seed of random choices.
        lenient: True to put users with fewer than three interactions into train instead of raising an error.

    Raises:
        ConfigError: `split_method` is set although the source has splits, or the source has no order and the
            method requires an order.
        DataError: With leave-one-out, a user has fewer than three interactions and `lenient` is False.
    """
    rng = np.random.default_rng([seed, 1])
    if data.split is not None:
        if split_method:
            raise ConfigError(
                "the source is already divided into splits",
                where=f"--split {split_method}",
                do="omit --split, or pass one file of the source; in prepare movielens, set --split leave-one-out",
            )
        return data.split if VALID in data.split else _held_out_of_train(data, order, rng)
    if split_method == RANDOM:
        return _tenths(rng.permutation(len(data)))
    _check_order(data, split_method or LEAVE_ONE_OUT)
    if split_method == BY_TIME:
        in_time = np.arange(len(data)) if data.time is None else np.argsort(data.time, kind="stable")
        return _tenths(_at(in_time, np.arange(len(data))))
    return _leave_one_out(data, order, lenient)


def _check_order(data: Interactions, how: str) -> None:
    ordered = data.of_all if how == BY_TIME else data.in_order
    if data.time is None and not ordered:
        raise ConfigError(
            "the source has no times and is not ordered by time",
            where=f"--split {how}",
            expected="times; in prepare interactions, a column of times, which --time names",
            do="use a source with times, or another --split",
        )


def _at(places: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the array that contains values[i] at position places[i]."""
    result = np.empty_like(values)
    result[places] = values
    return result


def _tenths(places: np.ndarray) -> np.ndarray:
    tenth = len(places) // 10
    from_end = len(places) - 1 - places
    return np.where(from_end < tenth, TEST, np.where(from_end < 2 * tenth, VALID, TRAIN)).astype(np.int8)


def _leave_one_out(data: Interactions, order: np.ndarray, lenient: bool) -> np.ndarray:
    counts = np.bincount(data.user, minlength=len(data.users))
    few = np.flatnonzero((counts < MIN_USER_INTERACTIONS) & (counts > 0))
    if len(few) and not lenient:
        raise DataError(
            f"no interaction can be left out for {format_count(len(few), 'user')} with fewer than "
            f"{MIN_USER_INTERACTIONS} interactions; the first, {data.users[int(few[0])].as_py()!r}, has "
            f"{counts[few[0]]}",
            where=f"--split {LEAVE_ONE_OUT}",
            expected=f"{MIN_USER_INTERACTIONS} or more: one for test, one for valid, one for train",
            do=f"remove them from the source; or, in prepare interactions, exclude them with --min-interactions "
            f"{MIN_USER_INTERACTIONS}, or keep them only in train with --min-interactions 1",
        )
    user = data.user[order]
    from_end = np.cumsum(counts)[user] - 1 - np.arange(len(user))
    is_held_out = (counts[user] >= MIN_USER_INTERACTIONS) & (from_end < 2)
    return _at(order, np.where(is_held_out, TEST - from_end, TRAIN).astype(np.int8))


def _held_out_of_train(data: Interactions, order: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    train = order[data.split[order] == TRAIN]
    if not data.in_order:
        train = train[rng.permutation(len(train))]
    _, last, counts = np.unique(data.user[train[::-1]], return_index=True, return_counts=True)
    split = data.split.copy()
    split[train[::-1][last[counts > 1]]] = VALID
    return split
