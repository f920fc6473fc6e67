"""The read task: an item's rows in canonical form. No torch here."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from itertools import groupby, zip_longest
from typing import Any

import numpy as np
import pyarrow as pa

from raytrec.common.errors import DataError
from raytrec.common.memory import give_back, keep_memory
from raytrec.data.canonical import canonical, nothing, shuffled
from raytrec.data.columns import Place
from raytrec.data.form import Form
from raytrec.data.fragments import Dataset
from raytrec.data.order import Item, Part
from raytrec.data.pages.decode import Faults, decode_columns
from raytrec.data.transform import Draw, apply_transforms

AHEAD = 2  # items that are decoded before they are asked for, each in a thread
NICE = 10  # of the threads that decode
MOST_BAD_ROWS = 64  # of one row group that are looked for one by one; beyond them, the rest is skipped
CHECKED_ROWS = 1 << 16  # read at a time
MOST_ACCUSED = 4  # row groups that are read because of their footers


def read_items(items: Any, form: Form, faults: Faults | None, index: pa.Table) -> Iterator[pa.Table]:
    """One Ray Data task: the items whose places in the list stand in the column `id` of `index`.

    The next items are decoded in threads while this one is checked and handed over.

    Args:
        items: ray.ObjectRef of the whole list.
    """
    whole = _fetched(items)
    mine = [whole[i] for i in index["id"].to_pylist()]
    with ThreadPoolExecutor(AHEAD, initializer=_give_way) as thread:
        coming = deque(thread.submit(decode_item, item, form) for item in mine[:AHEAD])
        for item, following in zip_longest(mine, mine[AHEAD:]):
            decoded = coming.popleft().result()
            if following is not None:
                coming.append(thread.submit(decode_item, following, form))
            yield finish_item(item, decoded, form, faults)
    give_back()


def _give_way() -> None:
    """Lower the priority of this thread, so that decoding does not hold up a rank, for which all would wait.

    On Linux, each thread has its own priority. Only root may raise it, and Ray may have set a lower one.
    """
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, 0, max(NICE, os.getpriority(os.PRIO_PROCESS, 0)))


@lru_cache(maxsize=2)  # of this epoch and the next
def _fetched(items: Any) -> list[Item]:
    import ray

    return ray.get(items)


def read_item(item: Item, form: Form, faults: Faults | None = None) -> pa.Table:
    """The rows of an item in canonical form, shuffled if it has a seed; always as many as the item has.

    Raises:
        DataError: a row group that cannot be decoded, or a value that the schema does not allow; names file,
            row group, column and row. Under `faults.skip` those rows are not present instead.
    """
    return finish_item(item, decode_item(item, form), form, faults)


def decode_item(item: Item, form: Form) -> list[pa.Table | DataError]:
    """The rows of each row group that an item's parts span, decoded once, or what is wrong with it."""
    keep_memory()
    decoded: list[pa.Table | DataError] = []
    for (path, group), parts in _groups(item):
        try:
            first, last = _span(parts)
            place = path, group, first, last - first
            decoded.append(decode_columns(*place, form.columns, form.folders))
        except DataError as error:
            decoded.append(error)
    return decoded


def finish_item(
    item: Item, decoded: list[pa.Table | DataError], form: Form, faults: Faults | None = None
) -> pa.Table:
    """The rest of `read_item`, after `decode_item`."""
    pieces = []
    for ((path, group), parts), table in zip(_groups(item), decoded, strict=True):
        draw = Draw(item.draw, parts[0].number - parts[0].first + _span(parts)[0])
        pieces.append(_finish_group(Place(path, group, 0), parts, table, form, faults or Faults(), draw))
    table = pieces[0] if len(pieces) == 1 else pa.concat_tables(pieces)
    if item.seed is not None:
        table = shuffled(table, np.random.default_rng(item.seed))
    return table.slice(item.skip) if item.skip else table


def _groups(item: Item) -> list[tuple[tuple[str, int], list[Part]]]:
    """((file, row group), its parts) of an item."""
    found = groupby(item.parts, key=lambda part: (part.path, part.group))
    return [(key, list(parts)) for key, parts in found]


def _span(parts: list[Part]) -> tuple[int, int]:
    """The rows [first, last) of a row group from the first of its parts to the last."""
    starts, stops = zip(*(part.span() for part in parts), strict=True)
    return min(starts), max(stops)


def _finish_group(
    place: Place, parts: list[Part], table: pa.Table | DataError, form: Form, faults: Faults, draw: Draw
) -> pa.Table:
    """The parts of one row group.

    Args:
        table: the rows that they span. draw: by what those draw ids.
    """
    try:
        if isinstance(table, DataError):
            raise table
        where = f"{place.path}, row group {place.group}"
        table = apply_transforms(table, form.plan.transforms, where, form.plan.folder, draw)
    except DataError as error:
        rows = sum(part.rows for part in parts)
        faults.leave_out(error, rows)
        return _absent(rows, form)
    first, _ = _span(parts)
    place = replace(place, first=first)
    whole = _present(table, form, place, faults) if faults.skip else canonical(table, form, place)
    if len(parts) == 1 and parts[0].split is None:
        return whole
    return pa.concat_tables([_rows_of(part, whole, first) for part in parts])


def _rows_of(part: Part, table: pa.Table, first: int) -> pa.Table:
    """Return the rows of a part from a table whose first row has the place `first` in the row group."""
    if part.split is None:
        return table.slice(part.first - first, part.rows)
    return table.take(pa.array(part.split.rows()[part.first : part.first + part.rows] - first))


def _present(table: pa.Table, form: Form, place: Place, faults: Faults, left: list | None = None) -> pa.Table:
    """The canonical form with a column `present`: bad rows, found by halving, are empty and not present."""
    left = [MOST_BAD_ROWS] if left is None else left
    try:
        return canonical(table, form, place).append_column("present", pa.array(np.ones(len(table), bool)))
    except DataError as error:
        if len(table) == 1 or not left[0]:
            left[0] -= left[0] > 0
            faults.leave_out(error, len(table))
            return _absent(len(table), form)
    half = len(table) // 2
    after = Place(place.path, place.group, place.first + half)
    first_half = _present(table.slice(0, half), form, place, faults, left)
    return pa.concat_tables([first_half, _present(table.slice(half), form, after, faults, left)])


def _absent(rows: int, form: Form) -> pa.Table:
    """Rows that are skipped."""
    return nothing(form, rows).append_column("present", pa.array(np.zeros(rows, bool)))


def check_accused(dataset: Dataset) -> None:
    """Reads the first row groups that hold what the schema does not allow, by their footers.

    Raises:
        DataError: they do; names file, row group, column and row.
    """
    for group in dataset.accused[:MOST_ACCUSED]:
        for first in range(0, group.rows, CHECKED_ROWS):
            part = Part(group.path, group.index, first, min(CHECKED_ROWS, group.rows - first))
            read_item(Item(0, 0, (part,), None), dataset.form)
