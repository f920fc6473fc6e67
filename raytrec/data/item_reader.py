"""Decode items (order.LaneItem) and convert their rows to canonical form, in read tasks. Does not import torch."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import groupby, zip_longest
from typing import Any

import numpy as np
import pyarrow as pa

from raytrec.common.errors import DataError
from raytrec.common.memory import retain_freed_memory, trim_memory
from raytrec.data.canonical import canonical, make_empty_rows, take_rows
from raytrec.data.column_conversion import Place
from raytrec.data.fragments import Dataset, RowGroup
from raytrec.data.order import LaneItem, Part
from raytrec.data.pages.decode import ReadErrorPolicy, decode_columns
from raytrec.data.read_plans import ResolvedReadPlan
from raytrec.data.transform import Draw, apply_transforms

ITEMS_AHEAD = 2  # number of items decoded ahead, each in its own thread
DECODER_NICE = 10  # nice value of the decoding threads
MAX_LOCATED_BAD_ROWS = 64  # maximum number of bad rows located in a row group; beyond it, whole slices are skipped
CHECK_BATCH_ROWS = 1 << 16  # number of rows that checks before a run read at a time
MAX_CHECKED_SUSPECT_GROUPS = 4  # maximum number of suspect row groups that are read before a run


def read_items(
    items: Any, form: ResolvedReadPlan, faults: ReadErrorPolicy | None, index: pa.Table
) -> Iterator[pa.Table]:
    """Yield the table of each item of one Ray Data task, as `read_item` returns it.

    While an item is checked and yielded, threads decode the next items.

    Args:
        items: ray.ObjectRef of the list of all items.
        form: Resolved read plan of the rows.
        faults: Treatment of unreadable rows; None: a DataError is raised.
        index: Table whose column `id` contains the positions of the task's items in the list.

    Raises:
        DataError: As for `read_item`.
    """
    all_items = _get_items(items)
    task_items = [all_items[i] for i in index["id"].to_pylist()]
    with ThreadPoolExecutor(ITEMS_AHEAD, initializer=_lower_priority) as thread:
        pending = deque(thread.submit(decode_item, item, form) for item in task_items[:ITEMS_AHEAD])
        for item, next_item in zip_longest(task_items, task_items[ITEMS_AHEAD:]):
            decoded = pending.popleft().result()
            if next_item is not None:
                pending.append(thread.submit(decode_item, next_item, form))
            yield finish_item(item, decoded, form, faults)
    trim_memory()


def _lower_priority() -> None:
    """Lower the priority of this thread, so that decoding does not slow down a rank and thus all ranks.

    On Linux, each thread has its own priority. A lower priority set by Ray is kept, because only root can raise it.
    """
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, 0, max(DECODER_NICE, os.getpriority(os.PRIO_PROCESS, 0)))


@lru_cache(maxsize=2)  # the lists of this epoch and of the next one
def _get_items(items: Any) -> list[LaneItem]:
    import ray

    return ray.get(items)


def read_item(item: LaneItem, form: ResolvedReadPlan, faults: ReadErrorPolicy | None = None) -> pa.Table:
    """Return the rows of an item in canonical form (canonical.py), shuffled if the item has a seed.

    The table always has `item.rows` rows.

    Raises:
        DataError: A row group cannot be decoded, a transform fails, or a value violates the schema. With
            `faults.skip`, such rows (see `_skip_bad_rows`) are empty and marked as not present instead.
        RunError: The log of skipped rows cannot be written.
    """
    return finish_item(item, decode_item(item, form), form, faults)


def read_in_batches(
    group: RowGroup, form: ResolvedReadPlan, faults: ReadErrorPolicy | None = None
) -> Iterator[pa.Table]:
    """Yield the rows of a row group as tables of `read_item`, at most CHECK_BATCH_ROWS rows at a time.

    Raises:
        DataError: As for `read_item`.
    """
    for first in range(0, group.rows, CHECK_BATCH_ROWS):
        rows = min(CHECK_BATCH_ROWS, group.rows - first)
        part = Part(group.path, group.index, first, rows, split=group.split)
        yield read_item(LaneItem(0, 0, (part,), None), form, faults)


def decode_item(item: LaneItem, form: ResolvedReadPlan) -> list[pa.Table | DataError]:
    """Return, for each row group of an item, the decoded rows that the item's parts span, or an error."""
    retain_freed_memory()
    decoded: list[pa.Table | DataError] = []
    for (path, group), parts in _groups(item):
        first, last = _span(parts)
        try:
            decoded.append(decode_columns(path, group, first, last - first, form.columns, form.folders))
        except DataError as error:
            decoded.append(error)
    return decoded


def finish_item(
    item: LaneItem, decoded: list[pa.Table | DataError], form: ResolvedReadPlan, faults: ReadErrorPolicy | None = None
) -> pa.Table:
    """Return the canonical rows of an item from the result of `decode_item`; errors are those of `read_item`."""
    pieces = []
    for ((path, group), parts), table in zip(_groups(item), decoded, strict=True):
        place = Place(path, group, _span(parts)[0])
        draw = Draw(item.draw, parts[0].number - parts[0].first + place.first)
        pieces.append(_finish_group(place, parts, table, form, faults or ReadErrorPolicy(), draw))
    table = pieces[0] if len(pieces) == 1 else pa.concat_tables(pieces)
    if item.seed is not None:
        table = take_rows(table, np.random.default_rng(item.seed).permutation(table.num_rows))
    return table.slice(item.skip) if item.skip else table


def _groups(item: LaneItem) -> list[tuple[tuple[str, int], list[Part]]]:
    """Return ((path, row group), parts) for each row group of an item."""
    return [(key, list(parts)) for key, parts in groupby(item.parts, key=lambda part: (part.path, part.group))]


def _span(parts: list[Part]) -> tuple[int, int]:
    """Return the smallest range [first, last) of a row group's rows that covers all parts."""
    starts, stops = zip(*(part.span() for part in parts), strict=True)
    return min(starts), max(stops)


def _finish_group(
    place: Place,
    parts: list[Part],
    table: pa.Table | DataError,
    form: ResolvedReadPlan,
    faults: ReadErrorPolicy,
    draw: Draw,
) -> pa.Table:
    """Return the parts of one row group in canonical form.

    Args:
        place: Location of the first row that the parts span.
        parts: Parts to return.
        table: Decoded rows that the parts span, or the error of the row group.
        form: Resolved read plan of the rows.
        faults: Treatment of unreadable rows.
        draw: Seed for the ids that transforms draw.
    """
    try:
        if isinstance(table, DataError):
            raise table
        where = f"{place.path}, row group {place.group}"
        table = apply_transforms(table, form.plan.transforms, where, form.plan.folder, draw)
    except DataError as error:
        rows = sum(part.rows for part in parts)
        faults.leave_out(error, rows)
        return _make_skipped_rows(rows, form)
    converted = _skip_bad_rows(table, form, place, faults) if faults.skip else canonical(table, form, place)
    return pa.concat_tables([_split_rows(part, converted, place.first) for part in parts])


def _split_rows(part: Part, table: pa.Table, first: int) -> pa.Table:
    """Return the rows of a part from a table whose first row is row `first` of the row group."""
    if part.split is None:
        return table.slice(part.first - first, part.rows)
    return table.take(pa.array(part.split.rows()[part.first : part.first + part.rows] - first))


def _skip_bad_rows(
    table: pa.Table, form: ResolvedReadPlan, place: Place, faults: ReadErrorPolicy, budget: list | None = None
) -> pa.Table:
    """Return a table in canonical form with a column `present`, False for bad rows, which bisection finds.

    `budget` contains the number of bad rows that may still be located (None: MAX_LOCATED_BAD_ROWS); at 0, all rows
    of a slice with a bad row are skipped.
    """
    budget = [MAX_LOCATED_BAD_ROWS] if budget is None else budget
    try:
        return canonical(table, form, place).append_column("present", pa.array(np.ones(len(table), bool)))
    except DataError as error:
        if len(table) == 1 or not budget[0]:
            budget[0] -= budget[0] > 0
            faults.leave_out(error, len(table))
            return _make_skipped_rows(len(table), form)
    half = len(table) // 2
    middle = Place(place.path, place.group, place.first + half)
    first_half = _skip_bad_rows(table.slice(0, half), form, place, faults, budget)
    return pa.concat_tables([first_half, _skip_bad_rows(table.slice(half), form, middle, faults, budget)])


def _make_skipped_rows(rows: int, form: ResolvedReadPlan) -> pa.Table:
    """Return skipped rows: empty canonical rows that are marked as not present."""
    return make_empty_rows(form, rows).append_column("present", pa.array(np.zeros(rows, bool)))


def check_suspect_groups(dataset: Dataset) -> None:
    """Read the first MAX_CHECKED_SUSPECT_GROUPS row groups in Dataset.suspect_groups, to locate forbidden values.

    Raises:
        DataError: A row group cannot be decoded, a transform fails, or a value is forbidden. For a forbidden value,
            the error names the file, row group, column and row.
    """
    for group in dataset.suspect_groups[:MAX_CHECKED_SUSPECT_GROUPS]:
        for _ in read_in_batches(group, dataset.form):
            pass
