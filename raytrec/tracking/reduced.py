"""Figures of a table's shards as sums and maxima, so that ranks can add them up before anybody writes them.

A table with a part on each of 1,024 ranks would have 1,024 entries in every record. Its ranks reduce them to
one, from which `aggregate.table_over_ranks` makes what it would make of all.
"""

from __future__ import annotations

from math import inf, isinf, isnan, nan, sqrt
from typing import Any

from raytrec.common.formatting import number, or_0
from raytrec.tracking.aggregate import BINS, LARGEST, NORMS, SUMMED, WEIGHTS, counts_of

SUMS = 2 * len(SUMMED) + 2 * len(NORMS) + 4 * len(WEIGHTS) + BINS + 3  # floats of an entry that are added up
MAXIMA = len(LARGEST) + len(NORMS) + 2  # of which the largest is taken


def pack(entry: dict[str, Any]) -> tuple[list[float], list[float]]:
    """An entry of RankLine.tables as SUMS floats to be added up over ranks, and MAXIMA; {}: of no shard."""
    sums = [part for key in SUMMED for part in _known(number(entry.get(key)))]
    sums += [part for key in NORMS for part in _known(number(entry.get(key)) ** 2)]
    for key, weigh in WEIGHTS.items():
        value = number(entry.get(key))
        weight = 0.0 if isnan(value) else weigh(entry)
        sums += [or_0(value) * weight, weight, *_known(value)]
    counts = counts_of(entry.get("row_norm_counts"))
    sums += [*(counts or [0.0] * BINS), float(bool(counts))]
    sums += [or_0(entry.get("rows")), or_0(entry.get("read_ids"))]
    values = [number(entry.get(key)) for key in (*LARGEST, *NORMS, "columns")]
    maxima = [-inf if isnan(value) else value for value in values]
    return sums, [*maxima, float(entry.get("replicated") is True)]


def unpack(sums: list[float], maxima: list[float]) -> dict[str, Any]:
    """The one entry that all of them come to."""
    take, largest = iter(sums), [nan if isinf(value) else value for value in maxima]
    replicated = bool(largest[-1])
    entry: dict[str, Any] = {"replicated": replicated, "columns": int(or_0(largest[-2]))}
    for key in SUMMED:
        entry[key] = _or_none(next(take), next(take))
    for at, key in enumerate(NORMS, start=len(LARGEST)):
        squares, count = next(take), next(take)
        entry[key] = _or_none(largest[at] if replicated else sqrt(squares), count)
    for key in WEIGHTS:
        weighed, weight, value, count = (next(take) for _ in range(4))
        entry[key] = weighed / weight if weight else value / count if count else None
    counts = [int(next(take)) for _ in range(BINS)]
    entry["row_norm_counts"] = counts if next(take) else None
    entry |= {"rows": int(next(take)), "read_ids": int(next(take))}
    for at, key in enumerate(LARGEST):
        entry[key] = None if isnan(largest[at]) else largest[at]
    return entry


def _known(value: float) -> tuple[float, float]:
    return (0.0, 0.0) if isnan(value) else (value, 1.0)


def _or_none(value: float, count: float) -> float | None:
    return value if count else None
