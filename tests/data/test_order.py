"""Guarantees of the row order, for random layouts of files and row groups."""

import hashlib
from functools import lru_cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytrec.data import order as order_module
from raytrec.data.fragments import Dataset, RowGroup
from raytrec.data.order import Order


def dataset(sizes):
    groups = tuple(RowGroup(f"f{i // 3}", i % 3, rows) for i, rows in enumerate(sizes))
    return Dataset("d", groups, form=None)  # types do not matter here


def list_rows(item):
    """Return the rows of an item as (file, group, row), shuffled by the item's seed if set."""
    rows = [(p.path, p.group, r) for p in item.parts for r in range(p.first, p.first + p.rows)]
    if item.seed is not None:
        rows = [rows[i] for i in np.random.default_rng(item.seed).permutation(len(rows))]
    return rows[item.skip :]


def collect_global_batches(order, data, epoch, world, start_step=0):
    """Return the rows of each step's global batch, collected from all ranks as a stream does."""
    steps = order.steps(data.rows)
    out = [[] for _ in range(start_step, steps)]
    for rank in range(world):
        lanes = {}
        for previous, item in pairwise([None, *order.items(data, epoch, rank, world, start_step)]):
            assert previous is None or previous.step <= item.step
            lanes.setdefault(item.lane, []).extend(list_rows(item))
        for step in range(start_step, steps):
            local = 0
            for lane, count in order.shares(data.rows, step, rank, world):
                taken, lanes[lane] = lanes.get(lane, [])[:count], lanes.get(lane, [])[count:]
                assert len(taken) == count
                out[step - start_step] += taken
                local += count
            assert local == order.local_rows(data.rows, step, rank, world)
            assert local <= order.padded_rows(data.rows, step, world)
        if not order.drop_last or order.shuffle != "none":
            assert not any(lanes.values()), "items contain rows that no step uses"
    return out


LAYOUTS = st.lists(st.integers(1, 40), min_size=1, max_size=9)
PAGES = st.sampled_from([1, 4, 20_000])  # rows per page; small pages split some row groups


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    sizes=LAYOUTS,
    batch=st.integers(5, 60),
    lanes=st.integers(5, 9),
    shuffle=st.sampled_from(["none", "groups", "window"]),
    window=st.integers(1, 3),
    drop_last=st.booleans(),
    permute=st.booleans(),
    epoch=st.integers(0, 2),
    start=st.integers(0, 12),
    page_rows=PAGES,
)
def test_batches_do_not_depend_on_the_number_of_workers(
    sizes, batch, lanes, shuffle, window, drop_last, permute, epoch, start, page_rows
):
    order = Order(batch, lanes, shuffle, window, seed=7, drop_last=drop_last, permute=permute)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order_module, "PAGE_ROWS", page_rows)
        check_batches(dataset(sizes), order, epoch, start)


def check_batches(data, order, epoch, start):
    one = collect_global_batches(order, data, epoch, 1)
    assert len(one) == order.steps(data.rows)
    seen = [row for rows in one for row in rows]
    assert len(seen) == len(set(seen)), "a row is repeated"
    assert len(seen) == (data.rows // order.batch_rows * order.batch_rows if order.drop_last else data.rows)
    assert [len(rows) for rows in one] == [order.global_rows(data.rows, k) for k in range(len(one))]
    for world in (2, 3, 5):
        assert [set(rows) for rows in collect_global_batches(order, data, epoch, world)] == [set(rows) for rows in one]
        start = min(start, len(one))
        resumed = collect_global_batches(order, data, epoch, world, start)
        assert [set(rows) for rows in resumed] == [set(rows) for rows in one[start:]]


@pytest.mark.parametrize("page_rows", [2, 20_000])
def test_unshuffled_rows_are_in_file_order(page_rows, monkeypatch):
    monkeypatch.setattr(order_module, "PAGE_ROWS", page_rows)
    data = dataset([7, 3, 12, 5])
    order = Order(4, 6, "none")
    for world in (1, 2, 3):
        found = [row for rows in collect_global_batches(order, data, 3, world) for row in rows]
        assert found == [(g.path, g.index, r) for g in data.groups for r in range(g.rows)]


def test_order_is_deterministic_per_seed_and_epoch():
    data = dataset([10] * 9)

    def first(seed, epoch):
        return collect_global_batches(Order(12, 6, "window", 2, seed), data, epoch, 2)

    assert first(0, 0) == first(0, 0)
    assert first(0, 0) != first(0, 1)
    assert first(0, 0) != first(1, 0)


def test_resume_reads_only_the_remaining_rows():
    data = dataset([100] * 12)
    order = Order(60, 6, "groups", seed=1)
    whole = sum(len(item.parts) for item in order.items(data, 0, 0, 1))
    late = sum(len(item.parts) for item in order.items(data, 0, 0, 1, start_step=18))
    assert late <= 6 < whole


def list_decoded_groups(order, data, world):
    """Return the row groups that the read tasks of all ranks decode, including repeats."""
    items = [item for rank in range(world) for item in order.items(data, 0, rank, world)]
    return [key for item in items for key in dict.fromkeys((part.path, part.group) for part in item.parts)]


@settings(max_examples=100, deadline=None)
@given(sizes=LAYOUTS, batch=st.integers(5, 60), lanes=st.integers(5, 9), world=st.integers(1, 5))
def test_evaluation_ranks_share_row_groups(sizes, batch, lanes, world):
    """Each row group is decoded once, plus once per lane boundary inside the row group."""
    data = dataset(sizes)
    found = list_decoded_groups(Order.evaluation(batch, lanes), data, world)
    assert set(found) == {(g.path, g.index) for g in data.groups}
    assert len(found) <= len(data.groups) + lanes - 1


def test_unshuffled_training_decodes_all_groups_on_every_rank():
    data = dataset([1000] * 300)
    of_evaluation = [len(list_decoded_groups(Order.evaluation(512, 64), data, world)) for world in (1, 4, 16)]
    assert of_evaluation[0] == of_evaluation[1] == of_evaluation[2] < 1.25 * len(data.groups)
    assert len(list_decoded_groups(Order(512, 64, "none"), data, 16)) == 16 * len(data.groups)


LARGE_LAYOUTS = [1_000_000] * 6, [5_000_000], [100_000] * 60, [900, 300_000, 60_001], [59_999] * 9


@pytest.mark.parametrize("sizes", LARGE_LAYOUTS, ids=str)
@pytest.mark.parametrize("order", [Order(2048, 24), Order(2048, 24, "groups"), Order.evaluation(2048, 24)])
@pytest.mark.parametrize("world", [1, 2])
def test_read_size_does_not_grow_with_row_group_size(sizes, order, world):
    """The rows per item and the rows read before the first batch are limited."""
    data = dataset(sizes)
    for rank in range(world):
        items = order.items(data, 0, rank, world)
        assert all(item.rows <= 60_000 for item in items if order.shuffle != "window")
        assert all(item.rows <= 2 * 60_000 for item in items)
        first = [item for item in items if item.step == 0]
        assert len(first) == 24 // world and sum(item.rows for item in first) <= 24 // world * 60_000 * 2
        spans = [sum(part.rows for part in item.parts) for item in items]
        assert spans == [item.rows for item in items], "every decoded row is delivered"


def test_small_row_groups_are_not_split():
    """Datasets with row groups of up to 60,000 rows keep the order of earlier versions."""
    data = dataset([16_384] * 40 + [59_999])
    for order in (Order(512, 24, "window", 2, seed=3), Order(512, 24, "groups"), Order(512, 24, "none")):
        assert len(order.pieces(data)) == len(data.groups)
    assert len(Order(512, 24).pieces(dataset([10, 60_001]))) > 2


def test_epoch_order_is_stable_across_versions():
    """Checkpoints store (epoch, step): a changed order would repeat some rows and skip others."""
    items = Order(60, 6, "window", 2, seed=3).items(dataset([100, 30, 20_000, 59_000, 7]), 1, 0, 2)
    text = repr([(i.lane, i.step, [(p.path, p.group, p.first, p.rows) for p in i.parts], i.seed) for i in items])
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "153bbb4e6c0f878e"


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 500), batch=st.integers(1, 60), lanes=st.integers(9, 40), world=st.integers(1, 9))
def test_padding_equals_the_largest_share_of_a_rank(rows, batch, lanes, world):
    order = Order(batch, lanes)
    for step in range(order.steps(rows)):
        parts = [order.local_rows(rows, step, rank, world) for rank in range(world)]
        assert order.padded_rows(rows, step, world) == max(1, *parts)


def test_largest_share_is_computed_once_per_batch_size(monkeypatch):
    """The largest share of a rank is computed once per batch size, not in each step."""
    asked = []
    largest = order_module._largest_part.__wrapped__
    counted = lru_cache(lambda *sizes: asked.append(sizes) or largest(*sizes))
    monkeypatch.setattr(order_module, "_largest_part", counted)
    order = Order(2048, 2048)
    monkeypatch.setattr(Order, "local_rows", lambda *_: pytest.fail("the rows of another rank were computed"))
    steps = order.steps(99 * 2048 + 7)
    sizes = [order.padded_rows(99 * 2048 + 7, step, 1024) for step in range(steps)]
    assert steps == 100 and sizes == [2] * 99 + [1] and len(asked) == 2
