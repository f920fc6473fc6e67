"""Synthetic recipe: schema, determinism, and labels compared with a row-by-row reference model."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest
from raytrec_datasets.synthetic import recipe
from recipes import run_recipe

from raytrec.config.schema import Schema
from raytrec.data.fragments import scan
from raytrec.data.read_plans import ReadPlan


def run(out, *options):
    return run_recipe("synthetic", "--out", out, *options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("synthetic") / "out"
    assert run(out, "--rows", 70_000, "--seed", 4).exit_code == 0
    return out


def test_synthetic_data_matches_its_schema(folder):
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


@pytest.mark.slow
def test_same_arguments_give_the_same_data(folder, tmp_path):
    assert run(tmp_path / "again", "--rows", 70_000, "--seed", 4).exit_code == 0
    assert run(tmp_path / "other", "--rows", 70_000, "--seed", 5).exit_code == 0
    whole = pq.read_table(folder / "train")
    assert pq.read_table(tmp_path / "again/train") == whole
    assert pq.read_table(tmp_path / "other/train") != whole
    assert run(tmp_path / "short", "--rows", 65_536, "--seed", 4).exit_code == 0
    assert pq.read_table(tmp_path / "short/train") == whole.slice(0, 65_536), "chunks depend on the total"


def test_options_set_the_dataset_sizes(tmp_path):
    options = ("--rows", 50, "--dense", 2, "--sparse", 4, "--multi-hot", 1, "--table-rows", 200, "--dim", 8)
    assert run(tmp_path / "a", *options).exit_code == 0
    schema = Schema.load(tmp_path / "a/schema.yaml")
    assert len(schema.dense) == 2 and len(schema.sparse) == 4
    assert {t.dim for t in schema.tables.values()} == {8}
    assert run(tmp_path / "b", "--rows", 50, "--dense", 0).exit_code == 0


def compute_exact_auc(labels, scores):
    """Return the AUC from ranks, with ties counted half; the recipe computes it from a histogram."""
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]
    positive = labels.sum()
    return (ranks[labels == 1].sum() - positive * (positive + 1) / 2) / (positive * (len(labels) - positive))


def compute_reference_logits(table, schema, model, ranks):
    """Return the logit of each row, with bags pooled as in schema.yaml; `ranks` maps ids to ranks."""
    out = []
    for row in table.to_pylist():
        dense = np.array([row[name] for name in schema.dense])
        bags = [ranks[f][np.atleast_1d(row[name]).astype(int)] for f, name in enumerate(schema.sparse)]
        ids = 0.0
        for f, (bag, feature) in enumerate(zip(bags, schema.sparse.values(), strict=True)):
            effects = [model._effects[f][r] if r < recipe.EFFECT_RANKS else 0.0 for r in bag]
            if feature.pooling == "mean":
                ids += sum(effects) / max(len(effects), 1)
            else:
                ids += sum(effects) / (recipe.LONGEST_BAG / 2 if model.shape.is_bag(f) else 1)
        pairs = 0.0
        for (a, b), (left, right) in zip(model._pairs, model._factors, strict=True):
            r, s = bags[a][0], bags[b][0]
            if max(r, s) < recipe.PAIR_IDS:
                pairs += left[r] @ right[s]
        parts = {"dense": dense @ model._linear + np.tanh(2 * dense[0]), "ids": ids, "pairs": pairs}
        out.append(model._bias + sum(model._scale[name] * part for name, part in parts.items()))
    return np.array(out)


@pytest.mark.slow
def test_labels_follow_the_planted_model(tmp_path, monkeypatch):
    monkeypatch.setattr(recipe, "CHUNK_ROWS", 3000)
    assert run(tmp_path / "out", "--rows", 40_000, "--seed", 5, "--table-rows", 4000).exit_code == 0
    schema = Schema.load(tmp_path / "out/schema.yaml")
    model = recipe.Planted(recipe.Shape.of(13, 26, 6, 4000), 5)
    ranks = []
    for f, name in enumerate(schema.sparse):
        ids = model.ids(f, np.arange(schema.tables[name].rows))
        assert sorted(ids) == list(range(len(ids))), "scattering must be a bijection"
        ranks.append(np.argsort(ids))
    table = pq.read_table(tmp_path / "out/test")
    logits, labels = compute_reference_logits(table, schema, model, ranks), table["label"].to_numpy()
    best = json.loads((tmp_path / "out/prepared.json").read_text())["best_auc"]["test"]
    assert best == pytest.approx(compute_exact_auc(labels, logits), abs=1e-5)
    probability = 1 / (1 + np.exp(-logits))
    for low in np.arange(0, 1, 0.2):  # five probability bins: label counts match expectations
        inside = (probability >= low) & (probability < low + 0.2)
        deviation = np.sqrt((probability * (1 - probability))[inside].sum())
        assert abs(labels[inside].sum() - probability[inside].sum()) < 4.5 * deviation
