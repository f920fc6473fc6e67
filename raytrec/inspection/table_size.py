"""Numbers of rows of tables, so that frequent values do not share a row, and buckets of numbers."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import NormalDist
from typing import Literal

import numpy as np

from raytrec.config.schema import Scale
from raytrec.data.hashing import hash_integers
from raytrec.inspection.column_roles import SPARSE_FILL
from raytrec.inspection.hot_ids import HotIds

Kind = Literal["text", "ordinal", "id"]
Seen = Literal["sample", "train", "more"]
FEW_VALUES = 1000  # the table of fewer values grows until each of them has its own row
SMALL_TABLE = 65_536  # rows up to which tables have ten rows for each value


def table_size(
    low: float, high: float, distinct: int, hot: HotIds, kind: Kind, seen: Seen
) -> tuple[dict, str]:
    """Return a table's `rows` and `out_of_range`, and a comment on them.

    Args:
        low: Lowest integer id.
        high: Highest integer id.
        distinct: Number of distinct values.
        hot: The most frequent values.
        kind: Kind of the values.
        seen: Rows that were read: a sample, all of the training data, or also those of validation or test
            data.
    """
    if kind == "text" or low < 0 or high >= max(SPARSE_FILL * distinct, 100_000):
        rows, shared = _rows_of_hash(distinct, hot, kind != "text")
        comment = "each of its values has its own row"
        if shared or distinct > len(hot.counts()[0]):
            comment = f"values of {100 * shared:.2g} % of the lookups share a row with more frequent ones"
        return {"rows": rows, "out_of_range": "hash"}, comment
    rows = int(high) + 1
    if kind == "ordinal" and seen != "sample":
        return {"rows": rows, "out_of_range": "clamp"}, f"larger values are read as {rows - 1}"
    spare = 1 if seen == "more" else max(1, rows // 10)
    if seen == "sample":
        return {"rows": rows + spare, "out_of_range": "hash"}, "larger ids share rows with others"
    return {"rows": rows + spare, "out_of_range": "clamp"}, "larger ids use its last row"


def bucket_boundaries(scale: Scale) -> list[float]:
    """Return the boundaries of ten buckets with about as many of a column's numbers in each, if these are
    normally distributed as they are read (`Scale`)."""
    deciles = scale.mean + scale.std * np.array([NormalDist().inv_cdf(k / 10) for k in range(1, 10)])
    numbers = np.sign(deciles) * np.expm1(np.abs(deciles).clip(max=700)) if scale.log else deciles
    return sorted({float(f"{number:.12g}") for number in numbers})


def _rows_of_hash(distinct: int, hot: HotIds, is_integer: bool) -> tuple[int, float]:
    """Return the rows of a hashed table, and the share of lookups whose value shares its row with a more
    frequent one."""
    ids, counts = hot.counts()
    order = np.argsort(-counts, kind="stable")
    ids, counts, found = ids[order], counts[order], dict[int, float]()
    for rows in _sizes(distinct):
        places = np.where(ids < rows, ids, hash_integers(ids, rows)) if is_integer else ids % np.uint64(rows)
        _, most_frequent = np.unique(places, return_index=True)
        found[rows] = float(1 - counts[most_frequent].sum() / max(counts.sum(), 1))
        if len(most_frequent) == len(ids):
            return rows, 0.0
    best = min(found, key=lambda rows: found[rows])
    return best, found[best]


def _sizes(distinct: int) -> Iterator[int]:
    """Yield the numbers of rows to try, rising."""
    least = max(min(10 * distinct, SMALL_TABLE), 2 * distinct, 100)
    few = distinct < FEW_VALUES
    rows, most = least, SMALL_TABLE if few else 1.1 * least
    while rows <= most:
        yield rows
        rows += rows // 100 if few else least // 1000
