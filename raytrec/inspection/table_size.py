"""Numbers of rows of tables, chosen so that frequent values do not share a row."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from raytrec.data.hashing import hash_integers
from raytrec.inspection.column_roles import SPARSE_FILL
from raytrec.inspection.hot_ids import HotIds

FEW_VALUES = 1000  # the table of fewer values grows until each of them has its own row
SMALL_TABLE = 65_536  # rows up to which tables have ten rows for each value


def table_size(
    low: float, high: float, distinct: int, hot: HotIds, is_integer: bool, all_seen: bool
) -> tuple[dict, str | None]:
    """Return a table's `rows` and `out_of_range`, and a comment on them.

    Args:
        low: Lowest integer id.
        high: Highest integer id.
        distinct: Number of distinct values.
        hot: The most frequent values.
        is_integer: True for integer ids, False for text.
        all_seen: True if all rows of training, validation and test data were read.
    """
    if not is_integer or low < 0 or high >= max(SPARSE_FILL * distinct, 100_000):
        rows, shared = _rows_of_hash(distinct, hot, is_integer)
        comment = "each of its values has its own row"
        if shared or distinct > len(hot.counts()[0]):
            comment = f"values of {100 * shared:.2g} % of the lookups share a row with more frequent ones"
        return {"rows": rows, "out_of_range": "hash"}, comment
    if all_seen:
        return {"rows": int(high) + 1}, None
    return {"rows": math.ceil(1.1 * (int(high) + 1)), "out_of_range": "hash"}, None


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
