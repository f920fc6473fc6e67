"""Functions that apply individual transforms to arrays of values. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import types

from raytrec.common.storage import open_filesystem, read_text, split_query
from raytrec.config import transforms as t
from raytrec.data.arrow import is_number, is_text, to_plain_array
from raytrec.data.column_conversion import UNITS_PER_SECOND, to_float64
from raytrec.data.ids import hash_integers, hash_text

# Transform class → function (transform, values) that returns an array of the same length.
VALUE_FUNCTIONS: dict[type, Callable[..., pa.Array]] = {}
TIME_PARTS = {
    "second": pc.second,
    "minute": pc.minute,
    "hour": pc.hour,
    "weekday": pc.day_of_week,  # 0 is Monday
    "day": pc.day,
    "day_of_year": pc.day_of_year,
    "week": pc.iso_week,
    "month": pc.month,
    "quarter": pc.quarter,
    "year": pc.year,
    "hour_of_week": lambda array: pc.add(pc.multiply(pc.day_of_week(array), 24), pc.hour(array)),
}
SECONDS = {"seconds": 1, "minutes": 60, "hours": 3600, "days": 86400}


def register_transform(kind: type) -> Callable[[Callable[..., pa.Array]], Callable[..., pa.Array]]:
    """Return a decorator that enters a function in VALUE_FUNCTIONS under a transform class of config/transforms.py."""
    return lambda function: VALUE_FUNCTIONS.setdefault(kind, function)


@register_transform(t.FillNull)
def _fill_null(spec: t.FillNull, array: pa.Array) -> pa.Array:
    if pa.types.is_floating(array.type):
        array = pc.if_else(pc.is_nan(array), pa.scalar(None, array.type), array)
    return pc.fill_null(array, _scalar(spec.value, array.type))


def _scalar(value: float | int | str, kind: pa.DataType) -> pa.Scalar:
    """Return the value of a transform's setting as a scalar of a column's type.

    Decimals are converted from text, because pyarrow casts an int64 only to decimals that can hold every int64.
    """
    return pa.scalar(str(value) if pa.types.is_decimal(kind) else value).cast(kind)


@register_transform(t.Clip)
def _clip(spec: t.Clip, array: pa.Array) -> pa.Array:
    if spec.low is not None:
        array = pc.if_else(pc.less(array, spec.low), _scalar(spec.low, array.type), array)
    if spec.high is not None:
        array = pc.if_else(pc.greater(array, spec.high), _scalar(spec.high, array.type), array)
    return array


@register_transform(t.Log)
def _log(spec: t.Log, array: pa.Array) -> pa.Array:
    number = array.cast(pa.float64(), safe=False)
    return pc.multiply(pc.sign(number), pc.log1p(pc.abs(number))).cast(pa.float32(), safe=False)


@register_transform(t.Decay)
def _decay(spec: t.Decay, array: pa.Array) -> pa.Array:
    age = pc.max_element_wise(array.cast(pa.float64(), safe=False), 0.0, skip_nulls=False)
    share = pc.power(2.0, pc.divide(age, -spec.half_life))
    return pc.add(pc.multiply(share, 1 - spec.floor), spec.floor).cast(pa.float32(), safe=False)


@register_transform(t.Bucketize)
def _bucketize(spec: t.Bucketize, array: pa.Array) -> pa.Array:
    number = array.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)  # a null becomes NaN
    buckets = np.searchsorted(np.array(spec.boundaries), number, side="right")
    return pa.array(buckets, pa.int64(), mask=np.isnan(number))


@register_transform(t.Hash)
def _hash(spec: t.Hash, array: pa.Array) -> pa.Array:
    valid = array.is_valid().to_numpy(zero_copy_only=False)
    flat = array.drop_null()
    if is_text(flat.type):
        ids = hash_text(flat, spec.rows)
    elif pa.types.is_integer(flat.type):
        ids = hash_integers(flat.to_numpy(), spec.rows)
    else:
        raise TypeError(f"hash takes integers or text, not {flat.type}")
    hashed = np.zeros(len(array), np.int64)
    hashed[valid] = ids
    return pa.array(hashed, mask=~valid)


@register_transform(t.LookupVocabulary)
def _lookup_vocabulary(spec: t.LookupVocabulary, array: pa.Array) -> pa.Array:
    vocabulary = read_vocabulary(spec.vocabulary, array.type)
    ids = pc.index_in(array, value_set=vocabulary, skip_nulls=True).cast(pa.int64())
    if spec.unknown is None:
        return ids
    return pc.if_else(array.is_valid(), pc.fill_null(ids, spec.unknown), ids)


@lru_cache
def read_vocabulary(uri: str, kind: pa.DataType | None) -> pa.Array:
    """Return the values of a vocabulary, in the order of its file.

    Args:
        uri: Parquet file, whose first column is read, or text file with one value per line.
        kind: Type of the result; None: the type in the Parquet file, or string for a text file.

    Raises:
        ValueError, pa.ArrowException: The file is not Parquet or UTF-8 text, contains duplicate values, or contains a
            value that cannot be cast to `kind`.
        OSError, DataError: The file cannot be read.
    """
    if split_query(uri)[0].endswith(".parquet"):
        filesystem, path = open_filesystem(uri)
        values = to_plain_array(pq.read_table(path, filesystem=filesystem).column(0))
    else:
        values = pa.array(read_text(uri).splitlines(), pa.string())
    values = values.cast(kind or values.type)
    if len(values.unique()) != len(values):
        raise ValueError(f"{uri} contains duplicate values")
    return values


@lru_cache
def read_cumulative_shares(uri: str, column: str, power: float) -> np.ndarray:
    """Return the start of each id's part of [0, total), then the total (about 2⁴⁰), as int64 [ids + 1].

    The size of a part is proportional to frequency ** power, rounded up, where `column` of the Parquet file `uri`
    contains the frequency of each id; the part of frequency 0 is empty. An id is the index of a row of the file.

    Raises:
        ValueError: A frequency is negative, null or NaN, or the sum of all frequencies is zero or infinite.
        OSError, DataError, pa.ArrowException: The file cannot be read, or the column does not exist or is not numeric.
    """
    filesystem, path = open_filesystem(uri)
    table = pq.read_table(path, columns=[column], filesystem=filesystem)
    counts = to_plain_array(table.column(0)).cast(pa.float64()).to_numpy(zero_copy_only=False)
    if not (counts >= 0).all():
        raise ValueError(f"column {column} of {uri} contains a null, NaN or negative number")
    if not 0 < counts.sum() < np.inf:
        raise ValueError(f"the sum of column {column} of {uri} is {counts.sum():g}; expected a positive, finite sum")
    chances = np.where(counts > 0, counts, 1) ** power * (counts > 0)
    parts = np.ceil(chances / chances.sum() * 2**40).astype(np.int64)
    return np.concatenate([[0], np.cumsum(parts)])


@register_transform(t.Binarize)
def _binarize(spec: t.Binarize, array: pa.Array) -> pa.Array:
    kind = array.type
    if is_number(array.type):
        array = array.cast(pa.float64(), safe=False)
        array = pc.if_else(pc.is_nan(array), pa.scalar(None, pa.float64()), array)
    if spec.at_least is not None:
        if is_text(array.type):
            raise TypeError(f"at_least requires numbers, not {array.type}; for text, set positive: [TEXT, …]")
        return pc.greater_equal(array, float(spec.at_least)).cast(pa.int8())
    if wrong := [value for value in spec.positive if isinstance(value, str) != is_text(array.type)]:
        raise TypeError(
            f"the column has type {kind}, but positive contains {wrong[0]!r}"
            + ("; quote the value (in YAML, unquoted yes, no and numbers are not text)" * is_text(array.type))
        )
    positives = spec.positive if is_text(array.type) else [float(value) for value in spec.positive]
    positives = pa.array(positives).cast(array.type)
    is_positive = pc.is_in(array, value_set=positives).cast(pa.int8())
    return pc.if_else(array.is_valid(), is_positive, pa.scalar(None, pa.int8()))


@register_transform(t.Cast)
def _cast(spec: t.Cast, array: pa.Array) -> pa.Array:
    kind = {"int64": pa.int64(), "float32": pa.float32(), "string": pa.string()}[spec.to]
    if is_text(array.type) and spec.to != "string":
        array = pc.utf8_trim_whitespace(array.cast(pa.string()))
    if types.is_time(array.type) and spec.to != "string":
        raise TypeError("a time of day cannot be cast to numbers; use date_part")
    is_time = types.is_timestamp(array.type) or types.is_date(array.type) or types.is_duration(array.type)
    if is_time and spec.to != "string":
        array = pa.array(np.floor(to_float64(array)), from_pandas=True)  # nulls are NaN
    if pa.types.is_floating(array.type) and spec.to == "int64":  # pandas writes integers with nulls as floats
        array = pc.if_else(pc.is_nan(array), pa.scalar(None, array.type), array)
    if pa.types.is_decimal(array.type) and spec.to == "float32":
        array = array.cast(pa.float64())
    return array.cast(kind, safe=spec.to != "float32")


@register_transform(t.DropNull)
def _drop_null(spec: t.DropNull, array: pa.Array) -> pa.Array:
    return array  # nulls in lists are dropped after every transform


@register_transform(t.DatePart)
def extract_date_part(spec: t.DatePart, array: pa.Array) -> pa.Array:
    """Return the configured part (hour, weekday, …) of each time as int64; null for nulls, NaN and infinite numbers.

    Raises:
        TypeError, pyarrow.ArrowInvalid: The times are invalid (`to_timestamps`), or the time zone is unknown.
    """
    if not types.is_time(array.type):
        array = to_timestamps(array, spec.since_1970)
        if spec.timezone:
            zone = pa.timestamp(array.type.unit, spec.timezone)
            # This raises for an unknown zone even if the array is empty, as in checks at the start.
            pc.hour(pa.array([0], zone))
            array = array.cast(zone)
    return TIME_PARTS[spec.part](array).cast(pa.int64())


@register_transform(t.Age)
def compute_age(spec: t.Age, array: pa.Array, until: pa.Array | None) -> pa.Array:
    """Return the time from each value until an end time, as float32 in `spec.unit`; null if either is null.

    Args:
        spec: Settings of the transform.
        array: Times; or durations, which are only converted to the unit.
        until: End time for each value, ignored for durations; None: `spec.until`.

    Raises:
        TypeError: No end time is given, `until` has a different length, or a type is not supported, or the unit of
            numbers is missing (`to_timestamps`).
        pyarrow.ArrowInvalid: A text is not an ISO time.
    """
    if types.is_duration(array.type):
        seconds = to_float64(array)
    elif until is None and spec.until is None:
        raise TypeError("age requires until or until_column unless the column contains durations")
    elif until is not None and len(until) != len(array):
        raise TypeError("until_column has one time per row, but the times are in lists")
    else:
        ends = to_timestamps(pa.array([spec.until]) if until is None else until, spec.since_1970)
        seconds = to_float64(ends) - to_float64(to_timestamps(array, spec.since_1970))
    return pa.array((seconds / SECONDS[spec.unit]).astype(np.float32), from_pandas=True)  # NaN becomes null


def to_timestamps(array: pa.Array, since_1970: str | None) -> pa.Array:
    """Return times as timestamps; times without a zone are treated as UTC, and infinite numbers and NaN as null.

    Args:
        array: Timestamps, dates, ISO text or numbers.
        since_1970: Unit of numbers: s, ms, us or ns; None: numbers raise an error.

    Raises:
        TypeError: The type is not supported, or the unit of numbers is missing.
        pyarrow.ArrowInvalid: A text is not an ISO time.
    """
    kind = array.type
    if types.is_timestamp(kind):
        return array
    if types.is_date(kind):
        return array.cast(pa.timestamp("s" if types.is_date32(kind) else "ms"))
    if is_text(kind):
        text = array.cast(pa.string())
        zoned = pc.match_substring_regex(text, r"[Tt ].*(Z|z|[+-]\d\d:?\d\d|[+-]\d\d)$")
        utc = pc.if_else(zoned, text, pa.scalar(None, pa.string())).cast(pa.timestamp("us", "UTC"))
        naive = pc.if_else(zoned, pa.scalar(None, pa.string()), text).cast(pa.timestamp("us"))
        return pc.coalesce(utc, naive.cast(utc.type))
    if types.is_integer(kind) or types.is_floating(kind):
        if since_1970 is None:
            raise TypeError(f"the column contains numbers ({kind}): set since_1970 to their unit: s, ms, us or ns")
        if types.is_floating(kind):
            array = pc.if_else(pc.is_finite(array), array, pa.scalar(None, kind))
            scale = 1e6 / UNITS_PER_SECOND[since_1970]
            microseconds = pc.round(pc.multiply(array.cast(pa.float64()), scale)).cast(pa.int64())
            return microseconds.cast(pa.timestamp("us"))
        return array.cast(pa.int64()).cast(pa.timestamp(since_1970))
    raise TypeError(f"times must be timestamps, dates, ISO text, integers or floats, not {kind}")
