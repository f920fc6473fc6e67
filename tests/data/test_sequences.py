"""Sequences that are read id by id: what batches hold of them, and what a rank that stopped writes down."""

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from sequence_schema import schema

from raytrec.checks.parity.batches import local_batch, random_batches
from raytrec.checks.parity.reference import GlobalBatch
from raytrec.config.features import Features, resolve_features
from raytrec.config.models import PythonSection
from raytrec.config.models.ranking import DlrmSection
from raytrec.config.models.sequences import SequenceSection
from raytrec.config.schema import Schema
from raytrec.data.collate import Collator, Rows
from raytrec.data.form import Form
from raytrec.data.read_plan import ReadPlan
from raytrec.embeddings.bags import tables_in
from raytrec.embeddings.pooling import PooledEmbeddings
from raytrec.models.inputs import Sequences
from raytrec.worker.nonfinite import dump

LENGTH = 3
SEQUENCES = ("history", "last")
SEQUENCE = SequenceSection(name="sequence", max_length=LENGTH)


def bags(rows, most, seed):
    """For each row a list of ids."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 1000, rng.integers(0, most + 1)).tolist() for _ in range(rows)]


def ragged(lists, dtype):
    return np.cumsum([0, *map(len, lists)]).astype(np.int32), np.array(
        [x for row in lists for x in row], dtype
    )


def pieces(form, weights):
    """Rows of 3 tables, of which slices are taken, and what they hold."""
    history, tags = bags(60, 7, 0), bags(60, 3, 1)
    item, last = np.arange(60) % 1000, np.arange(60) % 5 - 1  # last is one id a row, or none
    scores = [[float(i % 7) for i in row] for row in history]
    out, kept = [], []
    for table, (first, stop) in ((0, (0, 20)), (1, (3, 9)), (2, (19, 20))):
        rows = slice(20 * table, 20 * table + 20)
        offsets, ids = ragged(history[rows], np.int64)
        of_bags = [
            (offsets, ids, ragged(scores[rows], np.float32)[1] if weights else None),
            (*ragged(tags[rows], np.int64), None),
        ]
        whole = form.table([np.zeros(20, np.float32)], [], [item[rows], last[rows]], of_bags, 20)
        out.append(Rows.of(whole.to_batches()[0])[first:stop])
        kept += range(20 * table + first, 20 * table + stop)
    return out, [(item[i], history[i], scores[i], last[i], tags[i]) for i in kept]


@pytest.mark.parametrize("weights", [False, True])
def test_a_batch_holds_the_most_recent_ids_first(weights):
    form = Form(ReadPlan(schema(weights)), lists=frozenset({"history", "tags"}))
    features = resolve_features(form.schema, SEQUENCE)
    assert features.sequences == {"history": LENGTH, "last": LENGTH}
    assert features.tables_by_id == {"item": ["item", "history", "last"]}
    parts, expected = pieces(form, weights)
    batch = Collator(form, features)(parts, 30, 30)
    keys = ["item", "history", "last", "tags"]
    assert batch.sparse.keys() == keys == features.keys
    ends = batch.sparse.lengths().view(len(keys), 30).cumsum(1)
    for place, key in enumerate(keys):
        ids = batch.sparse[key].values().tolist()
        scores = batch.sparse[key].weights().tolist() if weights else None
        for row in range(30):
            a, b = (int(ends[place, row - 1]) if row else 0), int(ends[place, row])
            item, history, of_history, last, tags = (
                expected[row] if row < len(expected) else (0, [], [], -1, [])
            )
            wanted = {
                "item": [item] if row < len(expected) else [],
                "history": history[::-1][:LENGTH],
                "last": [last] if last >= 0 else [],
                "tags": tags,
            }[key]
            assert ids[a:b] == wanted, (key, row)
            if weights and key == "history":
                assert scores[a:b] == of_history[::-1][:LENGTH]
            elif weights:
                assert scores[a:b] == [1.0] * len(wanted)


def test_what_the_model_is_given():
    made = Schema.parse(schema().model_dump(), "test")
    features = Features(made, {"history": LENGTH})
    rows = [[5, 6, 7, 8], [], [9]]
    ids = torch.tensor([i for row in rows for i in row])
    bag = torch.tensor([b for b, row in enumerate(rows) for _ in row])
    nothing = torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.long), torch.zeros(0)
    whole = {f: nothing for f in made.sparse} | {"history": (ids, bag, torch.ones(len(ids)))}
    batch = local_batch(GlobalBatch(torch.zeros(3, 0), torch.zeros(3, 1), whole), made, [0, 3], 0, features)
    assert batch.sparse["history"].values().tolist() == [8, 7, 6, 9]
    embeddings = PooledEmbeddings(made, None, features.sequences).to_empty(device="cpu")
    table = torch.arange(1000.0).unsqueeze(1).expand(-1, 4)
    for collection in embeddings.collections:
        for module in tables_in(collection).values():
            module.weight.data.copy_(table)
    found = embeddings(batch.sparse)
    inputs = Sequences(features)(found, batch.sparse)
    assert list(inputs) == list(made.sparse)
    assert inputs["history"].present.tolist() == [[True] * 3, [False] * 3, [True, False, False]]
    assert inputs["history"].vectors[:, :, 0].tolist() == [[8, 7, 6], [0, 0, 0], [9, 0, 0]]


@pytest.mark.parametrize("by_id", [{"history": 4}, {"history": 4, "last": 2}])
def test_bags_are_the_same_beside_sequences(by_id):
    """Of a table whose ids are looked up one by one, and of one that gives sums: values and gradients."""
    made = schema(weights=True)
    made.sparse["tags"].table = "item"
    made = made.model_copy(update={"tables": {"item": made.tables["item"]}})
    whole = random_batches(made, 20, 1, seed=1)[0]
    torch.manual_seed(0)
    table, given = torch.randn(1000, 4), {}
    for sequences in ({}, by_id):
        features = Features(made, sequences)
        embeddings = PooledEmbeddings(made, None, sequences).to_empty(device="cpu")
        assert (embeddings.bags is None) == bool(sequences)
        (weight,) = embeddings.parameters()
        weight.data.copy_(table)
        out = embeddings(local_batch(whole, made, [0, 20], 0, features).sparse)
        factor = torch.linspace(-1, 1, 20).unsqueeze(1)
        sum((out[name] * factor).sum() for name in ("item", "tags")).backward()
        given[bool(sequences)] = out["item"], out["tags"], weight.grad
    for one, other in zip(*given.values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_a_batch_is_written_down_as_the_files_have_it(tmp_path):
    form = Form(ReadPlan(schema()), lists=frozenset({"history", "tags"}))
    parts, expected = pieces(form, False)
    batch = Collator(form, resolve_features(form.schema, SEQUENCE))(parts, 30, 30)
    rows = pq.read_table(dump(batch, form.schema, str(tmp_path), 3, 0, SEQUENCES)).to_pylist()
    assert [row["history"] for row in rows] == [history[-LENGTH:] for _, history, *_ in expected]
    assert [row["tags"] for row in rows] == [tags for *_, tags in expected]


def test_only_models_that_read_sequences_have_them_one_by_one():
    assert resolve_features(schema(), DlrmSection()).sequences == {}
    assert resolve_features(schema(), PythonSection(name="a:B")).sequences == {}
    own = PythonSection(name="a:B", max_length=7)
    assert resolve_features(schema(), own).sequences == {"history": 7, "last": 7}
    assert Features(schema(), {}).tables_by_id == {}
    assert not PooledEmbeddings(schema()).by_id


def test_no_name_of_a_feature_is_taken():
    values = schema().model_dump()
    values["sparse"]["history@1"] = {"table": "item"}
    features = Features(Schema.parse(values, "test"), {"history": 2})
    assert features.keys == ["item", "history", "last", "tags", "history@1"]
    assert features.tables_by_id["item"] == ["item", "history", "last", "history@1"]
