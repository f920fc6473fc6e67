"""Write MovieLens ratings as rows with the items that the user liked earlier."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
from raytrec_datasets.interactions.events import BY_TIME
from raytrec_datasets.interactions.recipe import Choices, choose_example_job
from raytrec_datasets.interactions.rows import slices
from raytrec_datasets.movielens.candidates import has_candidates, write_candidates
from raytrec_datasets.movielens.interactions import write_interactions
from raytrec_datasets.movielens.layouts import TIME_BITS, MovieLens, fetch, has_ratings, read
from raytrec_datasets.writing import SPLITS, Output, SplitWriter, progress

from raytrec.common.errors import ConfigError
from raytrec.config.schema import Schema

LIKED = 4.0  # minimum rating of a liked item
CHUNK_ROWS = 500_000
SPLIT_OF = {"leave-one-out": None, "time": BY_TIME}  # --split → Choices.split


def write(
    out: Path,
    source: Path | None,
    split: str,
    seed: int,
    history: int,
    dim: int,
    download: str | None,
    force: bool,
    negatives: int = 4,
    candidates: int = 99,
    rows: str = "each",
    with_valid: bool = False,
) -> None:
    """Write the dataset; the arguments are those of `raytrec prepare movielens`.

    Raises:
        ConfigError: There is neither a source nor a set to download, options contradict each other, or the output
            folder cannot be replaced (`Output.is_ready`).
        DataError: The download fails, or the source is invalid.
    """
    if source is None and download is None:
        raise ConfigError("no data source was given", expected="--source DIR, or --download 100k, 1m, 20m, 25m or 32m")
    if download:
        source = fetch(download, (source or out.absolute().parent / "movielens-original").expanduser())
    source = source.expanduser().absolute()
    if split == "leave-one-out" or rows == "user":
        if split not in SPLIT_OF:
            raise ConfigError(
                "rows of whole users require a split in time",
                where=f"--split {split} --rows user",
                expected=f"--split {' or '.join(SPLIT_OF)}",
            )
        chosen = Choices(SPLIT_OF[split], candidates, negatives, history, rows, None, seed, dim, with_valid)
        chosen.check("--history", "--negatives")
        output = Output(out, "movielens", {**asdict(chosen), "source": str(source), "split": split}, force)
        if not output.is_ready():
            write_interactions(output, source, chosen)
        return output.summary(*choose_example_job(output.folder, chosen))
    if has_candidates(source) and not has_ratings(source):
        options = {"source": str(source), "layout": "candidates", "negatives": negatives, "seed": seed, "dim": dim}
        output = Output(out, "movielens", options, force)
        if not output.is_ready():
            write_candidates(output, source, negatives, seed, dim)
        return output.summary("ml1m")
    options = {"source": str(source), "split": split, "seed": seed, "history": history, "dim": dim}
    output = Output(out, "movielens", options, force)
    if not output.is_ready():
        ratings = Ratings(read(source), split, seed, history)
        with output, progress("ratings", len(ratings)) as advance:
            rows = {name: ratings.write(output.partial / name, i, advance) for i, name in enumerate(SPLITS)}
            ratings.items().to_parquet(output.partial / "items.parquet", index=False)
            output.finish(ratings.schema(dim), rows)
    return output.summary("movielens")


def split_of(ratings: pd.DataFrame, split: str, rng: np.random.Generator) -> np.ndarray:
    """Return 0 (train), 1 (valid) or 2 (test) for each rating, int8 [n]. `rng` is only used by random.

    - random: 80/10/10 by a seeded permutation.
    - per-user: the last tenth of each user's ratings in time is test, and the tenth before is valid.
    - time: the last tenth of all ratings in time is test, and the tenth before is valid.
    """
    rows = len(ratings)
    if split == "random":
        position, count = rng.permutation(rows), np.full(rows, rows)
    else:
        keys = (ratings["item"], ratings["timestamp"]) + ((ratings["user"],) if split == "per-user" else ())
        order = np.lexsort(keys)
        position = np.empty(rows, np.int64)
        if split == "time":
            position[order], count = np.arange(rows), np.full(rows, rows)
        else:
            _, user, per_user = np.unique(ratings["user"], return_inverse=True, return_counts=True)
            first = np.cumsum(per_user) - per_user
            position[order] = np.arange(rows) - first[user[order]]
            count = per_user[user]
    from_end = count - 1 - position
    return np.where(from_end < count // 10, 2, np.where(from_end < 2 * (count // 10), 1, 0)).astype(np.int8)


class Ratings:
    """Ratings with vocabularies, splits and histories.

    Ids are positions in sorted vocabularies, from 1; id 0 stands for unknown values. The hour (0 to 23) and the weekday
    (0 to 6) are their own ids. A history contains the user's last `history` liked items in train with a timestamp
    strictly before the row's own. `rated` contains all rated items instead, with their ratings (`rated_values`) and
    timestamps (`rated_times`). Neither the row's own label nor any label in valid or test is ever an input. Exception:
    with the split by time, histories also contain the earlier ratings of valid and test, because these ratings are
    known at the time of the row.

    Args:
        data: Ratings of a set.
        split: Method of `split_of`.
        seed: Seed of the split and of the order of the rows.
        history: Maximum number of ids in a history.
    """

    def __init__(self, data: MovieLens, split: str, seed: int, history: int):
        rng = np.random.default_rng(seed)
        frame = data.ratings
        self._data, self._history = data, history
        self._split = split_of(frame, split, rng)
        self._order = rng.permutation(len(frame))
        self._user_ids = np.unique(frame["user"])
        self._items = data.items.sort_values("item").drop_duplicates("item").reset_index(drop=True)
        self._user = _index(self._user_ids, frame["user"])
        self._item = _index(self._items["item"].to_numpy(), frame["item"])
        self._rating, self._time = frame["rating"].to_numpy(), frame["timestamp"].to_numpy()
        self._years = np.unique(self._items["year"][self._items["year"] > 0])
        self._genres = sorted({genre for genres in self._items["genres"] for genre in genres})
        self._bags = _bags(self._items["genres"], self._genres)
        self._of_item = np.concatenate([[0], _index(self._years, self._items["year"])])
        self._of_user = self._user_attributes()
        known = np.full(len(frame), True) if split == "time" else self._split == 0
        self._likes = self._sort_by_user_and_time(known & (self._rating >= LIKED))
        self._rated = self._sort_by_user_and_time(known)

    def __len__(self) -> int:
        return len(self._rating)

    def _user_attributes(self) -> dict[str, np.ndarray]:
        """Return the ids (0: unknown) of each attribute by user index; {} if the dataset has no user attributes."""
        if self._data.users is None:
            return {}
        users = self._data.users.assign(zip_prefix=self._data.users["zip"].str[:2]).set_index("user")
        users = users.reindex(self._user_ids)
        out = {}
        for name in ("age", "gender", "occupation", "zip_prefix"):
            codes, _ = pd.factorize(users[name], sort=True)
            out[name] = np.concatenate([[0], codes + 1])
        return out

    def _sort_by_user_and_time(self, kept: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return keys and indices of the ratings in a mask, sorted by user and time."""
        kept = np.flatnonzero(kept)
        kept = kept[np.lexsort((self._item[kept], self._time[kept], self._user[kept]))]
        # User and time share one sort key, with the user in the high bits and the time in the low bits.
        return (self._user[kept] << TIME_BITS) + self._time[kept], kept

    def histories(self, rows: np.ndarray, index: tuple[np.ndarray, np.ndarray], *values: np.ndarray) -> list:
        """Return lists of values of the user's last `history` ratings in an index, strictly before each rating.

        Args:
            rows: Indices of the ratings, int64 [n].
            index: Ratings to list (`_sort_by_user_and_time`).
            *values: Values of all ratings.

        Returns:
            A list array for each of `values`, oldest first.
        """
        keys, ratings = index
        first = np.searchsorted(keys, self._user[rows] << TIME_BITS)
        end = np.searchsorted(keys, (self._user[rows] << TIME_BITS) + self._time[rows], side="left")
        start = np.maximum(first, end - self._history)
        return [slices(value[ratings], start, end - start) for value in values]

    def table(self, rows: np.ndarray) -> pa.Table:
        """Return the ratings at the indices `rows`, int64 [n], as rows of the dataset."""
        user, item, when = self._user[rows], self._item[rows], self._time[rows]
        lengths, genres = self._bags
        starts = np.cumsum(lengths) - lengths
        rated = self.histories(rows, self._rated, self._item, self._rating, self._time)
        columns = {
            "label": (self._rating[rows] >= LIKED).astype(np.int8),
            "user_id": user,
            "item_id": item,
            **{name: ids[user] for name, ids in self._of_user.items()},
            "release_year": self._of_item[item],
            "genres": slices(genres, starts[item], lengths[item]),
            "hour": when // 3600 % 24,
            "weekday": (when // 86400 + 3) % 7,  # 1970-01-01 was a Thursday; 0 is Monday
            "history": self.histories(rows, self._likes, self._item)[0],
            **dict(zip(("rated", "rated_values", "rated_times"), rated, strict=True)),
            "rating": self._rating[rows],
            "timestamp": when,
        }
        return pa.table(columns)

    def write(self, folder: Path, split: int, advance) -> int:
        """Write a split (0, 1 or 2, as in `split_of`) in seeded random order, and return the number of rows.

        `advance` is called with the number of rows of each chunk that has been written.
        """
        rows = self._order[self._split[self._order] == split]
        group = 4_096 if len(self) < 1_000_000 else 16_384
        writer = SplitWriter(folder, self.table(rows[:0]).schema, group_rows=group)
        for start in range(0, len(rows), CHUNK_ROWS):
            part = rows[start : start + CHUNK_ROWS]
            writer.write(self.table(part))
            advance(len(part))
        writer.close()
        return len(rows)

    def items(self) -> pd.DataFrame:
        """Return a table with item_id (in the dataset), movie_id (original), title, year and genres."""
        items = self._items.rename(columns={"item": "movie_id"})
        items.insert(0, "item_id", np.arange(1, len(items) + 1))
        return items

    def schema(self, dim: int) -> Schema:
        """Return the schema of the dataset, in which history shares the table of items."""
        rows = {"user_id": len(self._user_ids) + 1, "item_id": len(self._items) + 1}
        rows |= {name: int(ids.max()) + 1 for name, ids in self._of_user.items()}
        rows |= {"release_year": len(self._years) + 1, "genres": len(self._genres) + 1, "hour": 24, "weekday": 7}
        sparse = {name: {"table": name.removesuffix("_id")} for name in rows}
        sparse["genres"]["pooling"] = "mean"
        sparse["history"] = {"table": "item", "pooling": "sequence"}
        tables = {name.removesuffix("_id"): {"rows": count, "dim": dim} for name, count in rows.items()}
        return Schema.parse({"labels": ["label"], "sparse": sparse, "tables": tables}, "schema.yaml")


def _index(vocabulary: np.ndarray, values) -> np.ndarray:
    """Return the position of each value in a sorted vocabulary, from 1, or 0 if missing; int64 [n]."""
    values = np.asarray(values)
    return np.where(np.isin(values, vocabulary), np.searchsorted(vocabulary, values) + 1, 0).astype(np.int64)


def _bags(genres: pd.Series, names: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return (lengths, ids) of the items' genres; item 0 (unknown) has no genres."""
    code = {name: i + 1 for i, name in enumerate(names)}
    lengths = np.array([0, *(len(g) for g in genres)], dtype=np.int64)
    return lengths, np.array([code[name] for g in genres for name in g], dtype=np.int64)
