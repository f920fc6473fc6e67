"""Highest dot products: exactly, in blocks of NumPy, or with faiss."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from raytrec.common.errors import ConfigError, last_line

QUERIES, CELLS = 256, 1 << 22  # of a block: queries, and queries × items
TRAIN_ROWS = 1 << 18  # that clusters and codes are learned from, at most
ADD_ROWS = 1 << 16  # at a time
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


def require_faiss() -> ModuleType:
    """The module.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import faiss
    except ImportError:
        raise ConfigError(
            "faiss is not installed",
            where="--faiss",
            expected="the extra raytrec[faiss]",
            do="pip install faiss-cpu; or leave --faiss out: exact search needs none",
        ) from None
    return faiss


def build_faiss(spec: str, items_ND: np.ndarray, seed: int = 0) -> Any:
    """An index of items, by their dot product with queries.

    Args:
        spec: of faiss.index_factory, such as HNSW32, "IVF256,Flat" or "OPQ16,IVF256,PQ16".
        items_ND: float32.
        seed: of the sample that it is trained with, if it is.

    Raises:
        ConfigError: faiss does not take the spec for vectors of this width and number.
    """
    faiss = require_faiss()
    try:
        index = faiss.index_factory(items_ND.shape[1], spec, faiss.METRIC_INNER_PRODUCT)
        if not index.is_trained:
            rows = np.random.default_rng(seed).permutation(len(items_ND))[:TRAIN_ROWS]
            index.train(np.ascontiguousarray(items_ND[np.sort(rows)]))
        for first in range(0, len(items_ND), ADD_ROWS):
            index.add(np.ascontiguousarray(items_ND[first : first + ADD_ROWS]))
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"faiss makes no index '{spec}' of {len(items_ND):,} vectors of width {items_ND.shape[1]}: "
            f"{last_line(str(error), 'no reason given')}",
            where="--faiss",
            expected="what faiss.index_factory takes, such as HNSW32 or 'IVF256,Flat'",
        ) from None
    return index


def search_faiss(index: Any, queries_QD: np.ndarray, k: int) -> np.ndarray:
    """The rows that an index finds for each query, int64 [Q, k]; -1 where it finds no more."""
    return index.search(np.ascontiguousarray(queries_QD, np.float32), k)[1].astype(np.int64, copy=False)


def to_bytes(index: Any) -> bytes:
    """As it is written into a file."""
    return require_faiss().serialize_index(index).tobytes()


def from_bytes(data: bytes) -> Any:
    """What `to_bytes` gave. faiss's reader does not withstand malicious files."""
    return require_faiss().deserialize_index(np.frombuffer(data, np.uint8))
