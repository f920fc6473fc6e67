"""MovieLens: no held-out label is an input, and what a set must not do to a dataset or a folder."""

import hashlib
import random
import zipfile

import pyarrow.parquet as pq
import pytest
from raytrec_datasets import app
from raytrec_datasets.movielens import recipe
from raytrec_datasets.movielens.download import fetch
from typer.testing import CliRunner

from raytrec.common.errors import DataError

SPLITS = ("train", "valid", "test")
USERS, ITEMS = 25, 40


def make_ratings(users=USERS):
    """(user, item, rating, timestamp), with many equal timestamps."""
    rng, out = random.Random(0), []
    for user in range(1, users + 1):
        for item in rng.sample(range(1, ITEMS + 1), rng.randint(5, 35)):
            out.append((user, item, rng.randint(1, 5), 880_000_000 + rng.randint(0, 12) * 100_000))
    return out


def write(folder, ratings):
    """The layout of 20M to 32M."""
    folder.mkdir(parents=True)
    lines = "".join(f"{u},{i},{r}.0,{t}\n" for u, i, r, t in ratings)
    (folder / "ratings.csv").write_text("userId,movieId,rating,timestamp\n" + lines)
    lines = "".join(f'{i},"Film, {i} (1990)",Drama\n' for i in range(1, ITEMS + 1))
    (folder / "movies.csv").write_text("movieId,title,genres\n" + lines)
    return folder


def run(*arguments):
    return CliRunner().invoke(app, ["movielens", *map(str, arguments)])


def prepare(out, source, *arguments):
    result = run("--source", source, "--out", out, *arguments)
    assert result.exit_code == 0, result.exception
    return {split: pq.read_table(out / split).to_pylist() for split in SPLITS}


@pytest.mark.parametrize("split", ["random", "per-user", "time"])
def test_no_label_of_valid_or_test_is_an_input(tmp_path, split, monkeypatch):
    """Turning every held-out rating into its opposite must change no input of any row."""
    monkeypatch.setattr(recipe, "CHUNK_ROWS", 37)
    ratings = make_ratings()
    before = prepare(tmp_path / "a", write(tmp_path / "from-a", ratings), "--split", split)
    held_out = {(row["user_id"], row["item_id"]) for s in SPLITS[1:] for row in before[s]}
    turned = [(u, i, (1 if r >= 4 else 5) if (u, i) in held_out else r, t) for u, i, r, t in ratings]
    after = prepare(tmp_path / "b", write(tmp_path / "from-b", turned), "--split", split)
    for name in SPLITS:
        for a, b in zip(before[name], after[name], strict=True):
            assert (a["label"] == b["label"]) == (name == "train")
            changed = {key for key in a if a[key] != b[key]}
            assert changed <= {"label", "rating"}
    assert max(len(row["history"]) for row in before["test"]) > 5


def test_small_sets_have_small_row_groups(tmp_path):
    rows = prepare(tmp_path / "out", write(tmp_path / "from", make_ratings(users=300)))
    meta = pq.read_metadata(tmp_path / "out/train/part-00000.parquet")
    assert [meta.row_group(i).num_rows for i in range(2)] == [4096, len(rows["train"]) - 4096]


@pytest.mark.parametrize(
    "line,message",
    [
        (",1,5.0,880000000", "a field is empty"),
        ("2,1,5.0,880000000000", "seconds since 1970"),  # milliseconds would mix the users' histories
    ],
)
def test_ratings_that_would_mix_users_are_refused(tmp_path, line, message):
    source = write(tmp_path / "from", make_ratings())
    with (source / "ratings.csv").open("a") as file:
        file.write(line + "\n")
    result = run("--source", source, "--out", tmp_path / "out")
    assert isinstance(result.exception, DataError)
    assert message in str(result.exception) and "ratings.csv" in str(result.exception)


def test_an_empty_genre_is_no_genre(tmp_path):
    source = write(tmp_path / "from", make_ratings())
    with (source / "movies.csv").open("a") as file:
        file.write("41,Nameless,\n")
    prepare(tmp_path / "out", source)
    assert "genres: {rows: 2, dim: 16}" in (tmp_path / "out/schema.yaml").read_text()


def test_interrupted_extraction_does_not_look_complete(tmp_path, monkeypatch):
    content = write(tmp_path / "server/content", make_ratings())
    with zipfile.ZipFile(tmp_path / "server/ml-25m.zip", "w") as file:
        for path in content.iterdir():
            file.write(path, f"ml-25m/{path.name}")
    md5 = hashlib.md5((tmp_path / "server/ml-25m.zip").read_bytes()).hexdigest()
    arguments = ("25m", tmp_path / "cache", (tmp_path / "server").as_uri() + "/", md5)

    def interrupted(self, path):
        self.extract("ml-25m/ratings.csv", path)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(zipfile.ZipFile, "extractall", interrupted)
        fetch(*arguments)
    assert not (tmp_path / "cache/ml-25m").exists()
    assert (fetch(*arguments) / "movies.csv").is_file()
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["ml-25m"]


def test_downloads_do_not_lie_where_the_dataset_goes(tmp_path, monkeypatch):
    """--out data/movielens is a natural name."""
    monkeypatch.setattr(recipe, "fetch", lambda name, folder: write(folder / name, make_ratings()))
    result = run("--download", "25m", "--out", tmp_path / "movielens")
    assert result.exit_code == 0, result.exception
    assert (tmp_path / "movielens/train").is_dir()
