"""Criteo recipe: generated files, compared with a plain Python reading of the same lines."""

import gzip
import math
import random
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from raytrec_datasets import app
from raytrec_datasets.criteo import lines
from typer.testing import CliRunner

from raytrec.common.errors import DataError
from raytrec.config.schema import Schema

pytestmark = pytest.mark.usefixtures("ray_cluster")


def make_lines(rows, seed):
    rng = random.Random(seed)
    out = []
    for _ in range(rows):
        dense = [rng.choice(["", str(rng.randint(-2, 500))]) for _ in range(13)]
        sparse = [rng.choice(["", f"{rng.randint(0, 12) * 7919:08x}", f"{rng.getrandbits(32):08x}"]) for _ in range(26)]
        out.append("\t".join([str(rng.randint(0, 1)), *dense, *sparse]))
    return out


def run(*arguments):
    return CliRunner().invoke(app, ["criteo", *map(str, arguments)])


def read_rows(folder):
    return pq.read_table(folder).to_pylist()


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(lines, "CHUNK_BYTES", 20_000)


def test_kaggle_layout_is_hashed(tmp_path):
    text = make_lines(700, 1)
    (tmp_path / "train.txt").write_text("\r\n".join(text) + "\r\n", newline="")
    result = run("--source", tmp_path, "--out", tmp_path / "out", "--hash-rows", 50)
    assert result.exit_code == 0, result.exception
    schema = Schema.load(tmp_path / "out/schema.yaml")
    assert all(table.rows == 50 for table in schema.tables.values())
    got = [row for split in ("train", "valid", "test") for row in read_rows(tmp_path / "out" / split)]
    assert [len(read_rows(tmp_path / "out" / s)) for s in ("train", "valid", "test")] == [600, 50, 50]
    ids = {}
    for row, line in zip(got, text, strict=True):
        fields = line.split("\t")
        assert row["label"] == int(fields[0])
        for i in range(13):
            value = max(int(fields[1 + i] or 0), 0)
            assert row[f"I{i + 1}"] == pytest.approx(math.log(1 + value), rel=1e-6)
        for i in range(26):
            word, got_id = fields[14 + i], row[f"C{i + 1}"]
            assert (got_id == 0) == (word == "")
            assert 0 <= got_id < 50
            assert ids.setdefault(word, got_id) == got_id, "the same value must give the same id"
    assert len(set(ids.values())) == 50, "the hash must reach all rows"


@pytest.mark.slow
def test_1tb_layout_uses_a_frequency_vocabulary(tmp_path):
    days = [make_lines(200, day) for day in range(3)]
    (tmp_path / "day_0").write_text("\n".join(days[0]) + "\n")
    with gzip.open(tmp_path / "day_1.gz", "wt") as file:
        file.write("\n".join(days[1]) + "\n")
    (tmp_path / "day_2").write_text("\n".join(days[2]))  # no newline at the end
    result = run("--source", tmp_path, "--out", tmp_path / "out", "--vocabulary", "frequency", "--min-count", 5)
    assert result.exit_code == 0, result.exception
    got = {s: read_rows(tmp_path / "out" / s) for s in ("train", "valid", "test")}
    assert {s: len(rows) for s, rows in got.items()} == {"train": 400, "valid": 100, "test": 100}
    train = days[0] + days[1]
    for i in range(26):
        counts = Counter(line.split("\t")[14 + i] for line in train)
        counts.pop("", None)
        ranked = sorted((w for w in counts if counts[w] >= 5), key=lambda w: (-counts[w], int(w, 16)))
        expected = {word: place + 1 for place, word in enumerate(ranked)}
        words = [line.split("\t")[14 + i] for line in train + days[2]]
        ids = [row[f"C{i + 1}"] for s in ("train", "valid", "test") for row in got[s]]
        assert ids == [expected.get(word, 0) for word in words]
        assert Schema.load(tmp_path / "out/schema.yaml").tables[f"C{i + 1}"].rows == len(expected) + 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "field,value,message",
    [(5, "x", "I5 is 'x'"), (16, "zz", "C3 is 'zz'"), (0, "7", "label is '7'"), (None, None, "3 fields")],
)
def test_malformed_line_is_named(tmp_path, field, value, message):
    text = make_lines(300, 2)
    fields = text[210].split("\t")
    if field is None:
        fields = fields[:3]
    else:
        fields[field] = value
    text[210] = "\t".join(fields)
    (tmp_path / "train.txt").write_text("\n".join(text) + "\n")
    result = run("--source", tmp_path, "--out", tmp_path / "out")
    assert isinstance(result.exception, DataError)
    assert message in str(result.exception) and "train.txt, line 211" in str(result.exception)
    assert not (tmp_path / "out").exists()
    assert run("--source", tmp_path, "--out", tmp_path / "out", "--on-bad-line", "skip").exit_code == 0
    assert sum(len(read_rows(tmp_path / "out" / s)) for s in ("train", "valid", "test")) == 299


@pytest.mark.slow
def test_every_line_is_in_one_chunk(tmp_path, monkeypatch):
    text = [f"line {i} {'x' * (i % 50)}" for i in range(1000)]
    path = Path(tmp_path / "file")
    path.write_text("\n".join(text))
    for size in (1, 7, 64, 1000, 10**6):
        monkeypatch.setattr(lines, "CHUNK_BYTES", size)
        found = [line for c in lines.chunks(path) for block in lines._blocks(c) for line in block.splitlines()]
        assert found == [line.encode() for line in text]


@pytest.mark.slow
def test_single_day_is_split_by_rows(tmp_path):
    (tmp_path / "day_3").write_text("\n".join(make_lines(70, 1)) + "\n")
    for source, layout in ((tmp_path, "auto"), (tmp_path / "day_3", "auto"), (tmp_path, "kaggle")):
        out = tmp_path / "out"
        result = run("--source", source, "--layout", layout, "--out", out, "--force")
        assert result.exit_code == 0, result.exception
        assert [len(read_rows(out / s)) for s in ("train", "valid", "test")] == [60, 5, 5]
    result = run("--source", tmp_path, "--layout", "1tb", "--out", out, "--force")
    assert "the source contains only day_3" in str(result.exception) and "omit --layout" in str(result.exception)


def test_missing_criteo_files_are_reported(tmp_path):
    result = run("--source", tmp_path, "--out", tmp_path / "out")
    assert isinstance(result.exception, DataError) and "train.txt" in str(result.exception)
