"""`raytrec prepare movielens --split leave-one-out`: of ratings, of given candidates; with side features."""

import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import test_candidates
import test_movielens
from raytrec_datasets import app
from typer.testing import CliRunner

from raytrec.common.errors import DataError
from raytrec.config.schema import Schema

SPLITS = ("train", "valid", "test")


def run(source, out, *arguments):
    command = ["movielens", "--split", "leave-one-out", "--source", source, "--out", out, *arguments]
    return CliRunner().invoke(app, list(map(str, command)))


def prepared(source, out, *arguments):
    """{split: rows}, userIDs and movieIDs in place of ids; and the rows of items/."""
    result = run(source, out, *arguments)
    assert result.exit_code == 0, result.exception
    items, users = (pq.read_table(out / name).to_pylist() for name in ("items", "users"))
    rows = {split: pq.read_table(out / split).to_pylist() for split in SPLITS}
    for row in (row for split in SPLITS for row in rows[split]):
        row["user"] = users[row["user"]]["user_key"]
        row["item"] = items[row["item"]]["item_key"]
        row["history"] = [items[i]["item_key"] for i in row["history"]]
    return rows, items


@pytest.mark.parametrize("layout", list(test_movielens.LAYOUTS))
def test_ratings_of_any_set(layout, tmp_path):
    ratings = test_movielens.make_ratings()
    (tmp_path / "in").mkdir()
    test_movielens.LAYOUTS[layout](tmp_path / "in", ratings)
    arguments = ("--negatives", 2, "--candidates", 3, "--history", 5)
    rows, items = prepared(tmp_path / "in", tmp_path / "out", *arguments)
    met = {
        user: [i for u, i, _, t in sorted(ratings, key=lambda r: r[3]) if u == user] for user in range(1, 13)
    }
    when = {(user, item): t for user, item, _, t in ratings}
    for split, place in (("valid", -2), ("test", -1)):
        assert len(rows[split]) == 12 * 4
        for row in rows[split]:
            assert (row["item"] in met[row["user"]]) == bool(row["label"])
            if row["label"]:
                last = when[row["user"], met[row["user"]][place]]
                assert when[row["user"], row["item"]] == last == row["time"] >= max(row["history_time"])
                assert len(row["history"]) == 5
    assert len(rows["train"]) == 3 * 12 * 13 and sum(row["label"] for row in rows["train"]) == 12 * 13
    films = {item: (title, genres) for item, title, genres in test_movielens.MOVIES}
    for row in items:
        assert row["title"] == films[row["item_key"]][0]
        assert len(row["genres"]) == max(len(films[row["item_key"]][1]), layout == "1m")
    by_key = {row["item_key"]: row for row in items}
    for row in (row for split in SPLITS for row in rows[split]):
        assert row["release_year"] == by_key[row["item"]]["release_year"]
        assert layout == "32m" or row["gender"] == 2 - row["user"] % 2  # F, M
    schema = Schema.load(tmp_path / "out/schema.yaml")
    assert {"release_year", "genres"} <= set(schema.sparse) and "title" not in schema.sparse


def sequences(folder):
    """sequences.parquet of the pairs of a folder, each user's in a separate order; {userID: movieIDs}."""
    pairs = pq.read_table(folder / "pairs.parquet").to_pylist()
    lists = {}
    for pair in random.Random(4).sample(pairs, len(pairs)):
        lists.setdefault(int(pair["userID"]), []).append(int(pair["movieID"]))
    pq.write_table(
        pa.table({"user": list(lists), "movies": list(lists.values())}), folder / "sequences.parquet"
    )
    return lists


@pytest.mark.parametrize("ordered", [True, False])
def test_given_candidates(ordered, tmp_path):
    train, left, lists, movies = test_candidates.original(tmp_path / "in")
    order = sequences(tmp_path / "in") if ordered else None
    known = {int(movie) for movie in pq.read_table(tmp_path / "in/pairs.parquet")["movieID"].to_pylist()}
    movies = {n: movie if movie in known else -1 - n for n, movie in movies.items()}
    rows, _ = prepared(tmp_path / "in", tmp_path / "out", "--negatives", 0, "--candidates", 4)
    for user, item in left.items():
        group = [(row["item"], row["label"]) for row in rows["test"] if row["user"] == user + 1]
        others = {(movies[i], 0) for i in lists[user] if i != item}
        assert group[0] == (movies[item], 1) and sorted(group[1:]) == sorted(others)
        before = [movies[i] for u, i in train if u == user]
        history = next(row["history"] for row in rows["test"] if row["user"] == user + 1)
        assert sorted(history) == sorted(before)
        if ordered:
            assert history == [movie for movie in order[user + 1] if movie != movies[item]]
            held = [row["item"] for row in rows["valid"] if row["user"] == user + 1 and row["label"]]
            assert held == history[-1:]
    assert sum(row["label"] for row in rows["train"]) == len(rows["train"]) == len(train) - len(left)


def test_all_films_are_ranked_for_the_last_one(tmp_path):
    test_candidates.original(tmp_path / "in")
    order = sequences(tmp_path / "in")
    arguments = ("--candidates", 0, "--negatives", 0, "--rows", "user", "--history", 3)
    rows, _ = prepared(tmp_path / "in", tmp_path / "out", *arguments)
    assert {row["user"]: row["item"] for row in rows["test"]} == {
        u: movies[-1] for u, movies in order.items()
    }
    assert all(len(row["seen"]) == len(order[row["user"]]) - 1 for row in rows["test"])
    assert {row["user"]: row["history"] for row in rows["test"]} == {u: m[-4:-1] for u, m in order.items()}


def test_sequences_of_other_films_are_refused(tmp_path):
    test_candidates.original(tmp_path / "in")
    lists = sequences(tmp_path / "in")
    lists[3][0], lists[3][1] = lists[3][1], 12345
    pq.write_table(
        pa.table({"user": list(lists), "movies": list(lists.values())}), tmp_path / "in/sequences.parquet"
    )
    result = run(tmp_path / "in", tmp_path / "out")
    assert isinstance(result.exception, DataError) and "sequences.parquet" in str(result.exception)
