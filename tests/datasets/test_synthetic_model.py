"""The synthetic recipe against a slow reading of the files, one row and feature at a time."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest
from raytrec_datasets import app
from raytrec_datasets.synthetic import model as planted
from raytrec_datasets.synthetic import recipe
from typer.testing import CliRunner

from raytrec.config.schema import Schema


def exact_auc(labels, scores):
    """By ranks, ties counted half: another way than the recipe's histogram."""
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]
    positive = labels.sum()
    return (ranks[labels == 1].sum() - positive * (positive + 1) / 2) / (positive * (len(labels) - positive))


def slow_logits(table, schema, model, ranks):
    """Each row's logit, with bags pooled as in schema.yaml; ranks: for each feature its rank by id."""
    out = []
    for row in table.to_pylist():
        dense = np.array([row[name] for name in schema.dense])
        bags = [ranks[f][np.atleast_1d(row[name]).astype(int)] for f, name in enumerate(schema.sparse)]
        ids = 0.0
        for f, (bag, feature) in enumerate(zip(bags, schema.sparse.values(), strict=True)):
            effects = [model._effects[f][r] if r < planted.EFFECT_RANKS else 0.0 for r in bag]
            if feature.pooling == "mean":
                ids += sum(effects) / max(len(effects), 1)
            else:
                ids += sum(effects) / (planted.LONGEST_BAG / 2 if model.shape.is_bag(f) else 1)
        pairs = 0.0
        for (a, b), (left, right) in zip(model._pairs, model._factors, strict=True):
            r, s = bags[a][0], bags[b][0]
            if max(r, s) < planted.PAIR_IDS:
                pairs += left[r] @ right[s]
        parts = {"dense": dense @ model._linear + np.tanh(2 * dense[0]), "ids": ids, "pairs": pairs}
        out.append(model._bias + sum(model._scale[name] * part for name, part in parts.items()))
    return np.array(out)


def test_labels_follow_the_planted_model(tmp_path, monkeypatch):
    monkeypatch.setattr(recipe, "CHUNK_ROWS", 3000)
    options = ("--rows", "40000", "--seed", "5", "--table-rows", "4000")
    assert CliRunner().invoke(app, ["synthetic", "--out", str(tmp_path / "out"), *options]).exit_code == 0
    schema = Schema.load(tmp_path / "out/schema.yaml")
    model = planted.Planted(planted.Shape.of(13, 26, 6, 4000), 5)
    ranks = []
    for f, name in enumerate(schema.sparse):
        ids = model.ids(f, np.arange(schema.tables[name].rows))
        assert sorted(ids) == list(range(len(ids))), "scattering must be a bijection"
        ranks.append(np.argsort(ids))
    table = pq.read_table(tmp_path / "out/test")
    logits, labels = slow_logits(table, schema, model, ranks), table["label"].to_numpy()
    best = json.loads((tmp_path / "out/prepared.json").read_text())["best_auc"]["test"]
    assert best == pytest.approx(exact_auc(labels, logits), abs=1e-5)
    probability = 1 / (1 + np.exp(-logits))
    for low in np.arange(0, 1, 0.2):  # in every fifth of the probabilities, as many labels as expected
        inside = (probability >= low) & (probability < low + 0.2)
        deviation = np.sqrt((probability * (1 - probability))[inside].sum())
        assert abs(labels[inside].sum() - probability[inside].sum()) < 4.5 * deviation
