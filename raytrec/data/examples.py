"""Examples in rows: candidates, labels, and how much each example counts in each task. No torch here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import pyarrow as pa

from raytrec.common.errors import DataError
from raytrec.config.schema import scalar
from raytrec.data.arrow import is_list, one_array, unnest
from raytrec.data.columns import (
    Place,
    first_null,
    first_true,
    first_unlike,
    numbers,
    numbers_or_none,
    rows_of,
)
from raytrec.data.form import Form

# A label's values float32 [n], and in which rows there is one, bool [n]; None: in all.
Label = tuple[np.ndarray, np.ndarray | None]


def label_of(column: pa.ChunkedArray, name: str, form: Form, place: Place) -> Label:
    """A label as its tasks' losses take it; where there is none, the number nearest to 0 that they take.

    Raises:
        DataError: a number that they do not take, or no number where one must be.
    """
    allowed = form.plan.label_range(name)
    if form.plan.skips_nulls(name):
        values, there = numbers_or_none(column, name, place)
        if allowed:
            values[~there] = np.clip(np.float32(0), *allowed)
    else:
        also = f"tasks: [{{label: {scalar(name)}, nulls: skip}}]; or "
        values, there = numbers(column, name, place, also), None
    low, high = allowed or (-np.inf, np.inf)
    wrong, kind = (values < low) | (values > high), "number"
    if name in form.plan.whole_labels:
        wrong, kind = wrong | (values != np.floor(values)), "whole number"
    if (row := first_true(wrong)) is not None:
        raise DataError(
            f"label '{name}' is {values[row]:g}",
            where=place.of(name, row),
            expected=f"a {kind} in [{low:g}, {high:g}], which its task's loss takes",
            do=f"data.transforms: {{do: binarize, columns: [{scalar(name)}], at_least: NUMBER}}; or learn "
            f"the number itself: tasks: [{{label: {scalar(name)}, loss: mse}}]",
        )
    return values, there


def task_weights(table: pa.Table, labels: dict[str, Label], form: Form, place: Place) -> list[np.ndarray]:
    """Each row's factor in each task, float32 [n] ≥ 0: its sample weight; 0 where it has no label of the task
    and where the mask excludes it.

    Args:
        table: with the columns of masks and weights.
        labels: of the same rows.

    Raises:
        DataError: a mask that is neither 0 nor 1, or a weight that is not a finite number ≥ 0.
    """
    ones = np.ones(table.num_rows, np.float32)

    def reads(read: Callable) -> Callable:  # a column that several tasks name is read once
        return cache(lambda name: read(table[name], name, place))

    factor_of, mask_of, out = reads(_factors), reads(_mask), []
    for task in form.plan.tasks:
        weights = factor_of(task.sample_weight) if task.sample_weight else ones
        counts = [labels[task.label][1] if task.nulls == "skip" else None]
        if task.mask:
            counts.append(mask_of(task.mask))
        if task.mask_label:
            values, there = labels[task.mask_label]
            counts += [values == 1, there]
        for mask in counts:
            weights = weights if mask is None else weights * mask
        out.append(weights)
    return out


def _factors(column: pa.ChunkedArray, name: str, place: Place) -> np.ndarray:
    values = numbers(column, name, place)
    if (row := first_true(values < 0)) is not None:
        raise DataError(
            f"sample weight '{name}' is {values[row]:g}",
            where=place.of(name, row),
            expected="a finite number ≥ 0",
            do=f"data.transforms: {{do: clip, columns: [{scalar(name)}], low: 0}}; or skip such rows: "
            "data.on_error=skip",
        )
    return values


def _mask(column: pa.ChunkedArray, name: str, place: Place) -> np.ndarray:
    """Where a column is 1; a null is not."""
    values, _ = numbers_or_none(column, name, place)
    if (row := first_true((values != 0) & (values != 1))) is not None:
        raise DataError(
            f"mask '{name}' is {values[row]:g}",
            where=place.of(name, row),
            expected="0 or 1 (false or true) in a column that a task's `mask` names",
            do=f"data.transforms: {{do: binarize, columns: [{scalar(name)}], at_least: NUMBER}}",
        )
    return values == 1


@dataclass(frozen=True)
class CandidatePlace(Place):
    """Where the first candidate of a decoded table is.

    Attributes:
        offsets: int32 [rows + 1], from which candidate on each row's are.
    """

    offsets: np.ndarray

    def of(self, column: str, row: int | None = None) -> str:
        """The place of a candidate's value, by the row that it is in."""
        return super().of(column, None if row is None else rows_of(self.offsets)(row))


def candidates_of(table: pa.Table, form: Form, place: Place) -> tuple[pa.Table, CandidatePlace]:
    """What tasks and dense candidates read of the rows, one row for each candidate, and where these are.

    Other columns are of the request, and repeated.

    Raises:
        DataError: the lists of a row have different lengths, or one is null; names file, column and row.
    """
    schema, offsets, found, first = form.schema, None, {}, ""
    extra = [read.column for read in form.plan.columns_of_tasks]
    of_tasks = dict.fromkeys([*form.plan.labels, *schema.of_candidates(schema.dense), *extra])
    lists = dict.fromkeys(
        schema.column_of(name) if name in schema.sparse else name
        for name in schema.candidates
        if form.plan.read_labels or name not in schema.labels
    )
    lists |= {name: None for name in of_tasks if is_list(table[name].type)}
    for name in lists:
        array = one_array(table[name])
        if (row := first_null(array)) is not None:
            raise DataError(
                f"column '{name}' has a null in place of a list",
                where=place.of(name, row),
                expected="a value for each candidate; an empty list where a request has none",
                do="correct the data; or skip such rows: data.on_error=skip",
            )
        ends, values = unnest(array)
        offsets, first = (ends, name) if offsets is None else (offsets, first)
        if unlike := first_unlike(ends, offsets):
            row, length, other = unlike
            raise DataError(
                f"'{name}' has {length} values, and '{first}' has {other}",
                where=place.of(name, row),
                expected="one value for each candidate of the row",
                do=f"correct the data, or schema.yaml, candidates: [{scalar(first)}, {scalar(name)}, …]",
            )
        found[name] = values
    rows = pa.array(np.repeat(np.arange(table.num_rows), np.diff(offsets)))
    columns = {name: found[name] if name in found else table[name].take(rows) for name in of_tasks}
    return pa.table(columns), CandidatePlace(place.path, place.group, place.first, offsets)
