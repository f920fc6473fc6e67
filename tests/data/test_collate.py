"""Collation of batches: key lengths, and page-locked memory."""

import threading

import numpy as np
import parquet
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reading import DirectStream, collate_table, make_schema, read_canonical_rows
from sequence_schema import make_mixed_schema
from standin import use_stand_in_gpu

from raytrec.config.features import Features
from raytrec.config.schema import Schema
from raytrec.data.batch import Collator
from raytrec.data.canonical import build_canonical_table
from raytrec.data.fragments import scan
from raytrec.data.ids import compute_group_keys
from raytrec.data.order import Order
from raytrec.data.read_plans import ReadPlan, ReservedColumnSet, ResolvedReadPlan, TaskRows
from raytrec.data.row_slices import Rows
from raytrec.embeddings.pooling import copy_sparse

PADDED = 40


def form(weights=False, reserved=False):
    """Return a resolved read plan; `reserved` adds two task weights, a key and a reserved column."""
    more = {}
    if reserved:
        tasks = (TaskRows("y", sample_weight="x"), TaskRows("y", nulls="skip"))
        more = {"tasks": tasks, "reserved": ReservedColumnSet(("text",), keys=("text",))}
    return ResolvedReadPlan(
        ReadPlan(make_mixed_schema(weights, dense=["x"]), **more), lists=frozenset({"history", "tags"})
    )


def make_rows(form, count, seed, longest=5, absent=False):
    """Return `count` random rows, some without ids; with `absent`, some are marked as not present."""
    rng = np.random.default_rng(seed)

    def bag(weighted):
        offsets = np.cumsum([0, *rng.integers(0, longest + 1, count)]).astype(np.int32)
        ids = rng.integers(0, 1000, offsets[-1])
        return offsets, ids, rng.random(offsets[-1], np.float32) if weighted else None

    singles = [rng.integers(-(i % 2), 1000, count) for i in range(len(form.singles))]
    bags = [bag(form.schema.sparse[name].weights) for name in form.bags]
    numbers = rng.random(count, np.float32)
    reserved = ([], [], [])
    if form.plan.reserved.columns:
        texts = pa.array([f"row {seed}-{i}" for i in range(count)])
        reserved = ([numbers, numbers + 1], [compute_group_keys(texts)], [texts])
    table = build_canonical_table(form, [numbers], [numbers], singles, bags, count, None, *reserved)
    if absent:
        table = table.append_column("present", [rng.random(count) < 0.8])
    return Rows.of(table.combine_chunks().to_batches()[0])


def collate_rows(form, counts, seed=0, by_id=None, pin_memory=False, **how):
    """Collate a batch from slices with these row counts."""
    pieces = [make_rows(form, n + 2, seed + i, **how)[1 : n + 1] for i, n in enumerate(counts)]
    return Collator(form, Features(form.schema, by_id or {}), pin_memory)(pieces, PADDED, sum(counts))


@pytest.mark.parametrize("least", [0, -1])  # -1: no id
def test_assemble_concatenates_single_id_features(least):
    form = ResolvedReadPlan(ReadPlan(make_schema(["one", "other", "third"], 9)))
    ids = np.random.default_rng(0).integers(least, 9, (3, 30)).astype(np.int32)
    table = build_canonical_table(form, [np.zeros(30, np.float32)], [], list(ids), [], 30)
    whole = Rows.of(table.to_batches()[0])
    bags = Collator(form).assemble([whole[:7], whole[9:30]], PADDED).bags
    wanted = np.delete(ids, [7, 8], axis=1)
    assert bags.ids.tolist() == [i for of_feature in wanted for i in of_feature if i >= 0]
    lengths = np.pad(wanted >= 0, ((0, 0), (0, PADDED - 28)))
    assert bags.lengths.tolist() == lengths.ravel().tolist()
    assert bags.counts == lengths.sum(1).tolist() and bags.ids.dtype == torch.int64


def count_ids_per_key(sparse):
    """Return the number of ids of each key."""
    return sparse.lengths().view(len(sparse.keys()), -1).sum(1).tolist()


CASES = {
    "counts": st.lists(st.integers(1, 10), max_size=4),
    "longest": st.integers(0, 5),
    "weights": st.booleans(),
    "by_id": st.sampled_from([{}, {"history": 3}, {"history": 2, "last": 1}, {"last": 4}]),
    "absent": st.booleans(),
    "seed": st.integers(0, 1000),
}


@settings(max_examples=60, deadline=None)
@given(**CASES)
def test_length_per_key_matches_bag_lengths(counts, longest, weights, by_id, absent, seed):
    """TorchRec uses the lengths as copy sizes: wrong lengths would silently corrupt memory."""
    sparse = collate_rows(form(weights), counts, seed, by_id, longest=longest, absent=absent).sparse
    assert sparse.length_per_key_or_none() == count_ids_per_key(sparse)
    assert sum(count_ids_per_key(sparse)) == len(sparse.values())
    order = np.random.default_rng(seed).permutation(len(sparse.keys())).tolist()
    permuted = sparse.permute(order)
    for moved in (copy_sparse(sparse), permuted, *sparse.split([1, len(order) - 1]), *permuted.split([len(order)])):
        assert moved.length_per_key_or_none() == count_ids_per_key(moved)


def test_length_per_key_needs_no_gpu_synchronization():
    """Run TorchRec's operations before the all-to-all (permute, split, dist_splits) on a GPU batch."""
    with use_stand_in_gpu() as gpu:
        batch = collate_rows(form(), [7, 9], by_id={"history": 3}, pin_memory=True)
        lengths, order = count_ids_per_key(batch.sparse), torch.tensor([3, 1, 0, 2], dtype=torch.int32)
        on_device, order_there = batch.to(gpu.device, non_blocking=True).sparse, order.to(gpu.device)
        gpu.waits.clear()
        permuted = copy_sparse(on_device).permute(order.tolist(), order_there)
        assert permuted.values().is_cuda
        expected = [lengths[i] for i in order]
        sizes = [part.dist_splits([1, len(part.keys()) - 1])[1] for part in permuted.split([1, 3])]
        assert sizes == [[expected[0], 0], [expected[1], sum(expected[2:])]]
        assert not gpu.waits
        assert count_ids_per_key(permuted) == expected


@pytest.mark.parametrize("counts", [[7, 9], []], ids=["rows", "padding alone"])
@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("reserved", [False, True])
def test_gpu_batches_are_collated_in_pinned_memory(counts, weights, reserved, monkeypatch):
    how = {"by_id": {"history": 2}, "absent": True}
    usual = collate_rows(form(weights, reserved), counts, **how)
    assert len(list_tensors(usual)) == 5 + weights + 2 * reserved
    assert not any(tensor.is_pinned() for tensor in list_tensors(usual))
    with use_stand_in_gpu() as gpu:
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pytest.fail("pinned a second time"))
        batch = collate_rows(form(weights, reserved), counts, pin_memory=True, **how)
        assert all(tensor.is_pinned() for tensor in list_tensors(batch))
        sent = batch.to(gpu.device, non_blocking=True)
        assert all(tensor.is_cuda for tensor in list_tensors(sent)) and not gpu.waits
        for found in (batch, sent.to(torch.device("cpu"))):
            assert all(map(torch.equal, list_tensors(found), list_tensors(usual)))
            assert found.reserved == usual.reserved
            assert all(a.dtype == b.dtype for a, b in zip(list_tensors(found), list_tensors(usual), strict=True))


def list_tensors(batch):
    sparse = batch.sparse
    weights = [] if sparse.weights_or_none() is None else [sparse.weights()]
    reserved = [part for part in (batch.task_weights, batch.keys) if part is not None]
    return [batch.dense, batch.labels, batch.weights, sparse.values(), sparse.lengths(), *weights, *reserved]


def test_stream_thread_uses_the_gpu_of_its_rank(tmp_path, monkeypatch):
    """A new thread starts on GPU 0, where each rank would create a context for page-locked memory."""
    folder = parquet.write_split(tmp_path / "d", 300, 0)
    data = scan(str(folder), ReadPlan(parquet.tiny_schema()))
    begun = {}
    with use_stand_in_gpu(index=1, count=2) as gpu:
        monkeypatch.setattr(
            torch.cuda, "set_device", lambda device: begun.setdefault(threading.current_thread().name, device)
        )
        stream = DirectStream(data, Order(100, 4), rank=0, world=1, pin_memory=True)
        batches = list(stream.batches())
        assert begun == {"stream": 1}
        assert len(batches) == 3 and all(tensor.is_pinned() for b in batches for tensor in list_tensors(b))
        begun.clear()
        list(DirectStream(data, Order(100, 4), rank=0, world=1).batches())
        assert not begun and not gpu.waits


TOWERS = Schema.parse(
    {
        "labels": ["y"],
        "dense": ["age", "price", "year"],
        "sparse": {
            "user": {"table": "user"},
            "history": {"table": "item", "pooling": "sequence", "weights": "liked"},
            "item": {"table": "item"},
            "tags": {"table": "tag", "pooling": "mean"},
        },
        "tables": {
            "user": {"rows": 9, "dim": 4},
            "item": {"rows": 9, "dim": 4},
            "tag": {"rows": 9, "dim": 4, "out_of_range": "clamp"},
        },
    },
    "here",
)
BAG = pa.list_(pa.int64())
COLUMNS = {  # (values, value of an empty row)
    "age": (pa.array([1.0, 2.0, 3.0]), 0.0),
    "price": (pa.array([4.0, 5.0, 6.0]), 0.0),
    "year": (pa.array([7.0, 8.0, 9.0]), 0.0),
    "user": (pa.array([1, None, 3]), None),
    "history": (pa.array([[1, 2, 3], [], [4]], BAG), []),
    "liked": (pa.array([[1.0, 0.5, 2.0], [], [3.0]]), []),
    "item": (pa.array([5, 6, 7]), None),
    "tags": (pa.array([[1, 20], [2], []], BAG), []),
}


@pytest.mark.parametrize(
    "tower", [["item", "tags", "year"], ["user", "history", "liked", "age", "price"], ["history", "liked"]]
)
def test_features_outside_the_read_schema_are_empty(tmp_path, tower):
    def batch(columns, schema):
        pq.write_table(pa.table(columns), tmp_path / "a.parquet")
        table, form = read_canonical_rows(tmp_path / "a.parquet", ReadPlan(schema, read_labels=False))
        return collate_table(table, form, Features(TOWERS, {"history": 2}), padding=1)

    part = TOWERS.select_features(set(tower) - {"liked"})
    found = batch({name: COLUMNS[name][0] for name in tower}, part)
    emptied = {n: v if n in tower else pa.array([none] * 3, v.type) for n, (v, none) in COLUMNS.items()}
    same = batch(emptied, TOWERS)
    assert torch.equal(found.dense, same.dense) and found.dense.shape == (4, 3)
    assert found.sparse.keys() == same.sparse.keys()
    for values in ("values", "weights", "lengths"):
        assert torch.equal(getattr(found.sparse, values)(), getattr(same.sparse, values)())
    assert found.sparse.length_per_key() == same.sparse.length_per_key()
    places = [list(TOWERS.sparse).index(feature) for feature in part.sparse]
    assert torch.equal(found.changed, same.changed[:, places])
