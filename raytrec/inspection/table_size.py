"""Numbers of rows of tables, so that frequent values do not share a row, and buckets of numbers."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np

from raytrec.config.schema import Scale
from raytrec.data.hashing import hash_integers
from raytrec.inspection.column_roles import SPARSE_FILL
from raytrec.inspection.hot_ids import HotIds

FEW_VALUES = 1000  # the table of fewer values grows until each of them has its own row
SMALL_TABLE = 65_536  # rows up to which tables have ten rows for each value


def table_size(
    low: float, high: float, distinct: int, hot: HotIds, kind: str, sampled: bool
) -> tuple[int, str, str]:
    """Return a table's `rows` and `out_of_range`, and a comment on them.

    Args:
        low: Lowest integer id.
        high: Highest integer id.
        distinct: Number of distinct values.
        hot: The most frequent values.
        kind: text, id or ordinal.
        sampled: True if not all rows were read.
    """
    if kind == "text" or low < 0 or high >= max(SPARSE_FILL * distinct, 100_000):
        rows, shared = _rows_of_hash(distinct, hot, kind == "text")
        others = f"values of {100 * shared:.2g} % of the lookups share a row with more frequent ones"
        return rows, "hash", others if shared else "frequent values do not share a row"
    rows = int(high) + 1
    if sampled:
        return rows + max(1, rows // 10), "hash", "larger ids share rows with others"
    if kind == "ordinal":
        return rows, "clamp", f"larger values are read as {rows - 1}"
    return rows + 1, "clamp", "larger ids use the last row, which is not trained"


def _rows_of_hash(distinct: int, hot: HotIds, is_text: bool) -> tuple[int, float]:
    """Return the rows of a hashed table, and the share of lookups whose value shares its row with a more
    frequent one."""
    ids, counts = hot.counts()
    order = np.argsort(-counts, kind="stable")
    ids, counts, few = ids[order], counts[order], distinct < FEW_VALUES
    rows = least = max(min(10 * distinct, SMALL_TABLE), 2 * distinct, 100)
    best = 1.0, rows
    while best[0] and rows <= (SMALL_TABLE if few else 1.1 * least):
        places = ids % np.uint64(rows) if is_text else np.where(ids < rows, ids, hash_integers(ids, rows))
        most_frequent = np.unique(places, return_index=True)[1]
        best = min(best, (1 - float(counts[most_frequent].sum() / counts.sum()), rows))
        rows += rows // 100 if few else least // 1000
    return best[1], best[0]


def bucket_boundaries(scale: Scale) -> list[float]:
    """Return the boundaries of ten buckets with about as many of a column's numbers in each, if these are
    normally distributed as they are read (`Scale`)."""
    deciles = scale.mean + scale.std * np.array([NormalDist().inv_cdf(k / 10) for k in range(1, 10)])
    numbers = np.sign(deciles) * np.expm1(np.abs(deciles).clip(max=700)) if scale.log else deciles
    return sorted({float(f"{number:.12g}") for number in numbers})
