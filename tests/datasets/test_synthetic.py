"""The planted data: its description, its repetition, and less memory than all of it."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest
from raytrec_datasets import app
from raytrec_datasets.synthetic.model import Planted, Shape, draw
from typer.testing import CliRunner

from raytrec.common.errors import ConfigError
from raytrec.config.schema import Schema
from raytrec.data.fragments import scan
from raytrec.data.read_plan import ReadPlan


def run(out, *options):
    return CliRunner().invoke(app, ["synthetic", "--out", str(out), *map(str, options)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("synthetic") / "out"
    assert run(out, "--rows", 70_000, "--seed", 4).exit_code == 0
    return out


def test_shape_and_schema(folder):
    schema = Schema.load(folder / "schema.yaml")
    assert len(schema.dense) == 13 and len(schema.sparse) == 26
    assert {s.pooling for s in schema.sparse.values()} == {"sum", "mean"}
    for split, rows in {"train": 70_000, "valid": 7_000, "test": 7_000}.items():
        assert scan(str(folder / split), ReadPlan(schema)).rows == rows
    file = pq.ParquetFile(folder / "train/part-00000.parquet")
    assert [file.metadata.row_group(i).num_rows for i in range(5)] == [16_384] * 4 + [4_464]
    assert file.metadata.row_group(0).column(0).compression == "ZSTD"
    table = file.read()
    lists = [c for c in table.column_names if str(table[c].type).startswith("list")]
    assert len(lists) == 6
    for name, spec in schema.sparse.items():
        ids = table[name].combine_chunks()
        ids = (ids.flatten() if name in lists else ids).to_numpy()
        assert ids.min() >= 0 and ids.max() < schema.tables[spec.table].rows
        counts = np.sort(np.bincount(ids))[::-1]
        assert counts[0] > 4 * counts[: len(counts) // 2].mean(), "ids are not heavy-tailed"
    assert table["label"].to_numpy().mean() == pytest.approx(0.25, abs=0.02)


def test_best_auc_is_that_of_the_planted_model(folder):
    """Once more, by comparing all pairs of the test split's true logits."""
    shape = Shape.of(13, 26, 6, 50_000)
    model = Planted(shape, 4)
    rng = np.random.default_rng((4, 3, 2, 0))
    drawn = draw(shape, rng, 7_000)
    probability = 1 / (1 + np.exp(-model.logits(drawn)))
    label = rng.random(7_000) < probability
    assert (label == pq.read_table(folder / "test")["label"].to_numpy()).all()
    wins = (probability[label][:, None] > probability[~label][None]).mean()
    best = json.loads((folder / "prepared.json").read_text())["best_auc"]
    assert best["test"] == pytest.approx(wins, abs=1e-5)
    assert 0.8 < best["test"] < 0.86


def test_same_arguments_same_data(folder, tmp_path):
    assert run(tmp_path / "again", "--rows", 70_000, "--seed", 4).exit_code == 0
    assert run(tmp_path / "other", "--rows", 70_000, "--seed", 5).exit_code == 0
    whole = pq.read_table(folder / "train")
    assert pq.read_table(tmp_path / "again/train") == whole
    assert pq.read_table(tmp_path / "other/train") != whole
    assert run(tmp_path / "short", "--rows", 65_536, "--seed", 4).exit_code == 0
    assert pq.read_table(tmp_path / "short/train") == whole.slice(0, 65_536), "chunks depend on the total"


def test_prepared_once(folder):
    before = (folder / "schema.yaml").stat().st_mtime_ns
    assert run(folder, "--rows", 70_000, "--seed", 4).exit_code == 0
    assert (folder / "schema.yaml").stat().st_mtime_ns == before
    result = run(folder, "--rows", 70_000, "--seed", 6)
    assert isinstance(result.exception, ConfigError)
    assert "seed was 4, now 6" in str(result.exception) and "--force" in str(result.exception)


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "mine.txt").write_text("keep")
    result = run(tmp_path, "--rows", 10)
    assert isinstance(result.exception, ConfigError) and "no recipe has made it" in str(result.exception)
    assert (tmp_path / "mine.txt").exists()


def test_sizes_are_options(tmp_path):
    options = ("--rows", 50, "--dense", 2, "--sparse", 4, "--multi-hot", 1, "--table-rows", 200, "--dim", 8)
    assert run(tmp_path / "a", *options).exit_code == 0
    schema = Schema.load(tmp_path / "a/schema.yaml")
    assert len(schema.dense) == 2 and len(schema.sparse) == 4
    assert {t.dim for t in schema.tables.values()} == {8}
    assert run(tmp_path / "b", "--rows", 50, "--dense", 0).exit_code == 0
