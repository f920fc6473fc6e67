"""Draw candidates, or read them from a file. Each test user's items are ranked among the candidates.

FILE.parquet      a column of users and a column of items or lists of items, named as in the source
FILE.txt          a user and items in each line, like NAME_sample.txt of S3-Rec
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
from raytrec_datasets.interactions import tables
from raytrec_datasets.interactions.events import Columns, InteractionBuilder, Pairs

from raytrec.common.errors import ConfigError, DataError

ROUNDS = 30  # number of rounds that redraw rejected items; remaining entries draw from a list of the new items


def is_among(keys: np.ndarray, sorted_keys: np.ndarray) -> np.ndarray:
    """Return True for each key that is in `sorted_keys`, bool [n]."""
    if not len(sorted_keys):
        return np.zeros(len(keys), bool)
    return sorted_keys[np.minimum(np.searchsorted(sorted_keys, keys), len(sorted_keys) - 1)] == keys


def draw_unmet(users: np.ndarray, count: int, items: int, met: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draw `count` distinct items that are new to the user, for each entry of `users`; int64 [n, count].

    Args:
        users: User of each entry, int [n]; a user may occur several times.
        count: Number of items to draw for each entry.
        items: Number of all items; items are drawn from [0, items).
        met: Sorted keys, user · items + item, of all known interactions; int64.
        rng: Random number generator.

    Raises:
        DataError: Fewer than `count` items are new to a user.
    """
    users = users.astype(np.int64)
    _check_enough(users, count, items, met)
    drawn = rng.integers(0, items, (len(users), count))
    open_ = np.arange(len(users))
    for _ in range(ROUNDS):
        wrong = _wrong(users[open_], drawn[open_], items, met)
        open_, wrong = open_[wrong.any(axis=1)], wrong[wrong.any(axis=1)]
        if not len(open_):
            return drawn
        again = drawn[open_]
        again[wrong] = rng.integers(0, items, int(wrong.sum()))
        drawn[open_] = again
    for row in open_[_wrong(users[open_], drawn[open_], items, met).any(axis=1)]:
        first, end = np.searchsorted(met, [users[row] * items, (users[row] + 1) * items])
        unmet = np.setdiff1d(np.arange(items), met[first:end] - users[row] * items)
        drawn[row] = rng.choice(unmet, count, replace=False)
    return drawn


def _wrong(users: np.ndarray, drawn: np.ndarray, items: int, met: np.ndarray) -> np.ndarray:
    """Return True for each drawn item that is not new to the user or occurs earlier in the row; bool [n, count]."""
    wrong = is_among((users[:, None] * items + drawn).ravel(), met).reshape(drawn.shape)
    order = np.argsort(drawn, axis=1, kind="stable")
    rising = np.take_along_axis(drawn, order, axis=1)
    twice = np.zeros_like(wrong)
    np.put_along_axis(twice, order[:, 1:], rising[:, 1:] == rising[:, :-1], axis=1)
    return wrong | twice


def _check_enough(users: np.ndarray, count: int, items: int, met: np.ndarray) -> None:
    unique = np.unique(users)
    counts = np.searchsorted(met, (unique + 1) * items) - np.searchsorted(met, unique * items)
    if len(unique) and counts.max() + count > items:
        remaining = items - int(counts.max())
        raise DataError(
            f"cannot draw {count} new items for each user: a user has interacted with all but {remaining} of {items:,}",
            where="--negatives, --train-negatives or, in prepare movielens, --candidates, --negatives",
            expected=f"at most {remaining} drawn items per user",
            do=f"lower the option whose value is {count}",
        )


def read_candidates(path: Path, builder: InteractionBuilder, columns: Columns) -> Pairs:
    """Read the candidates in a file, as ids of a source that has already been read.

    Users that are not in the source are skipped. Items that are not in the source get new ids.

    Args:
        path: Parquet or text file.
        builder: Builder that contains all interactions of the source; its vocabulary of items receives the new items.
        columns: Names of the columns of users and items, for Parquet.

    Raises:
        ConfigError: The format is unknown, or a column is missing or has an unsupported type.
        DataError: The file does not exist or cannot be read, a line or row is invalid, the keys cannot be converted to
            the types in the source, or no user occurs in the source.
    """
    users, items = [], []
    kinds = builder.users.keys.type, builder.items.keys.type
    for user_keys, item_keys, _ in _parts(path, columns):
        try:
            user_keys, item_keys = user_keys.cast(kinds[0]), item_keys.cast(kinds[1])
        except pa.ArrowInvalid as error:
            raise DataError(
                f"the user or item keys cannot be converted to the types in the source: {error}",
                where=f"--candidates {path}",
                expected=f"users of type {kinds[0]} and items of type {kinds[1]}, as in the source",
                do="use the same keys in both files",
            ) from None
        user = builder.users.known_ids(user_keys)
        users.append(user[user >= 0])
        items.append(builder.items.ids(item_keys.filter(pa.array(user >= 0))))
    if not sum(map(len, users)):
        raise DataError("none of the users in the file occurs in the source", where=f"--candidates {path}")
    return Pairs(np.concatenate(users), np.concatenate(items))


def _parts(path: Path, columns: Columns) -> Iterator[tables.Batch]:
    if not path.is_file():
        raise DataError("the file does not exist", where=f"--candidates {path}")
    if tables.suffix_of(path) not in (".parquet", ".txt"):
        raise ConfigError(
            f"unknown format of candidates: {path.name}",
            where="--candidates",
            expected="FILE.parquet, or FILE.txt with a user and items in each line",
        )
    return tables.batches(path, Columns(columns.user, columns.item))
