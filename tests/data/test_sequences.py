"""Sequence features: contents of batches, model inputs, and batch dumps."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from reading import collate_table, read_canonical_rows
from sequence_schema import make_mixed_schema

from raytrec.checks.parity.batches import make_local_batch, make_random_batches
from raytrec.config.features import Features, resolve_features
from raytrec.config.models import PythonSection
from raytrec.config.models.ranking import DlrmSection
from raytrec.config.models.sequences import SequenceSection
from raytrec.config.schema import Schema
from raytrec.data.read_plans import ReadPlan
from raytrec.embeddings.pooling import PooledEmbeddings, find_table_modules
from raytrec.models.inputs import SequenceLookup
from raytrec.worker.nonfinite import dump

LENGTH = 3
SEQUENCES = ("history", "last")
SEQUENCE = SequenceSection(name="sequence", max_length=LENGTH)


def make_bags(rows, most, seed):
    """Return a random list of ids for each row."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 1000, rng.integers(0, most + 1)).tolist() for _ in range(rows)]


HISTORY, TAGS = make_bags(30, 7, 0), make_bags(30, 3, 1)
LAST = [i % 5 - 1 if i % 5 else None for i in range(30)]  # one id per row, or None
SCORES = [[float(i % 7) for i in row] for row in HISTORY]


def write_and_read_batch(folder, weights=False):
    """Write the rows and read them as a batch for a sequence model, with two padding rows."""
    columns = {"item": range(30), "seen": HISTORY, "w": SCORES, "last": LAST, "tags": TAGS}
    pq.write_table(pa.table({n: pa.array(v) for n, v in columns.items()}), folder / "a.parquet")
    table, form = read_canonical_rows(folder / "a.parquet", ReadPlan(make_mixed_schema(weights), read_labels=False))
    features = resolve_features(form.schema, SEQUENCE)
    assert features.sequences == {"history": LENGTH, "last": LENGTH}
    assert features.tables_by_id == {"item": ["item", "history", "last"]}
    return collate_table(table, form, features, padding=2)


@pytest.mark.parametrize("weights", [False, True])
def test_batch_stores_most_recent_ids_first(tmp_path, weights):
    sparse = write_and_read_batch(tmp_path, weights).sparse
    assert sparse.keys() == ["item", "history", "last", "tags"]
    expected = {
        "item": [[i] for i in range(30)],
        "history": [ids[::-1][:LENGTH] for ids in HISTORY],
        "last": [[] if i is None else [i] for i in LAST],
        "tags": TAGS,
    }
    for key, rows in expected.items():
        assert [ids.tolist() for ids in sparse[key].to_dense()] == [*rows, [], []], key
        if weights:
            of_history = [scores[::-1][:LENGTH] for scores in SCORES]
            scores = of_history if key == "history" else [[1.0] * len(ids) for ids in rows]
            found = sparse[key].to_dense_weights()
            assert [row.tolist() for row in found] == [*scores, [], []], key


def test_sequence_lookup_returns_padded_vectors(tmp_path):
    batch, made = write_and_read_batch(tmp_path), make_mixed_schema()
    features = resolve_features(made, SEQUENCE)
    embeddings = PooledEmbeddings(made, None, features.sequences).to_empty(device="cpu")
    table = torch.arange(1000.0).unsqueeze(1).expand(-1, 4)  # the vector of an id contains the id
    for collection in embeddings.collections:
        for module in find_table_modules(collection).values():
            module.weight.data.copy_(table)
    inputs = SequenceLookup(features)(embeddings(batch.sparse), batch)
    assert list(inputs) == list(made.sparse)
    rows = [*(ids[::-1][:LENGTH] for ids in HISTORY), [], []]
    present = [[place < len(row) for place in range(LENGTH)] for row in rows]
    assert inputs["history"].present.tolist() == present
    assert inputs["history"].vectors[:, :, 0].tolist() == [row + [0] * (LENGTH - len(row)) for row in rows]


@pytest.mark.parametrize("by_id", [{"history": 4}, {"history": 4, "last": 2}])
def test_sequences_do_not_change_pooled_features(by_id):
    """Values and gradients agree between a table with per-id lookups and a pooled table."""
    made = make_mixed_schema(weights=True)
    made.sparse["tags"].table = "item"
    made = made.model_copy(update={"tables": {"item": made.tables["item"]}})
    whole = make_random_batches(made, 20, 1, seed=1)[0]
    torch.manual_seed(0)
    table, given = torch.randn(1000, 4), {}
    for sequences in ({}, by_id):
        features = Features(made, sequences)
        embeddings = PooledEmbeddings(made, None, sequences).to_empty(device="cpu")
        assert (embeddings.bags is None) == bool(sequences)
        (weight,) = embeddings.parameters()
        weight.data.copy_(table)
        out = embeddings(make_local_batch(whole, made, [0, 20], 0, features).sparse)
        factor = torch.linspace(-1, 1, 20).unsqueeze(1)
        sum((out[name] * factor).sum() for name in ("item", "tags")).backward()
        given[bool(sequences)] = out["item"], out["tags"], weight.grad
    for one, other in zip(*given.values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_batch_dump_restores_the_id_order_of_the_files(tmp_path):
    batch = write_and_read_batch(tmp_path)
    rows = pq.read_table(dump(batch, make_mixed_schema(), str(tmp_path), 3, 0, SEQUENCES)).to_pylist()
    assert [row["history"] for row in rows] == [ids[-LENGTH:] for ids in HISTORY]
    assert [row["tags"] for row in rows] == TAGS


def test_only_sequence_models_use_per_id_lookups():
    assert resolve_features(make_mixed_schema(), DlrmSection()).sequences == {}
    assert resolve_features(make_mixed_schema(), PythonSection(name="a:B")).sequences == {}
    own = PythonSection(name="a:B", max_length=7)
    assert resolve_features(make_mixed_schema(), own).sequences == {"history": 7, "last": 7}
    assert Features(make_mixed_schema(), {}).tables_by_id == {}
    assert not PooledEmbeddings(make_mixed_schema()).by_id


def test_sequence_keys_do_not_clash_with_feature_names():
    values = make_mixed_schema().model_dump()
    values["sparse"]["history@1"] = {"table": "item"}
    features = Features(Schema.parse(values, "test"), {"history": 2})
    assert features.keys == ["item", "history", "last", "tags", "history@1"]
    assert features.tables_by_id["item"] == ["item", "history", "last", "history@1"]
