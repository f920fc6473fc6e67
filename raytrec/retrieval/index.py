"""In-memory index of items, searched exactly with NumPy or approximately with faiss. Does not import torch.

DIR/items/*.parquet       item columns, and the column `vector`, lists of float32 (raytrec predict --vectors item)
DIR/index.faiss           faiss index of the vectors (optional)
DIR/index.json            description of the index, written after all other files
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cached_property
from hashlib import sha256
from types import ModuleType
from typing import Any, Literal

import numpy as np
import pandas as pd
import pyarrow as pa
from pydantic import with_config
from typing_extensions import TypedDict

from raytrec.common.documents import read_document
from raytrec.common.errors import ConfigError, DataError, RunError, get_first_line, shorten_repr
from raytrec.common.storage import join_uri, make_absolute, open_filesystem
from raytrec.data.files.listing import list_files
from raytrec.prediction.folder import VECTOR, read_verified

MANIFEST, FAISS_FILE, ITEMS = "index.json", "index.faiss", "items"
BLOCK_QUERIES, BLOCK_SCORES = 256, 1 << 22  # maximum number of queries, and of scores, in a block of exact search
LOWER_32_BITS = np.uint64(0xFFFFFFFF)


@with_config({"extra": "allow"})
class IndexManifest(TypedDict):
    """Content of index.json, which also stores the metrics of `raytrec index`.

    Attributes:
        format: Version of the file format.
        item: Column that identifies an item.
    """

    format: Literal[1]
    item: str


class Index:
    """Items and their vectors in memory, as returned by `raytrec.load_index`.

    Args:
        items: Item columns, with rows in the order of the vectors.
        vectors: Item vectors, float32 [N, D].
        key: Column that identifies an item.
        about: Content of index.json; default: {}.
        faiss: faiss index of the vectors; None: search is always exact.
    """

    def __init__(
        self, items: pa.Table, vectors: np.ndarray, key: str, about: dict[str, Any] | None = None, faiss: Any = None
    ):
        self.items, self.vectors, self.key, self.about, self.faiss = items, vectors, key, about or {}, faiss

    def __len__(self) -> int:
        return len(self.vectors)

    def search(
        self,
        vectors: np.ndarray,
        k: int = 10,
        *,
        leave_out: Sequence[Sequence[Any] | None] | None = None,
        exact: bool = False,
    ) -> pd.DataFrame:
        """Return the items with the highest scores (dot products of vectors) for each query.

        Args:
            vectors: Query vectors, float [Q, D], or [D] for a single query (raytrec.load(…).vectors).
            k: Maximum number of items for each query.
            leave_out: Keys of items to exclude for each query, such as items already seen. None, for all queries or
                for a single query: exclude nothing.
            exact: If True, search exactly even if there is a faiss index.

        Returns:
            One row per found item, with the columns query (number of the query, from 0), rank (from 1), the
            item columns, and score. Rows are sorted by query, then by descending score.

        Raises:
            ConfigError: k is not a positive integer, the vectors have the wrong shape, or `leave_out` does
                not have one entry for each query or contains keys of the wrong type.
        """
        queries = self._check_queries(vectors, k)
        excluded_keys = [None] * len(queries) if leave_out is None else leave_out
        if len(excluded_keys) != len(queries):
            raise ConfigError(
                f"the length of leave_out is {len(excluded_keys)}, but the number of queries is {len(queries)}",
                where="search",
                expected="one entry per query",
            )
        excluded_rows = [self._find_rows(() if keys is None else keys) for keys in excluded_keys]
        count = min(len(self), k + max((len(rows) for rows in excluded_rows), default=0))
        found_QK, scores_QK = self.nearest(queries, count, exact=exact)
        selected_QK = found_QK >= 0
        for number, excluded in enumerate(excluded_rows):
            selected_QK[number] &= ~np.isin(found_QK[number], excluded)
        ranks_QK = selected_QK.cumsum(1)
        selected_QK &= ranks_QK <= k
        table = self.items.take(found_QK[selected_QK]).to_pandas()
        table.insert(0, "query", selected_QK.nonzero()[0])
        table.insert(1, "rank", ranks_QK[selected_QK])
        return table.assign(score=scores_QK[selected_QK])

    def nearest(self, queries: np.ndarray, k: int, *, exact: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Return the k (1 to N) best items for each query, float32 [Q, D], highest score first; `exact` as in `search`.

        Returns:
            Rows, int64 [Q, k], and scores, float32 [Q, k]; -1 and -inf where faiss finds fewer than k items.
        """
        if exact or self.faiss is None:
            return search_exactly(self.vectors, queries, k)
        faiss_rows = self.faiss.search(np.ascontiguousarray(queries, np.float32), k)[1]
        rows = faiss_rows.astype(np.int64, copy=False)
        scores = np.where(rows < 0, -np.inf, compute_dot_products(self.vectors, queries, rows)).astype(np.float32)
        order = np.lexsort((rows, -scores), axis=1)
        return np.take_along_axis(rows, order, 1), np.take_along_axis(scores, order, 1)

    def _check_queries(self, vectors: np.ndarray, k: int) -> np.ndarray:
        if isinstance(k, bool) or not isinstance(k, int | np.integer) or k < 1:
            raise ConfigError(f"k is {shorten_repr(k)}", where="search", expected="a whole number of at least 1")
        queries = np.asarray(vectors, np.float32)
        queries = queries[np.newaxis] if queries.ndim == 1 else queries
        width = self.vectors.shape[1]
        if queries.ndim != 2 or queries.shape[1] != width:
            raise ConfigError(
                f"the queries have the shape {list(np.shape(vectors))}",
                where="search",
                expected=f"[queries, {width}] or [{width}], from the run that the index was built with",
            )
        return queries

    def _find_rows(self, keys: Sequence[Any]) -> np.ndarray:
        """Return the rows of the items with these keys; unknown keys are ignored."""
        try:
            if isinstance(keys, str):
                raise TypeError
            places = self._row_by_key.get_indexer(pd.Index(list(keys), dtype=self._row_by_key.dtype))
        except (TypeError, ValueError, OverflowError):
            raise ConfigError(
                f"leave_out contains {shorten_repr(keys)} for a query",
                where="search",
                expected=f"a list of values of column {self.key} ({self.items[self.key].type}), or None",
            ) from None
        return np.unique(places[places >= 0])

    @cached_property
    def _row_by_key(self) -> pd.Index:
        return pd.Index(self.items[self.key].to_pandas())

    def __repr__(self) -> str:
        return f"<Index: {len(self):,} items × {self.vectors.shape[1]}, {self.about.get('faiss') or 'exact'}>"


def load_index(folder: str) -> Index:
    """Load an index written by `raytrec index`.

    Args:
        folder: Folder of the index; local, s3:// or gs://. The files contain only data, but faiss does not parse its
            file safely. Open a folder with a faiss index only if you trust it.

    Raises:
        RunError: The folder contains no index, or an index that is damaged or cannot be read.
        DataError: The path is not valid, or the store cannot be reached.
        ConfigError: The index requires faiss, which is not installed; or a Ray job passes a relative path.

    Example:
        >>> films = raytrec.load_index("index")
        >>> user = {"user_id": 3, "history": [1, 2]}
        >>> found = films.search(raytrec.load("films-export").vectors(user), k=5)
        >>> list(found.columns)
        ['query', 'rank', 'item_id', 'score']
    """
    uri = make_absolute(str(folder))
    about = dict(read_document(uri, MANIFEST, IndexManifest, "index", "raytrec index"))
    try:
        return _read_index(uri, about)
    except ConfigError:  # because faiss is not installed
        raise
    except (DataError, OSError, ValueError, LookupError, RuntimeError, pa.ArrowException) as error:
        why = f"{error.what} ({error.where})" if isinstance(error, DataError) else get_first_line(error)
        raise RunError(
            f"the index cannot be loaded: {why}",
            where=uri,
            expected=f"{ITEMS}/, {MANIFEST} and, with faiss, {FAISS_FILE}, written by `raytrec index`",
            do="retry; if files are missing or damaged, remove the folder and run `raytrec index` again",
        ) from None


def _read_index(uri: str, about: dict[str, Any]) -> Index:
    """Return the index in a folder; raise errors of various types if its files do not match the manifest."""
    items, vectors = read_vectors(join_uri(uri, ITEMS))
    if len(vectors) != about.get("index.items", len(vectors)):
        raise ValueError(f"{ITEMS} has {len(vectors):,} vectors, but {MANIFEST} lists {about['index.items']}")
    if about["item"] not in items.column_names:
        raise LookupError(f"column '{about['item']}' is missing from {ITEMS}")
    if not about.get("faiss"):
        return Index(items, vectors, about["item"], about)
    filesystem, path = open_filesystem(join_uri(uri, FAISS_FILE))
    with filesystem.open_input_stream(path) as stream:
        data = stream.read()
    if about.get("index.faiss_sha256", checksum := sha256(data).hexdigest()) != checksum:
        raise ValueError(f"{FAISS_FILE} does not match the checksum in {MANIFEST}")
    faiss = require_faiss().deserialize_index(np.frombuffer(data, np.uint8))
    if (faiss.ntotal, faiss.d) != vectors.shape:
        raise ValueError(f"{FAISS_FILE} has the shape {(faiss.ntotal, faiss.d)}, but {ITEMS} has {vectors.shape}")
    return Index(items, vectors, about["item"], about, faiss)


def read_vectors(uri: str) -> tuple[pa.Table, np.ndarray]:
    """Return the rows of a folder of Parquet files: a table without the vector column, and vectors, float32 [N, D].

    Rows that `predict` could not read have no vector and are skipped.

    Raises:
        DataError, OSError, LookupError, ValueError, ArrowException: Files are missing, damaged or not from `predict`.
    """
    table = pa.concat_tables([read_verified(file) for file in list_files(uri, "vectors").files])
    table = table.filter(table[VECTOR].is_valid())
    column = table[VECTOR].cast(pa.list_(pa.float32())).combine_chunks()
    flat = column.flatten().to_numpy(zero_copy_only=False)
    return table.drop_columns([VECTOR]), flat.reshape(len(table), -1)


def search_exactly(items_ND: np.ndarray, queries_QD: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the items with the highest dot products for each query.

    Scores are summed in float64 and rounded to float32. Items with equal scores are sorted by row; NaN scores
    come last.

    Args:
        items_ND: Item vectors, float32 [N, D], with N at most 2³².
        queries_QD: Query vectors, float32 [Q, D].
        k: Number of items per query, 1 to N.

    Returns:
        Rows, int64 [Q, k], and scores, float32 [Q, k], in descending order of scores.
    """
    rows, scores = [np.empty((0, k), np.int64)], [np.empty((0, k), np.float32)]
    for start in range(0, len(queries_QD), BLOCK_QUERIES):
        queries = queries_QD[start : start + BLOCK_QUERIES].astype(np.float64)
        best = np.empty((len(queries), 0), np.uint64)
        step = max(1, BLOCK_SCORES // len(queries))
        for first in range(0, len(items_ND), step):
            block = items_ND[first : first + step].astype(np.float64)
            best = np.concatenate([best, _pack_ranks(queries @ block.T, first)], axis=1)
            if best.shape[1] > k:
                best = np.partition(best, best.shape[1] - k, axis=1)[:, -k:]
        best_rows = (LOWER_32_BITS - (np.sort(best, axis=1)[:, ::-1] & LOWER_32_BITS)).astype(np.int64)
        rows.append(best_rows)
        scores.append(compute_dot_products(items_ND, queries_QD[start : start + BLOCK_QUERIES], best_rows))
    return np.concatenate(rows), np.concatenate(scores)


def compute_dot_products(items_ND: np.ndarray, queries_QD: np.ndarray, rows_QK: np.ndarray) -> np.ndarray:
    """Return the dot products of each query with the items in `rows_QK`, int64 [Q, K], as float32 [Q, K]."""
    items = items_ND[rows_QK].astype(np.float64)
    return np.einsum("qkd,qd->qk", items, queries_QD.astype(np.float64)).astype(np.float32)


def _pack_ranks(scores_QN: np.ndarray, first: int) -> np.ndarray:
    """Return uint64 numbers [Q, N] that combine score and row, and are larger for items that rank higher.

    The upper 32 bits contain the float32 score, mapped to an integer that sorts in the same order. The lower 32 bits
    contain the inverted row. `first` is the row of the first item.
    """
    scores = scores_QN.astype(np.float32) + np.float32(0)  # maps -0.0 to 0.0
    bits = scores.view(np.uint32)
    ordered = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31))
    ordered[np.isnan(scores)] = 0
    rows = np.arange(first, first + scores.shape[1], dtype=np.uint64)
    return (ordered.astype(np.uint64) << np.uint64(32)) | (LOWER_32_BITS - rows)


def require_faiss() -> ModuleType:
    """Return the faiss module.

    Raises:
        ConfigError: faiss cannot be imported.
    """
    try:
        import faiss
    except ImportError as error:
        raise ConfigError(
            f"faiss cannot be imported: {get_first_line(error)}",
            where=sys.prefix,
            expected="the extra raytrec[faiss]",
            do="run `pip install faiss-cpu`, or build an index for exact search without --faiss",
        ) from None
    return faiss
