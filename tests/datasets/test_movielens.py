"""Every layout, made here in miniature; histories and splits against a plain loop over the ratings."""

import hashlib
import os
import random
import zipfile
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from raytrec_datasets import app
from raytrec_datasets.movielens import download
from typer.testing import CliRunner

from raytrec.common.errors import ConfigError, DataError
from raytrec.config.schema import Schema
from raytrec.data.fragments import scan
from raytrec.data.read_plan import ReadPlan

REAL = Path(os.environ.get("RAYTREC_ML100K", Path(__file__).parents[3] / "shared/data/ml-100k"))
MOVIES = [
    (1, "Toy Story (1995)", ["Animation", "Comedy"]),
    (5, "Naïve, The (1950)", ["Drama"]),
    (9, "Untitled", []),
]
MOVIES += [(i, f"Film {i} ({1900 + i})", ["Comedy"]) for i in range(20, 40)]


def make_ratings(half_stars=False):
    rng = random.Random(3)
    seen = []
    for user in range(1, 13):
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


def run(*arguments):
    return CliRunner().invoke(app, ["movielens", *map(str, arguments)])


def prepared(folder, layout, split, history=4):
    ratings = make_ratings(half_stars=layout == "32m")
    source = folder / "source"
    source.mkdir()
    LAYOUTS[layout](source, ratings)
    result = run("--source", source, "--out", folder / "out", "--split", split, "--history", history)
    assert result.exit_code == 0, result.exception
    rows = {s: pq.read_table(folder / "out" / s).to_pylist() for s in ("train", "valid", "test")}
    return ratings, rows, Schema.load(folder / "out/schema.yaml")


def key_of(row, items):
    return row["user_id"], items[row["item_id"] - 1], row["rating"], row["timestamp"]


@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("split", ["random", "per-user", "time"])
def test_rows_histories_and_splits(tmp_path, layout, split):
    ratings, rows, schema = prepared(tmp_path, layout, split)
    items = sorted(m[0] for m in MOVIES)
    by_split = {s: [key_of(r, items) for r in found] for s, found in rows.items()}
    assert sorted(k for keys in by_split.values() for k in keys) == sorted(ratings)
    assert {s: len(k) for s, k in by_split.items()} == (
        {"train": 156, "valid": 12, "test": 12}
        if split == "per-user"
        else {"train": 144, "valid": 18, "test": 18}
    )
    if split == "time":
        assert max(k[3] for k in by_split["train"]) <= min(k[3] for k in by_split["valid"])
        assert max(k[3] for k in by_split["valid"]) <= min(k[3] for k in by_split["test"])
    if split == "per-user":
        for user in range(1, 13):
            last = max(t for u, _, _, t in ratings if u == user)
            assert [k[3] for k in by_split["test"] if k[0] == user] == [last]

    train = by_split["train"]
    for found in rows.values():
        for row in found:
            user, item, rating, when = key_of(row, items)
            assert row["label"] == (rating >= 4)
            liked = [(t, items.index(i) + 1) for u, i, r, t in train if u == user and r >= 4 and t < when]
            assert row["history"] == [i for _, i in sorted(liked)][-4:], (
                "not the likes of train before the rating"
            )
            genres = dict((m[0], m[2]) for m in MOVIES)[item]
            assert len(row["genres"]) == max(len(genres), layout == "1m")
            assert (row["hour"], row["weekday"]) == ((when // 3600) % 24, (when // 86400 + 3) % 7)
    assert ("age" in schema.sparse) == (layout != "32m")
    assert schema.sparse["history"].table == schema.sparse["item_id"].table
    assert schema.sparse["genres"].pooling == "mean"
    for s in rows:
        assert scan(str(tmp_path / "out" / s), ReadPlan(schema)).rows == len(rows[s])


def test_ids_fit_their_tables(tmp_path):
    _, rows, schema = prepared(tmp_path, "100k", "random")
    for feature, spec in schema.sparse.items():
        ids = [
            i
            for found in rows.values()
            for r in found
            for i in ([r[feature]] if isinstance(r[feature], int) else r[feature])
        ]
        assert min(ids) >= 0 and max(ids) < schema.tables[spec.table].rows, feature


@pytest.mark.parametrize(
    "break_it,message",
    [
        (lambda d: (d / "u.item").unlink(), "u.item is missing"),
        (lambda d: (d / "u.data").unlink(), "no MovieLens files here"),
        (lambda d: (d / "u.user").write_text("1|2|3\n"), "line 1 has 3 fields"),
        (lambda d: (d / "u.data").write_text("1\t2\tx\t4\n"), "does not parse"),
    ],
)
def test_broken_sources(tmp_path, break_it, message):
    write_100k(tmp_path, make_ratings())
    break_it(tmp_path)
    result = run("--source", tmp_path, "--out", tmp_path / "out")
    assert isinstance(result.exception, DataError) and message in str(result.exception)
    assert str(tmp_path) in str(result.exception)


def test_films_without_a_date(tmp_path):
    write_100k(tmp_path, make_ratings())
    films = (tmp_path / "u.item").read_text("latin-1").splitlines()
    parts = [film.split("|") for film in films]
    lines = ["|".join([*p[:2], "", *p[3:]]) + "\n" for p in parts]
    (tmp_path / "u.item").write_text("".join(lines), "latin-1")
    result = run("--source", tmp_path, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.exception
    years = {row["release_year"] for row in pq.read_table(tmp_path / "out" / "train").to_pylist()}
    assert years == {0}


def test_no_source():
    assert isinstance(run("--out", "x").exception, ConfigError)


def test_download_verifies_and_extracts(tmp_path, capsys):
    server = tmp_path / "server"
    server.mkdir()
    with zipfile.ZipFile(server / "ml-100k.zip", "w") as archive:
        archive.writestr("ml-100k/README", "the licence")
        archive.writestr("ml-100k/u.data", "1\t1\t5\t1\n")
        archive.writestr("../outside", "must not leave the folder")
    md5 = hashlib.md5((server / "ml-100k.zip").read_bytes()).hexdigest()
    base = server.as_uri() + "/"
    with pytest.raises(DataError, match="checksum"):
        download.fetch("100k", tmp_path / "cache", base=base)
    assert not list((tmp_path / "cache").iterdir())
    assert download.fetch("100k", tmp_path / "cache", base=base, md5=md5) == tmp_path / "cache/ml-100k"
    assert "the licence" in capsys.readouterr().err
    assert not (tmp_path / "outside").exists()
    assert (tmp_path / "cache/ml-100k/u.data").exists()
    with pytest.raises(DataError, match="cannot download"):
        download.fetch("1m", tmp_path / "cache", base=base)


@pytest.mark.skipif(not REAL.is_dir(), reason="MovieLens-100K is not here (RAYTREC_ML100K)")
def test_the_real_100k(tmp_path):
    assert run("--source", REAL, "--out", tmp_path / "out").exit_code == 0
    rows = {s: pq.read_table(tmp_path / "out" / s) for s in ("train", "valid", "test")}
    assert {s: len(t) for s, t in rows.items()} == {"train": 80_000, "valid": 10_000, "test": 10_000}
    tables = Schema.load(tmp_path / "out/schema.yaml").tables
    assert (tables["user"].rows, tables["item"].rows, tables["genres"].rows) == (944, 1683, 20)
    assert sum(int(t["label"].to_numpy().sum()) for t in rows.values()) == 55_375
