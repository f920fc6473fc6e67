"""Each row is held out, or trained once per epoch in the same global batch, even if the run restarts."""

import random
from itertools import chain

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reading import DirectStream, make_schema

from raytrec.data import order as order_module
from raytrec.data.fragments import scan
from raytrec.data.order import Order
from raytrec.data.pages import decode as decode_module
from raytrec.data.read_plans import ReadPlan

SCHEMA = make_schema(["id", "bag"], 100_000, labels=["label"])


def write(folder, layout, page_rows=None):
    """Write files with row groups of these sizes and consecutive ids; files and groups may be empty."""
    first = 0
    for number, sizes in enumerate(layout):
        ids = np.arange(first, first + sum(sizes))
        first += len(ids)
        table = pa.table(
            {"label": ids % 2, "id": ids, "bag": pa.array([[i] * (i % 3) for i in ids], pa.list_(pa.int64()))}
        )
        pages = {"max_rows_per_page": page_rows}
        with pq.ParquetWriter(folder / f"{number:03d}.parquet", table.schema, **pages) as writer:
            for size in sizes:
                writer.write_table(table.slice(0, size), row_group_size=max(1, size))
                table = table.slice(size)
    return first


def get_checked_ids(batch):
    """Return the ids of a batch after checking the other values of each row."""
    rows = int(batch.weights.sum())
    ids = batch.sparse["id"].values().tolist()
    assert batch.sparse["id"].lengths().tolist() == [1] * rows + [0] * (len(batch.weights) - rows)
    assert batch.sparse["bag"].values().tolist() == [i for i in ids for _ in range(i % 3)]
    assert batch.labels[:rows, 0].tolist() == [i % 2 for i in ids]
    return ids


class RandomBlockStream(DirectStream):
    """A stream that splits the output of read tasks into random blocks, as Ray may do."""

    def _tables(self, items):
        rng = random.Random(len(items))
        rest = None
        for table in super()._tables(items):
            rest = table if rest is None else pa.concat_tables([rest, table])
            while rest.num_rows and rng.random() < 0.7:
                cut = rng.randint(1, rest.num_rows)
                yield rest.slice(0, cut).combine_chunks()  # like blocks from the object store
                rest = rest.slice(cut)
        if rest is not None and rest.num_rows:
            yield rest


def collect_batches(data, order, epoch, world, start, stop):
    """Return the sorted ids of each global batch that `world` ranks read in steps start to stop - 1."""
    out = [[] for _ in range(start, stop)]
    for rank in range(world):
        batches = RandomBlockStream(data, order, rank=rank, world=world).batches(epoch, start)
        for ids in out:
            ids += get_checked_ids(next(batches))
        batches.close()
    return [sorted(ids) for ids in out]


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    layout=st.lists(
        st.lists(st.one_of(st.just(0), st.just(1), st.integers(2, 120)), max_size=4), min_size=1, max_size=4
    ).filter(lambda layout: sum(map(sum, layout)) > 0),
    batch=st.integers(4, 50),
    lanes=st.integers(4, 9),
    shuffle=st.sampled_from(["none", "groups", "window"]),
    window=st.integers(1, 3),
    phases=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 8)), min_size=1, max_size=8),
    page_rows=st.sampled_from([3, 10, 20_000]),
    every=st.sampled_from([None, 2, 7]),
)
def test_each_row_is_trained_once_across_restarts(
    tmp_path_factory, layout, batch, lanes, shuffle, window, phases, page_rows, every
):
    """Run phases of (world size, steps until the run is stopped) over two epochs.

    The last phase runs to the end. One of `every` rows is held out for evaluation. Pages of 3 or 10 rows in row
    groups of up to 120 rows stand in for pages of 20,000 rows: large row groups are split into pieces and read
    page by page.
    """
    folder = tmp_path_factory.mktemp("layout")
    rows = write(folder, layout, page_rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order_module, "PAGE_ROWS", page_rows)
        patch.setattr(decode_module, "MAX_FULL_DECODE_ROWS", 2 * page_rows)
        data, held_out = scan(str(folder), ReadPlan(SCHEMA)), None
        if every:
            data, held_out = data.hold_out(every)
        trained = check_exactly_once(data, Order(batch, lanes, shuffle, window, seed=5), phases)
        evaluated = collect_evaluated_rows(held_out, Order.evaluation(batch, lanes)) if held_out else []
    assert sorted(trained + evaluated) == list(range(rows))


def collect_evaluated_rows(data, order):
    one, two = (collect_batches(data, order, 0, world, 0, order.steps(data.rows)) for world in (1, 2))
    assert one == two
    return [*chain(*one)]


def check_exactly_once(data, order, phases):
    """Check two epochs and return the ids of one epoch."""
    steps = order.steps(data.rows)
    undisturbed = [ids for epoch in (0, 1) for ids in collect_batches(data, order, epoch, 1, 0, steps)]
    first, second = (sorted(chain(*undisturbed[at : at + steps])) for at in (0, steps))
    assert first == second
    got, epoch, step = [], 0, 0
    while epoch < 2:
        world, count = phases.pop(0) if phases else (2, steps)
        stop = min(steps, step + count)
        got += collect_batches(data, order, epoch, world, step, stop)
        epoch, step = (epoch + 1, 0) if stop == steps else (epoch, stop)
    assert got == undisturbed
    return first
