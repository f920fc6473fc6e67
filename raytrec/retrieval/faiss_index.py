"""An index of faiss over items' vectors: the optional extra `raytrec[faiss]`."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from raytrec.common.errors import ConfigError

TRAIN_ROWS = 1 << 18  # that clusters and codes are learned from, at most
ADD_ROWS = 1 << 16  # at a time


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
            f"{str(error).strip().splitlines()[-1]}",
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
    """What `to_bytes` gave. faiss's reader is not made for what somebody with bad intentions has written."""
    return require_faiss().deserialize_index(np.frombuffer(data, np.uint8))
