"""The items with the highest scores, exactly, in plain NumPy; blocks of queries × items bound the memory."""

from __future__ import annotations

import numpy as np

QUERIES, CELLS = 256, 1 << 22  # of a block: queries, and queries × items
LOWER_32 = np.uint64(0xFFFFFFFF)


def search_exactly(items_ND: np.ndarray, queries_QD: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The items with the highest dot products for each query.

    A score is summed up in float64 and rounded to float32. Of equal scores, the lower row comes first; NaN
    comes last.

    Args:
        items_ND, queries_QD: float32. k: how many, 1 to N.

    Returns:
        (rows int64 [Q, k], scores float32 [Q, k]), the highest score first.
    """
    rows, scores = [np.empty((0, k), np.int64)], [np.empty((0, k), np.float32)]
    for start in range(0, len(queries_QD), QUERIES):
        queries = queries_QD[start : start + QUERIES].astype(np.float64)
        best = np.empty((len(queries), 0), np.uint64)
        step = max(1, CELLS // len(queries))
        for first in range(0, len(items_ND), step):
            block = items_ND[first : first + step].astype(np.float64)
            best = np.concatenate([best, _ranked(queries @ block.T, first)], axis=1)
            if best.shape[1] > k:
                best = np.partition(best, best.shape[1] - k, axis=1)[:, -k:]
        found = (LOWER_32 - (np.sort(best, axis=1)[:, ::-1] & LOWER_32)).astype(np.int64)
        rows.append(found)
        scores.append(scores_of(items_ND, queries_QD[start : start + QUERIES], found))
    return np.concatenate(rows), np.concatenate(scores)


def scores_of(items_ND: np.ndarray, queries_QD: np.ndarray, rows_QK: np.ndarray) -> np.ndarray:
    """The scores of some items for each query, float32 [Q, K]."""
    items = items_ND[rows_QK].astype(np.float64)
    return np.einsum("qkd,qd->qk", items, queries_QD.astype(np.float64)).astype(np.float32)


def _ranked(scores_QN: np.ndarray, first: int) -> np.ndarray:
    """Each score and its item as one number, uint64 [Q, N], which is greater for what comes first: the bits
    of a float32 in an order that is the numbers' own, then the row from behind.

    Args:
        first: the row of the first item.
    """
    scores = scores_QN.astype(np.float32) + np.float32(0)  # of -0.0, too, 0.0
    bits = scores.view(np.uint32)
    ordered = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31))
    ordered[np.isnan(scores)] = 0
    rows = np.arange(first, first + scores.shape[1], dtype=np.uint64)
    return (ordered.astype(np.uint64) << np.uint64(32)) | (LOWER_32 - rows)
