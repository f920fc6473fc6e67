"""Convert number, label and weight columns to checked NumPy arrays. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from raytrec.common.errors import DataError
from raytrec.config.schema import advise_transform, format_yaml_scalar
from raytrec.config.schema_parts import Scale
from raytrec.data.arrow import to_plain_array
from raytrec.data.read_plans import ResolvedReadPlan

UNITS_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
DAY_S = 86_400
SKIP_ADVICE = "skip such rows in new runs, evaluations and predictions: data.on_error=skip"
NULL_LABEL_ADVICE = "set nulls: skip in tasks: [{{label: {label}, nulls: skip}}], or remove a label that no task learns"
FIRST_INEXACT_INTEGER = 2**53  # float64 represents every integer up to this one exactly


@dataclass(frozen=True)
class Place:
    """Location of the first row of a decoded table, for messages.

    Attributes:
        path: Path or URI of the file, or the name of another source.
        group: Index of the row group; None: the rows are not from a file.
        first: Index of the first row in the row group.
        offsets: Index of each row's first candidate, then the total number of candidates, int32 [rows + 1], for a
            table with one row per candidate; None for other tables.
    """

    path: str
    group: int | None
    first: int
    offsets: np.ndarray | None = None

    def of(self, column: str, row: int | None = None) -> str:
        """Return the location of a column, or of its value at index `row` of the table, as text for messages."""
        if row is not None and self.offsets is not None:
            row = make_row_lookup(self.offsets)(row)
        group = "" if self.group is None else f", row group {self.group}"
        where = f"{self.path}{group}, column {column}"
        return where if row is None else f"{where}, row {self.first + row}"


def read_numbers(
    column: pa.ChunkedArray,
    name: str,
    place: Place,
    skips_nulls: bool = False,
    is_label: bool = False,
    dtype: type = np.float32,
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return a column as finite floats, and a mask of the rows with a number.

    Args:
        column: Decoded column.
        name: Column name.
        place: Location of the first row.
        skips_nulls: True to accept nulls and NaN.
        is_label: True for a label; the errors for null and NaN then name the task setting that skips them.
        dtype: Float type of the result.

    Returns:
        Numbers as `dtype` [n], 0 for nulls and NaN; and a mask, bool [n], False for nulls and NaN, or None if
        `skips_nulls` is False.

    Raises:
        DataError: A value is infinite in `dtype`, or a value is null or NaN and `skips_nulls` is False.
    """
    array = to_plain_array(column)
    if not skips_nulls and (row := find_first_null(array)) is not None:
        raise DataError(
            f"column '{name}' contains a null",
            where=place.of(name, row),
            expected=f"a number {'in every row' if place.offsets is None else 'for every candidate'}",
            do=f"{_advise_null(name, is_label)}; or {SKIP_ADVICE}",
        )
    values, is_present = as_floats(array, dtype), None
    if skips_nulls:
        is_present = ~np.isnan(values)
        values = np.where(is_present, values, dtype(0))
    check_finite(values, name, place, is_label=is_label)
    return values, is_present


def read_scaled_column(column: pa.ChunkedArray, name: str, place: Place, scale: Scale | None) -> np.ndarray:
    """Return a dense column with its scale applied, float32 [n]; all values are finite.

    With `nulls: mean`, nulls and NaN become 0, the scaled mean.

    Args:
        column: Decoded column.
        name: Column name.
        place: Location of the first row.
        scale: Scale of the column in the schema; None: the numbers are not changed.

    Raises:
        DataError: A value, or its scaled value, is infinite, or a value is null or NaN and the scale does not
            replace it.
    """
    if scale is None:
        return read_numbers(column, name, place)[0]
    x, is_present = read_numbers(column, name, place, skips_nulls=scale.nulls == "mean", dtype=np.float64)
    x = signed_log(x) if scale.log else x
    x = standardize(x, scale.mean, scale.std)
    check_finite(x, name, place, what="scaled column")
    return x if is_present is None else np.where(is_present, x, np.float32(0))


def standardize(values: np.ndarray, mean: float | np.ndarray, std: float | np.ndarray) -> np.ndarray:
    """Return (x − mean) ÷ std of each number x as float32; results beyond float32's range become infinite."""
    with np.errstate(over="ignore"):
        return ((values - mean) / std).astype(np.float32)


def signed_log(values: np.ndarray) -> np.ndarray:
    """Return sign(x) · ln(1 + |x|) for each number x, the logarithm of `Scale.log`."""
    return np.sign(values) * np.log1p(np.abs(values))


def as_floats(array: pa.Array, dtype: type) -> np.ndarray:
    """Return an array of numbers as floats of type `dtype`, [n]; NaN for nulls."""
    is_exact = not array.null_count and (pa.types.is_integer(array.type) or pa.types.is_float64(array.type))
    if is_exact or pa.types.is_float32(array.type):  # faster than Arrow's cast
        with np.errstate(over="ignore"):
            return array.to_numpy(zero_copy_only=False).astype(dtype, copy=False)
    if pa.types.is_decimal(array.type):  # a direct cast to float32 has more than the rounding error
        array = array.cast(pa.float64())
    return array.cast(pa.from_numpy_dtype(dtype), safe=False).to_numpy(zero_copy_only=False)


def find_first_null(array: pa.Array) -> int | None:
    """Return the index of the first null in an array, or None if there is no null."""
    return pc.index(array.is_null(), True).as_py() if array.null_count else None


def _advise_null(name: str, is_label: bool) -> str:
    if is_label:
        return NULL_LABEL_ADVICE.format(label=format_yaml_scalar(name))
    return advise_transform("fill_null", name, value="NUMBER")


def find_first_true(wrong: np.ndarray) -> int | None:
    """Return the index of the first True in a bool array, or None if all values are False."""
    return int(wrong.argmax()) if wrong.any() else None


def check_finite(
    values: np.ndarray,
    name: str,
    place: Place,
    rows: Callable[[int], int] = int,
    what: str = "column",
    is_label: bool = False,
) -> None:
    """Raise DataError if a value is NaN or infinite.

    Args:
        values: Values of the column, float [n].
        name: Column name.
        place: Location of the first row.
        rows: Function from the index of a value to the index of its row; default: one value per row.
        what: Noun for the column in the message.
        is_label: True if the column is a label.
    """
    if (index := find_first_true(~np.isfinite(values))) is not None:
        clip = advise_transform("clip", name, low="NUMBER", high="NUMBER")
        raise DataError(
            f"{what} '{name}' contains " + ("NaN" if np.isnan(values[index]) else f"{values[index]} as {values.dtype}"),
            where=place.of(name, rows(index)),
            expected=f"finite {values.dtype} numbers",
            do=f"{_advise_null(name, is_label) if np.isnan(values[index]) else clip}; or {SKIP_ADVICE}",
        )


def find_first_length_mismatch(ends: np.ndarray, offsets: np.ndarray) -> tuple[int, int, int] | None:
    """Return the first row whose two lists differ in length, and the lengths of both lists; None if no row differs.

    Args:
        ends: Offsets of a column of lists, int32 [n + 1] from 0.
        offsets: Offsets of another column of lists, int32 [n + 1] from 0.
    """
    if np.array_equal(ends, offsets):
        return None
    lengths, other_lengths = np.diff(ends), np.diff(offsets)
    row = int((lengths != other_lengths).argmax())
    return row, int(lengths[row]), int(other_lengths[row])


def make_row_lookup(offsets: np.ndarray) -> Callable[[int], int]:
    """Return a function from the index of a value in flattened lists to the index of its row, given the offsets."""
    return lambda index: int(np.searchsorted(offsets, index, side="right")) - 1


def to_float64(array: pa.Array) -> np.ndarray:
    """Return numbers, times as seconds since 1970, or durations as seconds, in float64; NaN for nulls."""
    kind = array.type
    scale: float = 1
    if types.is_timestamp(kind) or types.is_duration(kind):
        array, scale = array.cast(pa.int64()), UNITS_PER_SECOND[kind.unit]
    elif types.is_date(kind):
        array, scale = array.cast(pa.date32()).cast(pa.int32()), 1 / DAY_S
    return array.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False) / scale


# Values of a label, float32 [n], and a mask that is True for rows with the label, bool [n]; None: all rows
# have it.
LabelValues = tuple[np.ndarray, np.ndarray | None]


def read_label(column: pa.ChunkedArray, name: str, form: ResolvedReadPlan, place: Place) -> LabelValues:
    """Return the values of a label, and a mask of the rows that have the label (LabelValues).

    In rows without the label, the value is the allowed value nearest to 0.

    Raises:
        DataError: A value is infinite, outside the range of the losses, or not a whole number although a loss
            requires whole numbers; or a value is null or NaN, and the label's tasks do not skip such rows.
    """
    allowed = form.plan.label_range(name)
    values, is_present = read_numbers(column, name, place, form.plan.skips_nulls(name), is_label=True)
    if allowed and is_present is not None:
        values[~is_present] = np.clip(np.float32(0), *allowed)
    low, high = allowed or (-np.inf, np.inf)
    invalid, kind = (values < low) | (values > high), "number"
    if name in form.plan.whole_labels:
        invalid, kind = invalid | (values != np.floor(values)), "whole number"
    if (row := find_first_true(invalid)) is not None:
        if name in form.plan.whole_labels:
            do = "correct the data, or set the loss's option classes (if it has one) above the largest label"
        else:
            do = f"correct the data; or {advise_transform('binarize', name, at_least='NUMBER')}; or learn the number "
            do += f"with a regression loss: tasks: [{{label: {format_yaml_scalar(name)}, loss: mse}}]"
        raise DataError(
            f"label '{name}' is {values[row]:.9g}",
            where=place.of(name, row),
            expected=f"a {kind} in [{low:g}, {high:g}], the range of the task's loss",
            do=do,
        )
    return values, is_present


def task_weights(
    table: pa.Table, labels: dict[str, LabelValues], form: ResolvedReadPlan, place: Place
) -> list[np.ndarray]:
    """Return, for each task in order, the factor of each row's loss, float32 [n] ≥ 0.

    The factor is 0 for rows without a label of the task and for rows that the task's mask or mask_label
    excludes. For other rows, the factor is the sample weight, or 1 if the task has none.

    Args:
        table: Table with the masks and sample weights of the tasks.
        labels: Label → values and mask of the same rows.
        form: Resolved read plan of the rows.
        place: Location of the first row.

    Raises:
        DataError: A mask value is not 0, 1, null or NaN; or a sample weight is not a finite number ≥ 0.
    """
    ones = np.ones(table.num_rows, np.float32)

    def read_once(read: Callable) -> Callable:  # columns named by several tasks are read once
        return cache(lambda name: read(table[name], name, place))

    factor_of, mask_of, weights_of_tasks = read_once(_read_sample_weights), read_once(_read_mask), []
    for task in form.plan.tasks:
        weights = factor_of(task.sample_weight) if task.sample_weight else ones
        masks = [labels[task.label][1] if task.nulls == "skip" else None]
        if task.mask:
            masks.append(mask_of(task.mask))
        if task.mask_label:
            values, is_labelled = labels[task.mask_label]
            masks += [values == 1, is_labelled]
        for mask in masks:
            weights = weights if mask is None else weights * mask
        weights_of_tasks.append(weights)
    return weights_of_tasks


def _read_sample_weights(column: pa.ChunkedArray, name: str, place: Place) -> np.ndarray:
    values, _ = read_numbers(column, name, place)
    if (row := find_first_true(values < 0)) is not None:
        raise DataError(
            f"sample weight '{name}' is {values[row]:g}",
            where=place.of(name, row),
            expected="a finite number ≥ 0",
            do=f"correct the data; or {advise_transform('clip', name, low=0)}; or {SKIP_ADVICE}",
        )
    return values


def _read_mask(column: pa.ChunkedArray, name: str, place: Place) -> np.ndarray:
    """Return a mask column as bool [n]: True for 1; False for 0, null and NaN."""
    values, _ = read_numbers(column, name, place, skips_nulls=True)
    if (row := find_first_true((values != 0) & (values != 1))) is not None:
        raise DataError(
            f"mask '{name}' is {values[row]:.9g}",
            where=place.of(name, row),
            expected="0, 1, false, true or null in the column of a task's `mask`",
            do=advise_transform("binarize", name, at_least="NUMBER"),
        )
    return values == 1
