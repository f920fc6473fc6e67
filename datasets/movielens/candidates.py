"""Read leave-one-out with given candidates, as published by He et al. (Neural Collaborative Filtering, 2017).

    NAME.test.rating       user, item, rating, time (tabs): each user's pair that is left out for the test
    NAME.test.negative     (user,item), then 99 items that the user has not seen (tabs)
    NAME.train.rating      all other pairs, in the format of test.rating; or instead:
    pairs.parquet          userID, movieID as text, in the order of MovieLens's ratings.dat; user is
                           userID - 1, and items are numbered in the order in which movieIDs first appear
    movies.dat             titles (only with pairs.parquet)

Users and items are numbers from 0. The test split contains each user's candidates: the left-out pair with
label 1, then the items of test.negative with label 0. Duplicate pairs are written once, with label 1 if any
copy has label 1 (for 156 users of ML-1M, the negatives include the left-out pair).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from raytrec_datasets.interactions.candidates import is_among
from raytrec_datasets.interactions.layouts import NEGATIVE_END as NEGATIVE
from raytrec_datasets.interactions.layouts import check_same, read_negatives, read_ratings
from raytrec_datasets.movielens.layouts import movie_table
from raytrec_datasets.writing import Output, SplitWriter, progress, write_table

from raytrec.common.errors import DataError
from raytrec.config.schema import Schema

VALID_CANDIDATES = 99  # in addition to the pair left out for validation
CHUNK_ROWS = 500_000


@dataclass(frozen=True)
class Candidates:
    """Observed pairs of users and items, and the candidates of each user.

    Attributes:
        train: User and item of each pair, without the test pairs; int64 [n, 2].
        test: User → candidates; the first candidate is the left-out item.
        movies: movieID of each item; None if unknown.
        users: Number of users.
        items: Number of items.
    """

    train: np.ndarray
    test: dict[int, list[int]]
    movies: np.ndarray | None
    users: int
    items: int


def has_candidates(folder: Path) -> bool:
    """Return True if a folder contains this layout."""
    return any(folder.glob(f"*{NEGATIVE}"))


def read_candidates(folder: Path) -> Candidates:
    """Read the pairs and candidates from a folder with this layout, in which `has_candidates` is True.

    Raises:
        DataError: A file is missing or cannot be read, a line is invalid, or the files disagree.
    """
    negative = sorted(folder.glob(f"*{NEGATIVE}"))[0]
    name = negative.name.removesuffix(NEGATIVE)
    test = read_negatives(negative)
    left_out = {user: items[0] for user, items in test.items()}
    if (rated := folder / f"{name}.test.rating").is_file():
        check_same(dict(read_ratings(rated)[:, :2].tolist()), left_out, rated)
    train, movies = folder / f"{name}.train.rating", None
    if train.is_file():
        pairs = read_ratings(train)[:, :2]
    elif (folder / "pairs.parquet").is_file():
        pairs, movies = _numbered(folder / "pairs.parquet")
        pairs = _without(pairs, left_out, folder / "pairs.parquet")
    else:
        raise DataError(
            "the folder contains no training pairs",
            where=str(folder),
            expected=f"{train.name}, or pairs.parquet (userID, movieID in the order of ratings.dat)",
        )
    highest = max(int(pairs[:, 1].max()), *(max(items) for items in test.values()))
    users = max(int(pairs[:, 0].max()), *test) + 1
    return Candidates(pairs, test, movies, users, max(highest + 1, 0 if movies is None else len(movies)))


def _numbered(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the user and item of each pair, int64 [n, 2], and the movieID of each item.

    Raises:
        DataError: The file cannot be read, lacks a column, or contains a value that is not a whole number.
    """
    try:
        table = pq.read_table(path, columns=["userID", "movieID"])
        users, movies = (_read_whole_numbers(table, name) for name in ("userID", "movieID"))
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        expected = "columns userID and movieID with whole numbers"
        raise DataError(f"cannot read the file: {error}", where=str(path), expected=expected) from None
    items, known = pd.factorize(movies)  # in order of appearance
    return np.stack([users - 1, items], axis=1), known


def _read_whole_numbers(table: pa.Table, name: str) -> np.ndarray:
    """Return a column of numbers or text as int64 [n].

    Raises:
        ValueError: A value is null or not a whole number.
    """
    column = table[name].combine_chunks().cast(pa.int64())
    if column.null_count:
        raise ValueError(f"column {name} contains null")
    return column.to_numpy()


def _without(pairs: np.ndarray, left_out: dict[int, int], path: Path) -> np.ndarray:
    test = np.array(sorted(left_out.items()))
    of_test = np.isin(_key(pairs[:, 0], pairs[:, 1]), _key(test[:, 0], test[:, 1]))
    if of_test.sum() != len(test):
        raise DataError(
            f"{of_test.sum():,} pairs match the {len(test):,} left-out pairs of *{NEGATIVE}",
            where=str(path),
            expected="each left-out pair exactly once",
        )
    return pairs[~of_test]


def _key(users: np.ndarray, items: np.ndarray) -> np.ndarray:
    return (users.astype(np.int64) << 32) | items


def write_candidates(output: Output, source: Path, negatives: int, seed: int, dim: int) -> None:
    """Write a source in the layout of the module docstring as a dataset with the splits train, valid and test.

    - train: each pair, with `negatives` items drawn from the items that the user has not seen in train, in
      random order.
    - valid: one pair of each user with at least two pairs; the pair is removed from train and written with 99
      candidates that the user has never seen.
    - test: the given candidates.

    Raises:
        DataError: The source is invalid (`read_candidates`), or a user has seen all items, so that none can be drawn.
    """
    data, rng = read_candidates(source), np.random.default_rng(seed)
    order = rng.permutation(len(data.train))
    pairs = data.train[order]
    _, first = np.unique(pairs[:, 0], return_index=True)
    alone = np.bincount(pairs[:, 0], minlength=data.users)[pairs[first, 0]] < 2
    held_out = np.zeros(len(pairs), bool)
    held_out[first[~alone]] = True
    train, valid = pairs[~held_out], pairs[held_out]
    keys = np.unique(_key(train[:, 0], train[:, 1]))
    test = np.array([(user, item) for user, items in data.test.items() for item in items])
    labels = np.array([number == 0 for items in data.test.values() for number in range(len(items))])
    all_keys = np.unique(np.concatenate([_key(pairs[:, 0], pairs[:, 1]), _key(*test[labels].T)]))
    with output, progress("rows", len(train) * (1 + negatives)) as advance:
        rows = {"train": _write_train(output.partial / "train", train, keys, negatives, data.items, rng, advance)}
        wide = _with_negatives(valid, all_keys, VALID_CANDIDATES, data.items, rng)
        rows["valid"] = write_table(output.partial / "valid", _table(*wide))
        rows["test"] = write_table(output.partial / "test", _table(test, labels))
        if data.movies is not None and (source / "movies.dat").is_file():
            _titles(source, data.movies).to_parquet(output.partial / "items.parquet", index=False)
        output.finish(_schema(data, dim), rows)


def _write_train(folder, pairs, excluded, negatives, items, rng, advance) -> int:
    writer = SplitWriter(folder, _table(pairs[:0], np.empty(0, bool)).schema)
    step = max(1, CHUNK_ROWS // (1 + negatives))
    for start in range(0, len(pairs), step):
        rows, labels = _with_negatives(pairs[start : start + step], excluded, negatives, items, rng)
        mixed = rng.permutation(len(rows))
        writer.write(_table(rows[mixed], labels[mixed]))
        advance(len(rows))
    writer.close()
    return writer.rows


def _with_negatives(
    pairs: np.ndarray, excluded: np.ndarray, count: int, items: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Return each pair followed by `count` drawn pairs of the same user, and the labels.

    Args:
        pairs: User and item of each pair, int64 [n, 2].
        excluded: Sorted distinct keys of pairs that must not be drawn.
        count: Number of pairs to draw for each pair; an item may be drawn several times.
        items: Number of items from which pairs are drawn.
        rng: Random number generator.

    Returns:
        Pairs, int64 [n · (1 + count), 2], and labels, bool [n · (1 + count)].

    Raises:
        DataError: All items of a user are excluded.
    """
    users = np.repeat(pairs[:, 0], count)
    unique = np.unique(users)
    counts = np.searchsorted(excluded, (unique + 1) << 32) - np.searchsorted(excluded, unique << 32)
    if len(full := unique[counts >= items]):
        raise DataError(
            f"no item can be drawn for user {full[0]}, who has seen all {items:,} items",
            where="--negatives, or the candidates of valid",
            expected="at least one item that the user has not seen",
            do="remove the user from the source",
        )
    drawn = rng.integers(0, items, len(users))
    wrong = np.arange(len(users))
    while len(wrong := wrong[is_among(_key(users[wrong], drawn[wrong]), excluded)]):
        drawn[wrong] = rng.integers(0, items, len(wrong))
    rows = np.empty((len(pairs), 1 + count, 2), np.int64)
    rows[:, :, 0], rows[:, 0, 1] = pairs[:, :1], pairs[:, 1]
    rows[:, 1:, 1] = drawn.reshape(len(pairs), count)
    labels = np.zeros(rows.shape[:2], bool)
    labels[:, 0] = True
    return rows.reshape(-1, 2), labels.reshape(-1)


def _table(pairs: np.ndarray, labels: np.ndarray) -> pa.Table:
    columns = {"label": labels.astype(np.int8), "user_id": pairs[:, 0].astype(np.int32)}
    return pa.table(columns | {"item_id": pairs[:, 1].astype(np.int32)})


def _titles(source: Path, movies: np.ndarray) -> pd.DataFrame:
    """Return a table with item_id (in the dataset), movie_id (original), title, year and genres."""
    titles = movie_table(source / "movies.dat").set_index("item").reindex(movies).reset_index()
    titles = titles.rename(columns={"item": "movie_id"})
    titles["genres"] = titles["genres"].map(lambda names: names if isinstance(names, list) else [])
    titles["year"] = titles["year"].fillna(0).astype(int)
    titles.insert(0, "item_id", np.arange(len(titles)))
    return titles


def _schema(data: Candidates, dim: int) -> Schema:
    tables = {"user": {"rows": data.users, "dim": dim}, "item": {"rows": data.items, "dim": dim}}
    sparse = {"user_id": {"table": "user"}, "item_id": {"table": "item"}}
    return Schema.parse({"labels": ["label"], "sparse": sparse, "tables": tables}, "schema.yaml")
