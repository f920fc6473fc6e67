"""Spans of files: each row once and in order, no batch across files, independent of finished spans."""

import random

import pytest

from raytrec.data.fragments import Dataset, RowGroup
from raytrec.prediction.inputs import SpanOrder, assign_spans, cut_spans, select_remaining


def make_dataset_of_sizes(sizes):
    """Return a dataset whose files have row groups of these sizes."""
    groups = [RowGroup(f"f{f:03}", g, rows) for f, file in enumerate(sizes) for g, rows in enumerate(file)]
    return Dataset("here", tuple(groups), None)


def list_part_rows(part):
    return [(part.path, part.group, row) for row in range(part.first, part.first + part.rows)]


@pytest.mark.parametrize("world", [1, 2, 3, 7])
@pytest.mark.parametrize("seed", range(4))
def test_spans_read_every_row_once_and_in_order(seed, world):
    chance = random.Random(seed)
    sizes = [[chance.randint(1, 400) for _ in range(chance.randint(1, 9))] for _ in range(6)]
    whole, batch = make_dataset_of_sizes(sizes), chance.choice([1, 7, 64])
    spans = cut_spans(whole, batch, span_rows=300)
    assert [span.first for span in spans] == list(iterate_first_rows(spans))
    everything = [(g.path, g.index, row) for g in whole.groups for row in range(g.rows)]
    assert [row for span in spans for part in span.parts for row in list_part_rows(part)] == everything
    assert all(s.rows >= min(s.num_file_rows, max(300, 8 * batch)) for s in spans if s.first + s.rows < s.num_file_rows)

    order = SpanOrder(assign_spans(spans, world, batch), batch)
    read = []
    for rank in range(world):
        mine = [row for item in order.items(whole, 0, rank, world) for p in item.parts for row in list_part_rows(p)]
        taken = 0
        for step in range(order.steps()):
            ((_, count),) = order.shares(None, step, rank, world)
            assert count <= order.padded_rows(None, step, world) == batch
            assert len({path for path, *_ in mine[taken : taken + count]}) <= 1, "a batch spans two files"
            taken += count
        assert taken == len(mine)
        read += mine
    assert sorted(read) == everything
    assert sum(order.global_rows(None, step) for step in range(order.steps())) == len(everything)


def iterate_first_rows(spans):
    """Yield the first row of each span, which follows the previous span of the file."""
    before = {}
    for span in spans:
        yield before.get(span.path, 0)
        before[span.path] = before.get(span.path, 0) + span.rows


def test_spans_split_large_row_groups_and_mark_whole_files():
    spans = cut_spans(make_dataset_of_sizes([[250_000], [10]]), 100)
    assert [span.is_whole for span in spans] == [False] * 3 + [True]
    assert [span.rows for span in spans] == [80_000, 80_000, 90_000, 10]


def test_finished_spans_do_not_move_other_spans():
    spans = cut_spans(make_dataset_of_sizes([[500] * 20]), 10, span_rows=500)
    dealt = assign_spans(spans, 3, 10)
    assert {len(mine) for mine in dealt} <= {6, 7}
    left = select_remaining(dealt, set(spans[:11]))
    assert all(set(some) <= set(mine) for some, mine in zip(left, dealt, strict=True))
    assert sorted(s.first for some in left for s in some) == [s.first for s in spans[11:]]
    assert SpanOrder([[], []], 10).steps() == 0


def test_ranks_get_balanced_loads():
    chance = random.Random(3)
    spans = cut_spans(make_dataset_of_sizes([[chance.randint(1, 3000)] for _ in range(200)]), 50, span_rows=1)
    loads = [sum(-(-span.rows // 50) for span in mine) for mine in assign_spans(spans, 8, 50)]
    assert max(loads) - min(loads) <= 60
