"""What footers' statistics say against row groups: ids beyond a table, labels out of range, nulls. No torch.

They are in most footers, and cost nothing more to look at. Row groups that they accuse are read before a run
starts (verify.py), so that its error names the row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from decimal import Decimal
from functools import partial
from typing import Any

import pyarrow.parquet as pq

from raytrec.data.form import Form


def accused(metadata: pq.FileMetaData, form: Form) -> list[int]:
    """Row groups that hold what the schema does not allow, as far as the footer's statistics say."""
    leaves: dict[str, list[int]] = {}
    for i in range(metadata.num_columns):
        leaves.setdefault(metadata.schema.column(i).path.partition(".")[0], []).append(i)
    paths = [metadata.schema.column(i).path for i in range(metadata.num_columns)]
    asked = [
        (i, wrong)
        for name, wrong in _questions(form)
        for i in leaves.get(name.partition(".")[0], [])
        if paths[i] == name or paths[i] in (f"{name}.list.element", f"{name}.list.item")
    ]
    found = []
    for index in range(metadata.num_row_groups):
        group = metadata.row_group(index)
        if any(wrong(column) for i, wrong in asked if (column := group.column(i)).is_stats_set):
            found.append(index)
    return found


def _questions(form: Form) -> Iterator[tuple[str, Callable[[pq.ColumnChunkMetaData], bool]]]:
    """(column, whether a chunk of it has what is not allowed) for columns that no transform makes."""
    schema, made = form.schema, {name for transform in form.transforms for name in transform.writes}
    for name in {*schema.labels, *schema.dense} - made:
        allowed = form.label_range(name) if name in schema.labels else None
        yield name, partial(_is_wrong, allowed=allowed)
    for name, spec in schema.sparse.items():
        table, column = schema.tables[spec.table], schema.column_of(name)
        if column not in made and table.out_of_range == "error":
            yield column, partial(_outside, low=0, high=table.rows - 1)


def _is_wrong(chunk: pq.ColumnChunkMetaData, allowed: tuple[float, float] | None) -> bool:
    return _has_null(chunk) or (allowed is not None and _outside(chunk, *allowed))


def _has_null(chunk: pq.ColumnChunkMetaData) -> bool:
    return bool(chunk.statistics.has_null_count and chunk.statistics.null_count)


def _outside(chunk: pq.ColumnChunkMetaData, low: float, high: float) -> bool:
    """Whether there are numbers outside of [low, high]."""
    found = chunk.statistics
    if not found.has_min_max:
        return False
    least, greatest = found.min, found.max
    return _number(least) and _number(greatest) and (least < low or greatest > high)


def _number(value: Any) -> bool:
    return isinstance(value, int | float | Decimal)
