"""`raytrec prepare movielens --split leave-one-out`: from ratings, and with candidates as for ML-1M."""

import os
import random
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import test_movielens
from raytrec_datasets.movielens.candidates import read_candidates
from recipes import SPLITS, get_recipe_error, prepare

from raytrec.common.errors import ConfigError, DataError
from raytrec.config.schema import Schema

REAL = Path(os.environ.get("RAYTREC_ML1M", Path(__file__).parents[3] / "shared/data/ml-1m"))
USERS, ITEMS = 12, 250
LEAVE_ONE_OUT = ("--split", "leave-one-out")


def prepare_splits(source, out, *arguments):
    """Return the rows of each split with source keys in place of ids, and the rows of items/."""
    rows = prepare("movielens", out, *LEAVE_ONE_OUT, "--source", source, *arguments)
    items, users = (pq.read_table(out / name).to_pylist() for name in ("items", "users"))
    for row in (row for split in SPLITS for row in rows[split]):
        row["user"] = users[row["user"]]["user_key"]
        row["item"] = items[row["item"]]["item_key"]
        row["history"] = [items[i]["item_key"] for i in row["history"]]
    return rows, items


@pytest.mark.parametrize("layout", list(test_movielens.LAYOUTS))
def test_leave_one_out_supports_all_movielens_layouts(layout, tmp_path):
    ratings = test_movielens.make_ratings()
    (tmp_path / "in").mkdir()
    test_movielens.LAYOUTS[layout](tmp_path / "in", ratings)
    arguments = ("--negatives", 2, "--candidates", 3, "--history", 5)
    rows, items = prepare_splits(tmp_path / "in", tmp_path / "out", *arguments)
    met = {user: [i for u, i, _, t in sorted(ratings, key=lambda r: r[3]) if u == user] for user in range(1, 13)}
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


def write_source(folder, layout="pairs"):
    """Write source files; return train pairs, held-out items, candidate lists and movie ids."""
    rng, movies = random.Random(5), {item: 7 * item + 3 for item in range(ITEMS)}
    seen = {user: rng.sample(range(ITEMS), rng.randint(3, 9)) for user in range(USERS)}
    pairs = [(user, item) for user, items in seen.items() for item in items]
    # Items are numbered in the order in which they appear, and unseen ones come last.
    number = {item: n for n, item in enumerate(dict.fromkeys([i for _, i in pairs] + [*range(ITEMS)]))}
    pairs = [(user, number[item]) for user, item in pairs]
    movies = {number[item]: movie for item, movie in movies.items()}
    left = {user: number[items[rng.randrange(len(items))]] for user, items in seen.items()}
    mine = {user: {item for u, item in pairs if u == user} for user in seen}
    lists = {user: rng.sample([i for i in range(len(number)) if i not in mine[user]], 99) for user in seen}
    lists[3][17] = left[3]  # as in ML-1M
    folder.mkdir()
    (folder / "x.test.negative").write_text(
        "".join(f"({u},{left[u]})\t" + "\t".join(map(str, lists[u])) + "\n" for u in seen)
    )
    (folder / "x.test.rating").write_text("".join(f"{u}\t{left[u]}\t5\t97\n" for u in seen))
    train = [pair for pair in pairs if left[pair[0]] != pair[1]]
    if layout == "pairs":
        columns = {"userID": [str(u + 1) for u, _ in pairs], "movieID": [str(movies[i]) for _, i in pairs]}
        pq.write_table(pa.table(columns), folder / "pairs.parquet")
        lines = "".join(f"{m}::Film {m} ({1900 + i % 90})::Drama|War\n" for i, m in movies.items() if i % 4)
        (folder / "movies.dat").write_text(lines, "latin-1")
    else:
        (folder / "x.train.rating").write_text("".join(f"{u}\t{i}\t1\t9\n" for u, i in train))
    return train, left, lists, movies


def write_sequences(folder):
    """Write sequences.parquet with the pairs in random order; return the movie ids by user id."""
    pairs = pq.read_table(folder / "pairs.parquet").to_pylist()
    lists = {}
    for pair in random.Random(4).sample(pairs, len(pairs)):
        lists.setdefault(int(pair["userID"]), []).append(int(pair["movieID"]))
    pq.write_table(pa.table({"user": list(lists), "movies": list(lists.values())}), folder / "sequences.parquet")
    return lists


@pytest.mark.parametrize("ordered", [True, False])
def test_candidates_of_the_source_are_used(ordered, tmp_path):
    train, left, lists, movies = write_source(tmp_path / "in")
    order = write_sequences(tmp_path / "in") if ordered else None
    known = {int(movie) for movie in pq.read_table(tmp_path / "in/pairs.parquet")["movieID"].to_pylist()}
    movies = {n: movie if movie in known else -1 - n for n, movie in movies.items()}
    rows, _ = prepare_splits(tmp_path / "in", tmp_path / "out", "--negatives", 0, "--candidates", 4)
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


def test_zero_candidates_give_one_test_row_per_user(tmp_path):
    write_source(tmp_path / "in")
    order = write_sequences(tmp_path / "in")
    arguments = ("--candidates", 0, "--negatives", 0, "--rows", "user", "--history", 3)
    rows, _ = prepare_splits(tmp_path / "in", tmp_path / "out", *arguments)
    assert {row["user"]: row["item"] for row in rows["test"]} == {u: movies[-1] for u, movies in order.items()}
    assert all(len(row["seen"]) == len(order[row["user"]]) - 1 for row in rows["test"])
    assert {row["user"]: row["history"] for row in rows["test"]} == {u: m[-4:-1] for u, m in order.items()}


def test_movielens_supports_time_split_with_user_rows(tmp_path):
    ratings = test_movielens.make_ratings()
    (tmp_path / "in").mkdir()
    test_movielens.LAYOUTS["100k"](tmp_path / "in", ratings)
    arguments = ("--split", "time", "--rows", "user", "--negatives", 0, "--candidates", 0, "--history", 5)
    rows, _ = prepare_splits(tmp_path / "in", tmp_path / "out", *arguments)
    tenth = len(ratings) // 10
    assert [len(rows[name]) for name in ("valid", "test")] == [tenth, tenth]
    times = sorted(time for *_, time in ratings)
    assert sorted(row["time"] for row in rows["test"]) == times[-tenth:]
    assert max(row["time"] for row in rows["train"]) <= times[-2 * tenth]
    for row in rows["test"]:
        before = [item for user, item, _, t in ratings if user == row["user"] and t <= row["time"]]
        assert {*row["history"]} <= {*before} - {row["item"]}
        assert len(row["history"]) == min(5, len(before) - 1)
    wrong = ("--source", tmp_path / "in", "--split", "per-user", "--rows", "user")
    assert "--split leave-one-out or time" in get_recipe_error(ConfigError, "movielens", tmp_path / "x", *wrong)


def test_sequences_with_other_films_are_rejected(tmp_path):
    write_source(tmp_path / "in")
    lists = write_sequences(tmp_path / "in")
    lists[3][0], lists[3][1] = lists[3][1], 12345
    pq.write_table(pa.table({"user": list(lists), "movies": list(lists.values())}), tmp_path / "in/sequences.parquet")
    arguments = (*LEAVE_ONE_OUT, "--source", tmp_path / "in")
    assert "sequences.parquet" in get_recipe_error(DataError, "movielens", tmp_path / "out", *arguments)


@pytest.mark.parametrize("layout", ["pairs", "ratings"])
def test_leave_one_out_splits_have_the_expected_rows(tmp_path, layout):
    train, left, lists, movies = write_source(tmp_path / "in", layout)
    rows = prepare("movielens", tmp_path / "out", "--source", tmp_path / "in", "--negatives", 3)
    split = {name: [tuple(row.values()) for row in of_split] for name, of_split in rows.items()}
    expected = [(1, u, left[u]) for u in left] + [
        (0, u, item) for u in left for item in dict.fromkeys(lists[u]) if item != left[u]
    ]
    assert sorted(split["test"]) == sorted(expected)
    assert [row[1] for row in split["test"]] == sorted(row[1] for row in split["test"]), "groups are split"

    held = {row[1:] for row in split["valid"] if row[0]}
    learned = {row[1:] for row in split["train"] if row[0]}
    assert held | learned == set(train) and not held & learned
    assert sorted(u for u, _ in held) == sorted(left), "one row per user"
    ever = set(train) | set(left.items())
    assert all((row[1:] in ever) == bool(row[0]) for row in split["valid"])
    assert set(Counter(row[1] for row in split["valid"]).values()) == {100}
    drawn = [row[1:] for row in split["train"] if not row[0]]
    assert Counter(u for u, _ in drawn) == {u: 3 * n for u, n in Counter(u for u, _ in learned).items()}
    assert not set(drawn) & learned and all(0 <= item < ITEMS for _, item in drawn)
    assert [row[1] for row in split["train"]] != sorted(row[1] for row in split["train"]), "not shuffled"

    schema = Schema.load(tmp_path / "out/schema.yaml")
    highest = max(item for _, _, item in split["train"] + split["test"] + split["valid"])
    assert schema.labels == ["label"] and schema.tables["user"].rows == USERS
    assert highest < schema.tables["item"].rows
    if layout == "pairs":
        items = pq.read_table(tmp_path / "out/items.parquet").to_pylist()
        named = {row["item_id"]: row for row in items}
        for number, movie in movies.items():
            if number in named:
                assert named[number]["movie_id"] == movie
                assert (named[number]["title"] or "").startswith("Film" if number % 4 else "")
                assert (named[number]["genres"] == ["Drama", "War"]) == bool(number % 4)


def test_leave_one_out_is_deterministic_per_seed(tmp_path):
    write_source(tmp_path / "in")
    one, same, other = (
        prepare("movielens", tmp_path / out, "--source", tmp_path / "in", "--seed", seed)["train"]
        for out, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert one == same != other


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("x.test.negative", "(0,1)\n", "line 1 does not contain a user and candidates"),
        ("x.test.negative", "(0,1)\t2\tx\n", "line 1 does not contain a user"),
        ("x.test.negative", "", "the file contains no users"),
        ("x.test.rating", "0\t249\t5\t1\n", "the test item of user 0 is 249, but"),
        ("x.test.rating", "a\tb\n", "does not match the layout"),
        ("pairs.parquet", None, "contains no training pairs"),
        ("pairs.parquet", "no", "cannot read the file"),
    ],
)
def test_malformed_candidate_files_are_reported(tmp_path, file, text, message):
    write_source(tmp_path / "in")
    if text is None:
        (tmp_path / "in" / file).unlink()
    else:
        (tmp_path / "in" / file).write_text(text)
    error = get_recipe_error(DataError, "movielens", tmp_path / "out", "--source", tmp_path / "in")
    assert message in error and file.split(".")[0] in error


@pytest.mark.timeout(20)
def test_users_who_have_seen_all_items_are_rejected(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/x.test.negative").write_text("(0,2)\t1\n(1,0)\t1\n")
    (tmp_path / "in/x.train.rating").write_text("0\t0\t5\t1\n0\t1\t5\t2\n1\t1\t5\t1\n1\t2\t5\t2\n")
    error = get_recipe_error(DataError, "movielens", tmp_path / "out", "--source", tmp_path / "in")
    assert "no item can be drawn for user 0, who has seen all 3 items" in error


def test_pairs_without_test_items_are_rejected(tmp_path):
    write_source(tmp_path / "in")
    table = pq.read_table(tmp_path / "in/pairs.parquet")
    pq.write_table(table.slice(5), tmp_path / "in/pairs.parquet")
    error = get_recipe_error(DataError, "movielens", tmp_path / "out", "--source", tmp_path / "in")
    assert "left-out pairs of" in error


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("userID", pa.array(["1", None]), "userID contains null"),
        ("movieID", pa.array([3, None]), "movieID contains null"),
        ("userID", pa.array([1.0, None]), "userID contains null"),
        ("movieID", pa.array([3.0, 1.5]), "1.5"),
        ("userID", pa.array(["1", "1.5"]), "1.5"),
        ("movieID", pa.array(["3", ""]), "cannot read the file"),
    ],
)
def test_pairs_without_whole_numbers_are_rejected(tmp_path, column, values, message):
    write_source(tmp_path / "in")
    table = pa.table({"userID": ["1", "2"], "movieID": ["3", "4"]} | {column: values})
    pq.write_table(table, tmp_path / "in/pairs.parquet")
    with pytest.raises(DataError, match=message) as error:
        read_candidates(tmp_path / "in")
    assert "pairs.parquet" in str(error.value) and "with whole numbers" in str(error.value)


@pytest.mark.parametrize("kind", [pa.int32(), pa.float64(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_pairs_can_have_numbers_or_text(tmp_path, kind):
    write_source(tmp_path / "in")
    expected = read_candidates(tmp_path / "in")
    table = pq.read_table(tmp_path / "in/pairs.parquet")
    columns = {name: pa.array(map(int, table[name].to_pylist())) for name in table.column_names}
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        columns = {name: column.cast(pa.string()) for name, column in columns.items()}
    table = pa.table({name: column.cast(kind) for name, column in columns.items()})
    pq.write_table(table, tmp_path / "in/pairs.parquet", row_group_size=7)
    actual = read_candidates(tmp_path / "in")
    assert (actual.train == expected.train).all() and (actual.movies == expected.movies).all()


@pytest.mark.skipif(not (REAL / "ml-1m.test.negative").exists(), reason="ML-1M is not available")
def test_real_ml1m_candidates_have_expected_counts():
    data = read_candidates(REAL)
    assert (len(data.train), data.users, data.items) == (994_169, 6040, 3706)
    assert sum(len(items) < 100 for items in data.test.values()) == 156
