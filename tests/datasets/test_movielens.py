"""MovieLens recipe for small files of every layout, compared with a plain loop over the ratings."""

import hashlib
import os
import random
import sys
import zipfile
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from raytrec_datasets.movielens import layouts, recipe
from recipes import SPLITS, get_recipe_error, prepare, run_recipe

from raytrec.common.errors import ConfigError, DataError
from raytrec.config.schema import Schema
from raytrec.data.fragments import scan
from raytrec.data.read_plans import ReadPlan

REAL = Path(os.environ.get("RAYTREC_ML100K", Path(__file__).parents[3] / "shared/data/ml-100k"))
MOVIES = [(1, "Toy Story (1995)", ["Animation", "Comedy"]), (5, "Naïve, The (1950)", ["Drama"]), (9, "Untitled", [])]
MOVIES += [(i, f"Film {i} ({1900 + i})", ["Comedy"]) for i in range(20, 40)]


def make_ratings(half_stars=False, users=12):
    """Return (user, item, rating, timestamp) rows; some timestamps are equal."""
    rng = random.Random(3)
    seen = []
    for user in range(1, users + 1):
        for item in rng.sample([m[0] for m in MOVIES], 15):
            rating = rng.randint(1, 10) / 2 if half_stars else rng.randint(1, 5)
            seen.append((user, item, rating, 880_000_000 + rng.randint(0, 40) * 3600))
    rng.shuffle(seen)
    return seen


def write_100k(folder, ratings):
    genres = ["unknown", "Animation", "Comedy", "Drama", *(f"g{i}" for i in range(15))]
    (folder / "u.genre").write_text("".join(f"{g}|{i}\n" for i, g in enumerate(genres)))
    (folder / "u.data").write_text("".join(f"{u}\t{i}\t{r}\t{t}\n" for u, i, r, t in ratings))
    lines = []
    for item, title, names in MOVIES:
        date = f"01-Jan-{title[-5:-1]}" if title.endswith(")") else ""
        flags = "|".join(str(int(g in names)) for g in genres)
        lines.append(f"{item}|{title}|{date}||url|{flags}\n")
    (folder / "u.item").write_text("".join(lines), "latin-1")
    (folder / "u.user").write_text(
        "".join(f"{u}|{20 + u}|{'MF'[u % 2]}|job{u % 3}|{90000 + u}\n" for u in range(1, 13))
    )


def write_1m(folder, ratings):
    (folder / "ratings.dat").write_text("".join(f"{u}::{i}::{r}::{t}\n" for u, i, r, t in ratings))
    text = "".join(f"{i}::{title}::{'|'.join(g) or 'unknown'}\n" for i, title, g in MOVIES)
    (folder / "movies.dat").write_text(text, "latin-1")
    (folder / "users.dat").write_text(
        "".join(f"{u}::{'MF'[u % 2]}::{(u % 3) * 10}::{u % 4}::{90000 + u}\n" for u in range(1, 13))
    )


def write_csv(folder, ratings):
    lines = "".join(f"{u},{i},{r},{t}\n" for u, i, r, t in ratings)
    (folder / "ratings.csv").write_text("userId,movieId,rating,timestamp\n" + lines)
    lines = "".join(f'{i},"{title}",{"|".join(g) or "(no genres listed)"}\n' for i, title, g in MOVIES)
    (folder / "movies.csv").write_text("movieId,title,genres\n" + lines)


LAYOUTS = {"100k": write_100k, "1m": write_1m, "32m": write_csv}


def prepare_generated_ratings(folder, layout, split, history=4):
    ratings = make_ratings(half_stars=layout == "32m")
    rows = prepare_rows(folder, ratings, layout, "--split", split, "--history", history)
    return ratings, rows, Schema.load(folder / "out/schema.yaml")


def prepare_rows(folder, ratings, layout="32m", *arguments):
    """Write ratings to source/, prepare them in out/ and return the rows of each split."""
    (folder / "source").mkdir(parents=True)
    LAYOUTS[layout](folder / "source", ratings)
    return prepare("movielens", folder / "out", "--source", folder / "source", *arguments)


def get_rating(row, items):
    return row["user_id"], items[row["item_id"] - 1], row["rating"], row["timestamp"]


@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("split", ["random", "per-user", "time"])
def test_rows_histories_and_splits_match_a_plain_loop(tmp_path, layout, split):
    ratings, rows, schema = prepare_generated_ratings(tmp_path, layout, split)
    items = sorted(m[0] for m in MOVIES)
    by_split = {s: [get_rating(r, items) for r in found] for s, found in rows.items()}
    assert sorted(k for keys in by_split.values() for k in keys) == sorted(ratings)
    assert {s: len(k) for s, k in by_split.items()} == (
        {"train": 156, "valid": 12, "test": 12} if split == "per-user" else {"train": 144, "valid": 18, "test": 18}
    )
    if split == "time":
        assert max(k[3] for k in by_split["train"]) <= min(k[3] for k in by_split["valid"])
        assert max(k[3] for k in by_split["valid"]) <= min(k[3] for k in by_split["test"])
    if split == "per-user":
        for user in range(1, 13):
            last = max(t for u, _, _, t in ratings if u == user)
            assert [k[3] for k in by_split["test"] if k[0] == user] == [last]

    known = ratings if split == "time" else by_split["train"]
    for found in rows.values():
        for row in found:
            user, item, rating, when = get_rating(row, items)
            assert row["label"] == (rating >= 4)
            liked = [(t, items.index(i) + 1) for u, i, r, t in known if u == user and r >= 4 and t < when]
            assert row["history"] == [i for _, i in sorted(liked)][-4:], "history differs from the earlier known likes"
            genres = dict((m[0], m[2]) for m in MOVIES)[item]
            assert len(row["genres"]) == max(len(genres), layout == "1m")
            assert (row["hour"], row["weekday"]) == ((when // 3600) % 24, (when // 86400 + 3) % 7)
    assert ("age" in schema.sparse) == (layout != "32m")
    assert schema.sparse["history"].table == schema.sparse["item_id"].table
    assert schema.sparse["genres"].pooling == "mean"
    for s in rows:
        data = scan(str(tmp_path / "out" / s), ReadPlan(schema))
        assert data.rows == len(rows[s]) and not data.suspect_groups, "an id exceeds its table"


@pytest.mark.parametrize("split", ["random", "per-user", "time"])
def test_held_out_labels_are_not_inputs(tmp_path, split, monkeypatch):
    """Turning every held-out rating into its opposite must change no input of any row.

    With the split by time, only the ratings of test are turned, and may change the histories of later rows of test.
    """
    monkeypatch.setattr(recipe, "CHUNK_ROWS", 37)
    ratings, before, _ = prepare_generated_ratings(tmp_path / "a", "32m", split, history=20)
    items, turned_splits = sorted(m[0] for m in MOVIES), SPLITS[2:] if split == "time" else SPLITS[1:]
    held_out = {get_rating(row, items) for s in turned_splits for row in before[s]}
    turned = [(u, i, (1 if r >= 4 else 5) if (u, i, r, t) in held_out else r, t) for u, i, r, t in ratings]
    after = prepare_rows(tmp_path / "b", turned, "32m", "--split", split)
    for name in SPLITS:
        for a, b in zip(before[name], after[name], strict=True):
            assert (a["label"] == b["label"]) == (name not in turned_splits)
            may_differ = {"history", "rated_values"} if split == "time" and name == "test" else set()
            assert {key for key in a if a[key] != b[key]} <= {"label", "rating"} | may_differ
    assert max(len(row["history"]) for row in before["test"]) > 1


def test_small_datasets_have_small_row_groups(tmp_path):
    rows = prepare_rows(tmp_path, make_ratings(users=400))
    meta = pq.read_metadata(tmp_path / "out/train/part-00000.parquet")
    assert [meta.row_group(i).num_rows for i in range(2)] == [4096, len(rows["train"]) - 4096]


def test_empty_genres_are_ignored(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "MOVIES", [*MOVIES, (41, "Nameless", [""])])
    prepare_rows(tmp_path, make_ratings())
    assert "genres: {rows: 4, dim: 16}" in (tmp_path / "out/schema.yaml").read_text()


def test_films_without_a_date_have_year_zero(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "MOVIES", [(item, "Film", genres) for item, _, genres in MOVIES])
    rows = prepare_rows(tmp_path, make_ratings(), "100k")
    assert {row["release_year"] for row in rows["train"]} == {0}


def append(path, text):
    path.write_text(path.read_text() + text)


@pytest.mark.parametrize(
    "layout,break_it,message",
    [
        ("100k", lambda d: (d / "u.item").unlink(), "u.item is missing"),
        ("100k", lambda d: (d / "u.data").unlink(), "no MovieLens files found"),
        ("100k", lambda d: (d / "u.user").write_text("1|2|3\n"), "line 1 has 3 fields"),
        ("100k", lambda d: append(d / "u.user", "\n13|x|M|job|90000\n"), "field 2 of line 14 is 'x'"),
        ("100k", lambda d: (d / "u.data").write_text("1\t2\tx\t4\n"), "cannot parse"),
        ("1m", lambda d: (d / "movies.dat").write_text("x::Film::Comedy\n"), "field 1 of line 1 is 'x'"),
        ("32m", lambda d: append(d / "ratings.csv", ",1,5.0,880000000\n"), "a field is empty"),
        # milliseconds would mix the users' histories
        ("32m", lambda d: append(d / "ratings.csv", "2,1,5.0,880000000000\n"), "seconds since 1970"),
    ],
)
def test_broken_movielens_sources_are_reported(tmp_path, layout, break_it, message):
    LAYOUTS[layout](tmp_path, make_ratings())
    break_it(tmp_path)
    error = get_recipe_error(DataError, "movielens", tmp_path / "out", "--source", tmp_path)
    assert message in error and str(tmp_path) in error


def test_movielens_requires_a_source_or_download(tmp_path):
    assert "no data source was given" in get_recipe_error(ConfigError, "movielens", tmp_path / "out")
    missing = ["--source", tmp_path, "--split", "leave-one-out"]
    assert "no MovieLens files found" in get_recipe_error(DataError, "movielens", tmp_path / "out", *missing)


def serve_archive(tmp_path, name, files):
    """Write an archive of these files; return the URL of its folder and the MD5 of the archive."""
    server = tmp_path / "server"
    server.mkdir()
    with zipfile.ZipFile(server / name, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
    return server.as_uri() + "/", hashlib.md5((server / name).read_bytes()).hexdigest()


def test_download_verifies_and_extracts(tmp_path, capsys):
    files = {"ml-100k/README": "the licence", "ml-100k/u.data": "1\t1\t5\t1\n", "../outside": "must not leave"}
    (base, md5), cache = serve_archive(tmp_path, "ml-100k.zip", files), tmp_path / "cache"
    with pytest.raises(DataError, match="checksum"):
        layouts.fetch("100k", cache, base=base)
    assert not list(cache.iterdir())
    assert layouts.fetch("100k", cache, base=base, md5=md5) == cache / "ml-100k"
    assert "the licence" in capsys.readouterr().err
    assert not (tmp_path / "outside").exists() and (cache / "ml-100k/u.data").exists()
    with pytest.raises(DataError, match="cannot download"):
        layouts.fetch("1m", cache, base=base)


def test_interrupted_extraction_does_not_look_complete(tmp_path, monkeypatch):
    files = {"ml-25m/ratings.csv": "", "ml-25m/movies.csv": ""}
    arguments = ("25m", tmp_path / "cache", *serve_archive(tmp_path, "ml-25m.zip", files))

    def interrupted(self, path):
        self.extract("ml-25m/ratings.csv", path)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(zipfile.ZipFile, "extractall", interrupted)
        layouts.fetch(*arguments)
    assert not (tmp_path / "cache/ml-25m").exists()
    assert (layouts.fetch(*arguments) / "movies.csv").is_file()
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["ml-25m"]


def test_download_cache_is_separate_from_the_output(tmp_path, monkeypatch):
    """Users may choose --out data/movielens, which must not clash with the download cache."""

    def fetch(name, folder):
        (folder / name).mkdir(parents=True)
        write_csv(folder / name, make_ratings())
        return folder / name

    monkeypatch.setattr(recipe, "fetch", fetch)
    assert prepare("movielens", tmp_path / "movielens", "--download", "25m")["train"]


@pytest.mark.skipif(not REAL.is_dir(), reason="MovieLens-100K is not available (set RAYTREC_ML100K)")
def test_real_100k_has_expected_counts(tmp_path):
    assert run_recipe("movielens", "--source", REAL, "--out", tmp_path / "out").exit_code == 0
    rows = {split: pq.read_table(tmp_path / "out" / split) for split in SPLITS}
    assert {s: len(t) for s, t in rows.items()} == {"train": 80_000, "valid": 10_000, "test": 10_000}
    tables = Schema.load(tmp_path / "out/schema.yaml").tables
    assert (tables["user"].rows, tables["item"].rows, tables["genres"].rows) == (944, 1683, 20)
    assert sum(int(t["label"].to_numpy().sum()) for t in rows.values()) == 55_375
