"""Synthetic users, items and people in the layouts of the original data, for `make quality-smoke`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

USERS, ITEMS, EACH = 60, 150, 30


def write_sources(folder: Path) -> None:
    """Write ml-100k/, ml-1m/, toys/ and adult/ into a folder."""
    rng = np.random.default_rng(0)
    lists = [rng.permutation(ITEMS)[:EACH] for _ in range(USERS)]
    for name, write in (("ml-100k", _ml100k), ("ml-1m", _ml1m), ("toys", _toys), ("adult", _adult)):
        (folder / name).mkdir()
        write(folder / name, lists, rng)


def _ml100k(folder: Path, lists: list[np.ndarray], rng: np.random.Generator) -> None:
    genres = [f"genre {n}" for n in range(19)]
    (folder / "u.genre").write_text("".join(f"{name}|{n}\n" for n, name in enumerate(genres)))
    lines = [
        f"{user + 1}\t{item + 1}\t{rng.integers(1, 6)}\t{880_000_000 + rng.integers(10**6)}\n"
        for user, items in enumerate(lists)
        for item in items
    ]
    (folder / "u.data").write_text("".join(lines))
    flags = ["|".join(str(int(n == item % 19)) for n in range(19)) for item in range(ITEMS)]
    lines = [f"{item + 1}|Film (1990)|01-Jan-1990||url|{flags[item]}\n" for item in range(ITEMS)]
    (folder / "u.item").write_text("".join(lines))
    lines = [f"{user + 1}|{20 + user}|{'MF'[user % 2]}|job|90210\n" for user in range(USERS)]
    (folder / "u.user").write_text("".join(lines))


def _ml1m(folder: Path, lists: list[np.ndarray], rng: np.random.Generator) -> None:
    """Write synthetic MovieLens-1M pairs without ratings and times, in the layout of movielens/candidates.py."""
    number: dict[int, int] = {}
    for item in np.concatenate(lists):
        number.setdefault(int(item), len(number))
    pairs = [(user, int(item) + 1) for user, items in enumerate(lists) for item in items]
    columns = {"userID": [str(user + 1) for user, _ in pairs], "movieID": [str(movie) for _, movie in pairs]}
    pq.write_table(pa.table(columns), folder / "pairs.parquet")
    movies = [items + 1 for items in lists]
    pq.write_table(pa.table({"user": range(1, USERS + 1), "movies": movies}), folder / "sequences.parquet")
    last = [number[int(items[-1])] for items in lists]
    unmet = [sorted(set(number.values()) - {number[int(i)] for i in items}) for items in lists]
    lines = [
        f"({user},{last[user]})\t" + "\t".join(map(str, rng.choice(unmet[user], 99, replace=False))) + "\n"
        for user in range(USERS)
    ]
    (folder / "ml-1m.test.negative").write_text("".join(lines))
    (folder / "ml-1m.test.rating").write_text("".join(f"{u}\t{i}\t5\t1\n" for u, i in enumerate(last)))
    lines = [f"{movie}::Film {movie} (1990)::Drama|War\n" for movie in range(1, ITEMS + 1)]
    (folder / "movies.dat").write_text("".join(lines))
    lines = [f"{user + 1}::{'MF'[user % 2]}::25::{user % 20}::90210\n" for user in range(USERS)]
    (folder / "users.dat").write_text("".join(lines))


def _toys(folder: Path, lists: list[np.ndarray], rng: np.random.Generator) -> None:
    lines = [f"{user + 1} {' '.join(str(item + 1) for item in items[:9])}\n" for user, items in enumerate(lists)]
    (folder / "Toys_and_Games.txt").write_text("".join(lines))


def _adult(folder: Path, lists: list[np.ndarray], rng: np.random.Generator) -> None:
    married = ("Never-married", "Divorced")
    for name, people in (("adult.data", 400), ("adult.test", 100)):
        lines = [
            f"{rng.integers(17, 90)}, Private, {n}, HS-grad, {rng.integers(1, 17)}, {married[n % 2]}, Sales, "
            f"Wife, White, Male, 0, 0, {rng.integers(1, 99)}, Cuba, {('<=50K', '>50K')[n // 2 % 2]}"
            for n in range(people)
        ]
        (folder / name).write_text("\n".join(lines))
