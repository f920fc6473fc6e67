"""Hold-out split: each row is trained or held out, independent of the number of workers."""

from itertools import chain

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reading import DirectStream

from raytrec.config.schema import Schema
from raytrec.data import order as order_module
from raytrec.data.fragments import Dataset, RowGroup, scan
from raytrec.data.order import Order
from raytrec.data.read_plans import ReadPlan

SCHEMA = Schema.parse(
    {
        "labels": ["y"],
        "sparse": {"row": {"table": "row"}, "tags": {"table": "row"}},
        "tables": {"row": {"rows": 1000, "dim": 4}},
    },
    "test",
)


@given(sizes=st.lists(st.integers(1, 200), min_size=1, max_size=6), every=st.integers(2, 20))
@settings(max_examples=100, deadline=None)
def test_each_row_is_either_trained_or_held_out(sizes, every):
    whole = Dataset("d", tuple(RowGroup("f", i, rows) for i, rows in enumerate(sizes)), form=None)
    kept, held = whole.hold_out(every)
    assert (held.rows if held else 0) == sum(rows // every for rows in sizes)
    assert kept.rows + (held.rows if held else 0) == whole.rows
    for index, rows in enumerate(sizes):
        parts = [g.split.rows() for side in (kept, held) if side for g in side.groups if g.index == index and g.split]
        if parts:
            assert sorted(np.concatenate(parts)) == list(range(rows))


def test_held_out_rows_are_not_periodic():
    _, held = Dataset("d", (RowGroup("f", 0, 10_000),), form=None).hold_out(10)
    counts = np.bincount(held.groups[0].split.rows() % 10, minlength=10)
    assert counts.min() > 60 and counts.max() < 140


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder, rows = tmp_path_factory.mktemp("held"), np.arange(1000)
    table = pa.table({"y": rows % 2, "row": rows, "tags": [[int(row), 0] for row in rows]})
    pq.write_table(table, folder / "a.parquet", row_group_size=170)
    return folder


def read_global_batches(dataset, order, world, epoch=0, start_step=0):
    """Return the sorted ids of each global batch."""
    ranks = []
    for rank in range(world):
        stream = DirectStream(dataset, order, rank=rank, world=world, train=order.permute)
        found = []
        for batch in stream.batches(epoch, start_step):
            ids = batch.sparse["row"].values()
            assert batch.sparse["tags"].values()[::2].tolist() == ids.tolist()
            assert batch.labels[: len(ids), 0].tolist() == [row % 2 for row in ids.tolist()]
            found.append(ids.tolist())
        ranks.append(found)
    return [sorted(chain(*parts)) for parts in zip(*ranks, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("shuffle", ["none", "groups", "window"])
def test_holdout_does_not_depend_on_the_number_of_workers(folder, shuffle, monkeypatch):
    monkeypatch.setattr(order_module, "PAGE_ROWS", 20)  # row groups are read in pieces
    kept, held = scan(str(folder), ReadPlan(SCHEMA)).hold_out(10)
    order = Order(64, lanes=6, shuffle=shuffle, window=2, seed=1)
    one, three = (read_global_batches(kept, order, world) for world in (1, 3))
    assert one == three and read_global_batches(kept, order, 2, start_step=4) == one[4:]
    evaluated = [read_global_batches(held, Order.evaluation(64, 6), world) for world in (1, 2)]
    assert evaluated[0] == evaluated[1]
    trained, held_out = [*chain(*one)], [*chain(*evaluated[0])]
    assert sorted(trained + held_out) == list(range(1000)) and len(held_out) == 5 * 17 + 15
