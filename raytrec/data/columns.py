"""One Parquet column as checked NumPy arrays. No torch here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from raytrec.common.errors import DataError
from raytrec.config.schema import Scale, Sparse, Table, scalar
from raytrec.data.arrow import is_list, is_text, one_array, unnest
from raytrec.data.hashing import hash_integers, hash_text, hash_text_bits

NO_MANAGED_ID = -(2**63)  # in the place of a managed id where there is none
PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
DAY_S = 86_400
EXACT = 2**53  # from here on, floats do not hold every integer


@dataclass(frozen=True)
class Place:
    """Where the first row of a decoded table is: file, row group (None: rows of no file), row in it."""

    path: str
    group: int | None
    first: int

    def of(self, column: str, row: int | None = None) -> str:
        """The place of a value, in words."""
        group = "" if self.group is None else f", row group {self.group}"
        where = f"{self.path}{group}, column {column}"
        return where if row is None else f"{where}, row {self.first + row}"


def numbers(
    column: pa.ChunkedArray, name: str, place: Place, also: str = "", dtype: type = np.float32
) -> np.ndarray:
    """A column of numbers as float32 [n], or of another float type; no null, NaN or infinity.

    Args:
        also: what else can be done about a null.
    """
    array = one_array(column)
    if (row := first_null(array)) is not None:
        raise DataError(
            f"column '{name}' has a null",
            where=place.of(name, row),
            expected="a number in every row of a dense column, label or sample weight",
            do=f"{also}data.transforms: {{do: fill_null, columns: [{scalar(name)}], value: 0}}; or skip such "
            "rows: data.on_error=skip",
        )
    values = _as_floats(array, dtype)
    _finite(values, name, place)
    return values


def scaled(column: pa.ChunkedArray, name: str, place: Place, scale: Scale | None) -> np.ndarray:
    """A dense column as it is read: float32 [n], finite.

    Args:
        scale: the schema's; None: numbers as they are.
    """
    if scale is None:
        return numbers(column, name, place)
    if scale.nulls == "mean":
        x, there = numbers_or_none(column, name, place, np.float64)
    else:
        x, there = numbers(column, name, place, dtype=np.float64), None
    x = signed_log(x) if scale.log else x
    with np.errstate(over="ignore"):
        x = ((x - scale.mean) / scale.std).astype(np.float32)
    _finite(x, name, place)
    return x if there is None else np.where(there, x, np.float32(0))


def signed_log(values: np.ndarray) -> np.ndarray:
    """sign(x) · ln(1 + |x|) of each number (Scale.log)."""
    return np.sign(values) * np.log1p(np.abs(values))


def numbers_or_none(
    column: pa.ChunkedArray, name: str, place: Place, dtype: type = np.float32
) -> tuple[np.ndarray, np.ndarray]:
    """A column of numbers, some of which may be missing (null, or NaN): (float32 [n], or of another float
    type, with 0 for those; which are there, bool [n]); no infinity."""
    values = _as_floats(one_array(column), dtype)
    there = ~np.isnan(values)
    values = np.where(there, values, dtype(0))
    _finite(values, name, place)
    return values, there


def _as_floats(array: pa.Array, dtype: type) -> np.ndarray:
    """Numbers as floats of a type, [n]; NaN for a null."""
    whole = not array.null_count and (pa.types.is_integer(array.type) or pa.types.is_float64(array.type))
    if whole or pa.types.is_float32(array.type):  # faster than Arrow's cast
        with np.errstate(over="ignore"):
            return array.to_numpy(zero_copy_only=False).astype(dtype, copy=False)
    if pa.types.is_decimal(array.type):  # straight to float32 is off by more than its rounding
        array = array.cast(pa.float64())
    return array.cast(pa.from_numpy_dtype(dtype), safe=False).to_numpy(zero_copy_only=False)


def first_null(array: pa.Array) -> int | None:
    """Return the place of the first null, or None."""
    return pc.index(array.is_null(), True).as_py() if array.null_count else None


def first_true(wrong: np.ndarray) -> int | None:
    """Return the place of the first True, or None."""
    return int(wrong.argmax()) if wrong.any() else None


def _finite(values: np.ndarray, name: str, place: Place, rows: Callable[[int], int] = int) -> None:
    if (at := first_true(~np.isfinite(values))) is not None:
        raise DataError(
            f"column '{name}' has {values[at]:g}".replace("nan", "NaN"),
            where=place.of(name, rows(at)),
            expected="finite numbers",
            do=f"data.transforms: {{do: fill_null, columns: [{scalar(name)}], value: 0}} for NaN, clip or "
            "log for what is too large; or skip such rows: data.on_error=skip",
        )


# Feature → (ids that were brought into range, all ids).
Tally = dict[str, tuple[int, int]]


@dataclass(frozen=True)
class Feature:
    """A sparse feature whose ids are read.

    Attributes:
        place: of the first row. tally: receives its counts.
    """

    name: str
    spec: Sparse
    table: Table
    place: Place
    tally: Tally


def single(column: pa.ChunkedArray, feature: Feature, no_id: int) -> np.ndarray:
    """Return a sparse column with one id a row: valid ids [n] of any integer type; `no_id` for nulls.

    Whole floats (integers with nulls, as pandas writes them) are ids, and NaN is a null.
    """
    array = one_array(column)
    if is_list(array.type):
        raise DataError(
            f"feature '{feature.name}' is a list here",
            where=feature.place.of(feature.name),
            expected="one id a row, as when the files' columns were looked at",
            do="do not change the files while they are read",
        )
    array = _whole_floats(array, feature)
    if array.null_count == 0 and pa.types.is_integer(array.type):
        return _in_range(array.to_numpy(), feature, int)
    offsets, flat = unnest(array)
    ids = np.full(len(array), no_id, np.int64)
    ids[np.diff(offsets) > 0] = _ids(flat, feature, rows_of(offsets))
    return ids


def bags(
    column: pa.ChunkedArray, weights: pa.ChunkedArray | None, feature: Feature
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """A sparse column as bags of valid ids.

    Returns:
        offsets int32 [n + 1] from 0, ids (of any integer type) [offsets[n]], weights float32 or None. A null
        row is an empty bag.
    """
    offsets, flat = unnest(_whole_floats(one_array(column), feature))
    name, spec, rows = feature.name, feature.spec, rows_of(offsets)
    if (at := first_null(flat)) is not None:
        raise DataError(
            f"feature '{name}' has a null inside a list",
            where=feature.place.of(name, rows(at)),
            expected="ids; an empty list, or null for the whole list, when there are none",
            do=f"data.transforms: {{do: drop_null, columns: [{scalar(spec.column or name)}]}}",
        )
    ids = _ids(flat, feature, rows)
    if weights is None:
        return offsets, ids, None
    per_id = _one_for_each(weights, spec.weights, name, offsets, feature.place)
    per_id = per_id.cast(pa.float32(), safe=False).to_numpy(zero_copy_only=False)
    _finite(per_id, spec.weights, feature.place, rows)
    return offsets, ids, per_id


def _one_for_each(
    column: pa.ChunkedArray, name: str, feature: str, offsets: np.ndarray, place: Place
) -> pa.Array:
    """The flat values of a column of lists as long as those of a feature's ids."""
    ends, flat = unnest(one_array(column))
    if unlike := first_unlike(ends, offsets):
        row, length, ids = unlike
        raise DataError(
            f"'{name}' has {length} values for {ids} ids of '{feature}'",
            where=place.of(name, row),
            expected="one value for each id",
        )
    if (at := first_null(flat)) is not None:
        raise DataError(
            f"column '{name}' has a null inside a list",
            where=place.of(name, rows_of(offsets)(at)),
            expected=f"a value for each id of '{feature}'",
            do="correct the data; or skip such rows: data.on_error=skip",
        )
    return flat


def first_unlike(ends: np.ndarray, offsets: np.ndarray) -> tuple[int, int, int] | None:
    """The first row whose lists have different lengths, and these; None: there is none.

    Args:
        ends, offsets: of two columns of lists, int32 [n + 1] from 0.
    """
    if np.array_equal(ends, offsets):
        return None
    lengths, others = np.diff(ends), np.diff(offsets)
    row = int((lengths != others).argmax())
    return row, int(lengths[row]), int(others[row])


def rows_of(offsets: np.ndarray) -> Callable[[int], int]:
    """From a position in the flat values to its row, for errors."""
    return lambda at: int(np.searchsorted(offsets, at, side="right")) - 1


def _whole_floats(array: pa.Array, feature: Feature) -> pa.Array:
    """Return a column of floats, which are ids, as int64, with nulls for NaN; other columns as they are.

    Raises:
        DataError: A value has a fraction, or is too large to be an exact integer.
    """
    if not pa.types.is_floating(array.type):
        return array
    values = _as_floats(array, np.float64)
    missing = np.isnan(values)
    exact = missing | ((np.abs(values) < EXACT) & (values == np.floor(values)))
    if (row := first_true(~exact)) is not None:
        column = scalar(feature.spec.column or feature.name)
        raise DataError(
            f"feature '{feature.name}' has {values[row]:.17g}",
            where=feature.place.of(feature.name, row),
            expected="ids: whole numbers below 2**53 in a column of floats",
            do=f"list it under dense; or data.transforms: {{do: bucketize, columns: [{column}], boundaries: "
            "[…]}; or skip such rows: data.on_error=skip",
        )
    return pa.array(np.where(missing, 0, values).astype(np.int64), mask=missing)


def _ids(flat: pa.Array, feature: Feature, rows: Callable[[int], int]) -> np.ndarray:
    """Valid ids as integers; text is hashed to rows, or where ids are managed to 64 bits.

    Args:
        rows: see `_in_range`.
    """
    table = feature.table
    if pa.types.is_null(flat.type):  # all rows, or lists, are empty
        flat = flat.cast(pa.int64())
    if not is_text(flat.type):
        return _in_range(flat.to_numpy(zero_copy_only=False), feature, rows)
    ids = _in_range(hash_text_bits(flat) if table.ids else hash_text(flat, table.rows), feature, rows)
    if not table.ids:  # text that has been hashed into a table's rows counts as brought into range
        feature.tally[feature.name] = len(flat), len(flat)
    return ids


def _in_range(ids: np.ndarray, feature: Feature, rows: Callable[[int], int]) -> np.ndarray:
    """Ids of unchanged width that are all in [0, table.rows): the table's policy for others. Managed ones are
    int64 of any value, of the same bits.

    Args:
        rows: position in `ids` → row, for errors.
    """
    name, table, tally = feature.name, feature.table, feature.tally
    tally[name] = 0, len(ids)
    if table.ids:
        return np.maximum(ids.astype(np.int64), NO_MANAGED_ID + 1)
    if not len(ids) or _all_below(ids, table.rows):
        return ids
    outside = (ids < 0) | (ids >= table.rows)
    tally[name] = int(outside.sum()), len(ids)
    if table.out_of_range == "error":
        at, key = int(outside.argmax()), f"tables.{feature.spec.table}"
        raise DataError(
            f"id {ids[at]} of feature '{name}' is not in table '{feature.spec.table}'",
            where=feature.place.of(name, rows(at)),
            expected=f"0 ≤ id < {table.rows} ({key}.rows)",
            do=f"correct the data or {key}.rows, or set {key}.out_of_range to clamp or hash, or {key}.ids to "
            "managed",
        )
    if table.out_of_range == "clamp":
        return np.clip(ids, 0, table.rows - 1).astype(np.int64)
    return np.where(outside, hash_integers(ids, table.rows), ids.astype(np.int64))


def _all_below(ids: np.ndarray, rows: int) -> bool:
    """Whether all of some integers [n], n ≥ 1, are in [0, rows)."""
    bits = 8 * ids.itemsize
    if ids.dtype.kind == "i" and rows <= 1 << (bits - 1):
        # One look instead of two: without a sign, a negative one is larger than all others.
        ids = ids.view(f"uint{bits}")
        return int(np.maximum.reduce(ids)) < rows
    return int(ids.min()) >= 0 and int(ids.max()) < rows


def side_features(
    table: pa.Table, feature: str, spec: Sparse, offsets: np.ndarray, place: Place
) -> np.ndarray:
    """The side features of each id of a sequence: float64 [N, side features], times as seconds since 1970.

    Args:
        offsets: int32 [n + 1], of the ids, from 0.

    Raises:
        DataError: another number of values than of ids; a null, NaN or infinity.
    """
    out = np.empty((int(offsets[-1]), len(spec.side_features)))
    for number, column in enumerate(spec.side_features):
        out[:, number] = as_float64(_one_for_each(table[column], column, feature, offsets, place))
        _finite(out[:, number], column, place, rows_of(offsets))
    return out


def as_float64(array: pa.Array) -> np.ndarray:
    """Numbers as they are, times in seconds (of days: of their beginning in UTC): float64; NaN for a null."""
    kind = array.type
    scale: float = 1
    if types.is_timestamp(kind) or types.is_duration(kind):
        array, scale = array.cast(pa.int64()), PER_SECOND[kind.unit]
    elif types.is_date(kind):
        array, scale = array.cast(pa.date32()).cast(pa.int32()), 1 / DAY_S
    return array.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False) / scale
