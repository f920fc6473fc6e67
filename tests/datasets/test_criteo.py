"""Criteo recipe: generated files, compared with a plain Python reading of the same lines."""

import gzip
import math
import random
from collections import Counter
from itertools import chain

import pytest
from raytrec_datasets.criteo import lines
from recipes import get_recipe_error, prepare, run_recipe

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


def count_rows(rows):
    return [len(of_split) for of_split in rows.values()]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(lines, "CHUNK_BYTES", 20_000)


def test_kaggle_layout_is_hashed(tmp_path):
    text = make_lines(700, 1)
    (tmp_path / "train.txt").write_text("\r\n".join(text) + "\r\n", newline="")
    rows = prepare("criteo", tmp_path / "out", "--source", tmp_path, "--hash-rows", 50)
    schema = Schema.load(tmp_path / "out/schema.yaml")
    assert all(table.rows == 50 for table in schema.tables.values())
    assert count_rows(rows) == [600, 50, 50]
    ids = {}
    for row, line in zip(chain(*rows.values()), text, strict=True):
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
    rows = prepare("criteo", tmp_path / "out", "--source", tmp_path, "--vocabulary", "frequency", "--min-count", 5)
    assert count_rows(rows) == [400, 100, 100]
    train = days[0] + days[1]
    for i in range(26):
        counts = Counter(line.split("\t")[14 + i] for line in train)
        counts.pop("", None)
        ranked = sorted((w for w in counts if counts[w] >= 5), key=lambda w: (-counts[w], int(w, 16)))
        expected = {word: place + 1 for place, word in enumerate(ranked)}
        words = [line.split("\t")[14 + i] for line in train + days[2]]
        ids = [row[f"C{i + 1}"] for row in chain(*rows.values())]
        assert ids == [expected.get(word, 0) for word in words]
        assert Schema.load(tmp_path / "out/schema.yaml").tables[f"C{i + 1}"].rows == len(expected) + 1


@pytest.mark.slow
def test_malformed_line_is_named(tmp_path):
    text = make_lines(300, 2)
    text[210] = text[210].replace("\t", "\tx", 1)
    (tmp_path / "train.txt").write_text("\n".join(text) + "\n")
    error = get_recipe_error(DataError, "criteo", tmp_path / "out", "--source", tmp_path)
    assert "I1 is 'x" in error and "train.txt, line 211" in error
    rows = prepare("criteo", tmp_path / "out", "--source", tmp_path, "--on-bad-line", "skip")
    assert sum(count_rows(rows)) == 299


@pytest.mark.slow
def test_single_day_is_split_by_rows(tmp_path):
    (tmp_path / "day_3").write_text("\n".join(make_lines(70, 1)) + "\n")
    for source, layout in ((tmp_path, "auto"), (tmp_path / "day_3", "auto"), (tmp_path, "kaggle")):
        rows = prepare("criteo", tmp_path / "out", "--source", source, "--layout", layout, "--force")
        assert count_rows(rows) == [60, 5, 5]
    error = str(run_recipe("criteo", "--source", tmp_path, "--layout", "1tb", "--out", tmp_path / "b").exception)
    assert "the source contains only day_3" in error and "omit --layout" in error


def test_missing_criteo_files_are_reported(tmp_path):
    assert "train.txt" in get_recipe_error(DataError, "criteo", tmp_path / "out", "--source", tmp_path)
