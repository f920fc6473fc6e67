"""Which interactions are train, valid and test."""

from __future__ import annotations

import numpy as np
from raytrec_datasets.interactions.events import TEST, TRAIN, VALID, Interactions

from raytrec.common.errors import ConfigError, DataError

LEAVE_ONE_OUT, BY_TIME, RANDOM = "leave-one-out", "time", "random"
FEWEST = 3  # interactions of a user, of which one goes to test and one to valid


def divide(data: Interactions, order: np.ndarray, how: str | None, seed: int, lenient: bool) -> np.ndarray:
    """TRAIN, VALID or TEST of each interaction: int8 [n].

    leave-one-out: of each user's, the last is test and the last but one valid. time: of all together, the
    last tenth is test, and the tenth before it valid. random: as large, drawn from the seed. What the source
    divides itself stays; where it has no valid, one of train of each user with two or more becomes it, the
    last if they have an order.

    Args:
        order: the interactions' positions, user after user (Interactions.order).
        how: None: as the source divides it, else leave-one-out.
        lenient: users of fewer than three interactions are in train alone; else they are an error.

    Raises:
        ConfigError: the source has another division, or no order of time.
        DataError: users of fewer than three interactions, in leave-one-out.
    """
    rng = np.random.default_rng([seed, 1])
    if data.split is not None:
        if how:
            raise ConfigError(
                "the source divides its rows itself",
                where=f"--split {how}",
                do="leave --split out; or give one file of the source",
            )
        return data.split if VALID in data.split else _held_out_of_train(data, order, rng)
    if how == RANDOM:
        return _tenths(rng.permutation(len(data)))
    _check_order(data, how or LEAVE_ONE_OUT)
    if how == BY_TIME:
        in_time = np.arange(len(data)) if data.time is None else np.argsort(data.time, kind="stable")
        return _tenths(_at(in_time, np.arange(len(data))))
    return _leave_one_out(data, order, lenient)


def _check_order(data: Interactions, how: str) -> None:
    ordered = data.of_all if how == BY_TIME else data.in_order
    if data.time is None and not ordered:
        raise ConfigError(
            "the source has no times, and its order is not that of time",
            where=f"--split {how}",
            expected="a column of times",
            do="name one with --time, or use --split random",
        )


def _at(places: np.ndarray, values: np.ndarray) -> np.ndarray:
    """An array with values[i] at places[i]."""
    result = np.empty_like(values)
    result[places] = values
    return result


def _tenths(places: np.ndarray) -> np.ndarray:
    tenth = len(places) // 10
    from_end = len(places) - 1 - places
    return np.where(from_end < tenth, TEST, np.where(from_end < 2 * tenth, VALID, TRAIN)).astype(np.int8)


def _leave_one_out(data: Interactions, order: np.ndarray, lenient: bool) -> np.ndarray:
    counts = np.bincount(data.user, minlength=len(data.users))
    few = np.flatnonzero((counts < FEWEST) & (counts > 0))
    if len(few) and not lenient:
        raise DataError(
            f"{len(few):,} users have fewer than {FEWEST} interactions; the first, "
            f"{data.users[int(few[0])].as_py()!r}, has {counts[few[0]]}",
            where=f"--split {LEAVE_ONE_OUT}",
            expected=f"{FEWEST} or more: one for test, one for valid, one for train",
            do=f"leave them out with --min-interactions {FEWEST}, or have them in train alone with "
            "--min-interactions 1",
        )
    user = data.user[order]
    from_end = np.cumsum(counts)[user] - 1 - np.arange(len(user))
    held = (counts[user] >= FEWEST) & (from_end < 2)
    return _at(order, np.where(held, TEST - from_end, TRAIN).astype(np.int8))


def _held_out_of_train(data: Interactions, order: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    train = order[data.split[order] == TRAIN]
    if not data.in_order:
        train = train[rng.permutation(len(train))]
    _, last, counts = np.unique(data.user[train[::-1]], return_index=True, return_counts=True)
    split = data.split.copy()
    split[train[::-1][last[counts > 1]]] = VALID
    return split
