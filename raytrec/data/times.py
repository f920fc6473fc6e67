"""Features of times: parts of a date, and ages. No torch here."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from raytrec.config import transforms as t
from raytrec.data.kinds import is_text

PARTS = {
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


def date_part(spec: t.DatePart, array: pa.Array) -> pa.Array:
    """A part of each time as int64; null where the time is null."""
    if not types.is_time(array.type):
        array = timestamps(array, spec.since_1970)
        if spec.timezone:
            zone = pa.timestamp(array.type.unit, spec.timezone)
            pc.hour(pa.array([0], zone))  # an unknown zone is seen before anything starts, without a row
            array = array.cast(zone)
    return PARTS[spec.part](array).cast(pa.int64())


def age(spec: t.Age, array: pa.Array, until: pa.Array | None) -> pa.Array:
    """The time from each one until another, as float32; null where one of them is null.

    Args:
        until: the times that ages count to, one for each; None: spec.until, or none for durations.
    """
    if types.is_duration(array.type):
        unit = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[array.type.unit]
        return _in_unit(pc.divide(array.cast(pa.int64()).cast(pa.float64(), safe=False), float(unit)), spec)
    if until is None and spec.until is None:
        raise TypeError("age needs until or until_column, unless the column holds durations")
    seen = _seconds(timestamps(array, spec.since_1970))
    if until is not None:
        if len(until) != len(array):
            raise TypeError("until_column holds one time a row, and the times are in lists")
        last = _seconds(timestamps(until, spec.since_1970))
    else:
        last = _seconds(timestamps(pa.array([spec.until]), None))[0]
    return _in_unit(pc.subtract(last, seen), spec)


def _in_unit(seconds: pa.Array, spec: t.Age) -> pa.Array:
    return pc.divide(seconds, float(SECONDS[spec.unit])).cast(pa.float32(), safe=False)


def _seconds(array: pa.Array) -> pa.Array:
    """Timestamps as seconds since 1970, float64."""
    unit = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[array.type.unit]
    return pc.divide(array.cast(pa.int64()).cast(pa.float64(), safe=False), float(unit))


def timestamps(array: pa.Array, since_1970: str | None) -> pa.Array:
    """Times of whatever type as timestamps; those without a zone are taken as UTC.

    Args:
        since_1970: the unit of numbers: s, ms, us or ns.
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
        return pc.coalesce(utc.cast(pa.timestamp("us", "UTC")), naive.cast(pa.timestamp("us", "UTC")))
    if types.is_integer(kind) or types.is_floating(kind):
        if since_1970 is None:
            raise TypeError(
                f"these are numbers ({kind}): say with since_1970 in which unit they count: s, ms, us or ns"
            )
        if types.is_floating(kind):
            array = pc.if_else(pc.is_finite(array), array, pa.scalar(None, kind))
            scale = {"s": 1e6, "ms": 1e3, "us": 1.0, "ns": 1e-3}[since_1970]
            return (
                pc.round(pc.multiply(array.cast(pa.float64()), scale))
                .cast(pa.int64())
                .cast(pa.timestamp("us"))
            )
        return array.cast(pa.int64()).cast(pa.timestamp(since_1970))
    raise TypeError(f"a time, a date, ISO text or numbers are needed, not {kind}")
