"""Write ratings as interactions, of which each user's last film, or the last tenth in time, is left out for test.

The source is a set of ratings, read in chronological order, or leave-one-out with given candidates
(candidates.py), whose test pairs and candidates are kept. In the second case, sequences.parquet defines the
order of the other films, if the file exists:

    sequences.parquet      userID, and the movieIDs in chronological order (columns user, movies)
    users.dat              sex, age, occupation and zip of users, as in the set 1M
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from raytrec_datasets.interactions.events import TEST, TRAIN, InteractionBuilder, Interactions, Pairs
from raytrec_datasets.interactions.recipe import Choices, write_rows
from raytrec_datasets.interactions.sides import Side, Sides, encode
from raytrec_datasets.movielens.candidates import Candidates, has_candidates, read_candidates
from raytrec_datasets.movielens.layouts import has_ratings, movie_table, read, user_table
from raytrec_datasets.writing import Output

from raytrec.common.errors import DataError

SEQUENCES, USERS, MOVIES = "sequences.parquet", "users.dat", "movies.dat"


def write_interactions(output: Output, source: Path, chosen: Choices) -> None:
    """Write the dataset of a source as interactions.

    With chosen.negatives = 0, all films are ranked, and given candidates are ignored. Each user's last film is
    then in test if the source is in chronological order; otherwise, the given test pair is kept.

    Args:
        output: Folder of the dataset.
        source: Folder with the original files.
        chosen: Options of the command.

    Raises:
        ConfigError: See `write_rows`.
        DataError: The source is invalid, or has too few interactions or candidates (`write_rows`).
    """
    ratings = has_ratings(source) or not has_candidates(source)
    data, users, movies = _of_ratings(source) if ratings else _of_candidates(source, chosen.negatives > 0)
    sides = Sides([] if users is None else _of_users(users), [] if movies is None else _of_movies(movies))
    write_rows(output, data, chosen, sides)


def _of_ratings(source: Path) -> tuple[Interactions, pd.DataFrame | None, pd.DataFrame]:
    dataset, builder = read(source), InteractionBuilder()
    builder.add(*(pa.array(dataset.ratings[name].to_numpy()) for name in ("user", "item", "timestamp")))
    return builder.finish(str(source)), dataset.users, dataset.items


def _of_candidates(source: Path, ranked: bool) -> tuple[Interactions, pd.DataFrame | None, pd.DataFrame | None]:
    """Read the layout with candidates; keys are userID and movieID if pairs.parquet exists, else numbers."""
    layout, has_keys = read_candidates(source), (source / "pairs.parquet").is_file()
    ordered = has_keys and (source / SEQUENCES).is_file()
    test = np.array([(user, items[0]) for user, items in layout.test.items()])
    pairs = np.concatenate([layout.train, test])
    if ordered:
        pairs = _in_order(source / SEQUENCES, layout, pairs)
    keys = pairs[:, 0] * layout.items + pairs[:, 1]
    of_test = np.isin(keys, test[:, 0] * layout.items + test[:, 1])
    others = np.array([(user, item) for user, items in layout.test.items() for item in items[1:]])
    data = Interactions(
        *pairs.astype(np.int32).T,
        time=None,
        time_type=None,
        users=pa.array(np.arange(layout.users) + int(has_keys)),
        items=pa.array(_item_keys(layout)),
        split=None if ordered and not ranked else np.where(of_test, TEST, TRAIN).astype(np.int8),
        candidates=Pairs(*others.astype(np.int32).T) if ranked else None,
        in_order=ordered,
        of_all=False,
    )
    users = user_table(source / USERS) if (source / USERS).is_file() and has_keys else None
    return data, users, movie_table(source / MOVIES) if (source / MOVIES).is_file() and has_keys else None


def _item_keys(layout: Candidates) -> np.ndarray:
    """Return a key for each item: its movieID, or its number in the layout if movieIDs are unknown.

    Candidates that occur in no pair get negative keys, so that keys are unique.
    """
    if layout.movies is None:
        return np.arange(layout.items)
    return np.concatenate([layout.movies, -1 - np.arange(len(layout.movies), layout.items)])


def _in_order(path: Path, layout: Candidates, pairs: np.ndarray) -> np.ndarray:
    """Return the given pairs of users and items, int64 [n, 2], in the order of sequences.parquet.

    Raises:
        DataError: The file cannot be read or contains other pairs.
    """
    try:
        table = pq.read_table(path, columns=["user", "movies"])
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"cannot read the file: {error}", where=str(path)) from None
    lists = table["movies"].combine_chunks()
    users = np.repeat(table["user"].to_numpy().astype(np.int64) - 1, np.diff(lists.offsets.to_numpy()))
    movies = lists.flatten().to_numpy().astype(np.int64)
    order = np.argsort(layout.movies)
    places = np.minimum(np.searchsorted(layout.movies, movies, sorter=order), len(order) - 1)
    ordered = np.stack([users, order[places]], axis=1)
    same = np.array_equal(layout.movies[ordered[:, 1]], movies) and len(ordered) == len(pairs)
    if not same or not np.array_equal(*(np.sort(p[:, 0] * layout.items + p[:, 1]) for p in (ordered, pairs))):
        raise DataError(
            "the users' films differ from pairs.parquet", where=str(path), expected="the same films, in order"
        )
    return ordered


def _of_users(users: pd.DataFrame) -> list[Side]:
    keys = pa.array(users["user"].to_numpy())
    values = users.assign(zip_prefix=users["zip"].str[:2])
    names = ("age", "gender", "occupation", "zip_prefix")
    return [encode(name, keys, pa.array(values[name])) for name in names]


def _of_movies(movies: pd.DataFrame) -> list[Side]:
    """Return the features of films; titles are written only to items/."""
    movies = movies.drop_duplicates("item")
    keys, years = pa.array(movies["item"].to_numpy()), movies["year"]
    return [
        encode("release_year", keys, pa.array(years.where(years > 0).astype("Int64"))),
        encode("genres", keys, pa.array(movies["genres"], pa.list_(pa.string()))),
        Side("title", keys, pa.array(movies["title"], pa.string())),
    ]
