"""Reads an index of items and searches it: exactly, in blocks of NumPy, or with faiss. No torch.

DIR/items/*.parquet       columns of the items, and `vector`, float32 (raytrec predict --vectors item)
DIR/index.faiss           an index of faiss over them, if there is one
DIR/index.json            what they are of; there when all is complete
"""

from __future__ import annotations

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
from raytrec.common.errors import ConfigError, DataError, RunError, first_line, some
from raytrec.common.storage import absolute, join_uri, open_filesystem
from raytrec.data.listing import list_files
from raytrec.prediction.folder import VECTOR
from raytrec.prediction.writer import read_checked

MANIFEST, FAISS, ITEMS = "index.json", "index.faiss", "items"
QUERIES, CELLS = 256, 1 << 22  # of a block of exact search: queries, and queries × items
LOWER_32 = np.uint64(0xFFFFFFFF)


@with_config({"extra": "allow"})
class About(TypedDict):
    """The content of index.json; also the figures of `raytrec index`.

    Attributes:
        item: Column that names an item.
    """

    format: Literal[1]
    item: str


class Index:
    """Items and their vectors, in memory.

    Args:
        items: the items' columns, in the order of the vectors.
        vectors: float32 [N, D].
        key: the column that names an item.
        about: the content of index.json.
        faiss: an index of faiss over the vectors; None: search is exact.
    """

    def __init__(
        self,
        items: pa.Table,
        vectors: np.ndarray,
        key: str,
        about: dict[str, Any] | None = None,
        faiss: Any = None,
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
        """The items with the highest scores for each query.

        Args:
            vectors: of queries, float [Q, D], or [D] of one (raytrec.load(…).vectors).
            k: how many items for each.
            leave_out: for each query the keys of items that are not wanted, such as those it has seen.
            exact: do without faiss, where the index has it.

        Returns:
            A row for each item that was found: query (its number, from 0), rank (from 1), the items' columns,
            score; query after query, the highest score first.

        Raises:
            ConfigError: k is not above 0; vectors of another width; keys of another type.
        """
        queries = self._checked(vectors, k)
        asked = [None] * len(queries) if leave_out is None else leave_out
        if len(asked) != len(queries):
            raise ConfigError(
                f"leave_out has {len(asked)} entries for {len(queries)} queries",
                where="search",
                expected="one for each",
            )
        wanted = [self._rows_of(() if keys is None else keys) for keys in asked]
        most = min(len(self), k + max((len(rows) for rows in wanted), default=0))
        found_QK, scores_QK = self.nearest(queries, most, exact=exact)
        kept_QK = found_QK >= 0
        for number, left_out in enumerate(wanted):
            kept_QK[number] &= ~np.isin(found_QK[number], left_out)
        ranks_QK = kept_QK.cumsum(1)
        kept_QK &= ranks_QK <= k
        table = self.items.take(found_QK[kept_QK]).to_pandas()
        table.insert(0, "query", kept_QK.nonzero()[0])
        table.insert(1, "rank", ranks_QK[kept_QK])
        return table.assign(score=scores_QK[kept_QK])

    def nearest(self, queries: np.ndarray, k: int, *, exact: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """(rows int64 [Q, k], -1 where faiss finds no more; scores float32 [Q, k]), the highest first."""
        if exact or self.faiss is None:
            return search_exactly(self.vectors, queries, k)
        found = self.faiss.search(np.ascontiguousarray(queries, np.float32), k)[1]
        rows = found.astype(np.int64, copy=False)
        scores = np.where(rows < 0, -np.inf, scores_of(self.vectors, queries, rows)).astype(np.float32)
        order = np.lexsort((rows, -scores), axis=1)
        return np.take_along_axis(rows, order, 1), np.take_along_axis(scores, order, 1)

    def _checked(self, vectors: np.ndarray, k: int) -> np.ndarray:
        if isinstance(k, bool) or not isinstance(k, int | np.integer) or k < 1:
            raise ConfigError(f"k is {k}", where="search", expected="a whole number of at least 1")
        queries = np.asarray(vectors, np.float32)
        queries = queries[np.newaxis] if queries.ndim == 1 else queries
        width = self.vectors.shape[1]
        if queries.ndim != 2 or queries.shape[1] != width:
            raise ConfigError(
                f"the queries are of shape {list(np.shape(vectors))}",
                where="search",
                expected=f"[queries, {width}], of the run whose items these are",
            )
        return queries

    def _rows_of(self, keys: Sequence[Any]) -> np.ndarray:
        """The rows of those keys that there are."""
        try:
            if isinstance(keys, str):
                raise TypeError
            places = self._places.get_indexer(pd.Index(list(keys), dtype=self._places.dtype))
        except (TypeError, ValueError, OverflowError):
            raise ConfigError(
                f"leave_out has {some(keys)} for a query",
                where="search",
                expected=f"a list of values of column {self.key}, {self.items[self.key].type}; or None",
            ) from None
        return np.unique(places[places >= 0])

    @cached_property
    def _places(self) -> pd.Index:
        return pd.Index(self.items[self.key].to_pandas())

    def __repr__(self) -> str:
        return f"<Index: {len(self):,} items × {self.vectors.shape[1]}, {self.about.get('faiss') or 'exact'}>"


def load_index(folder: str) -> Index:
    """An index that `raytrec index` has written.

    Args:
        folder: local, s3:// or gs://. It is data, but an index of faiss is read by faiss: open only folders
            that you trust.

    Raises:
        RunError: there is none, or it is damaged. ConfigError: it needs faiss, which is not installed.

    Example:
        >>> films = raytrec.load_index("index")
        >>> user = {"user_id": 3, "history": [1, 2]}
        >>> found = films.search(raytrec.load("films-export").vectors(user), k=5)
        >>> list(found.columns)
        ['query', 'rank', 'item_id', 'score']
    """
    uri = absolute(str(folder))
    about = dict(read_document(uri, MANIFEST, About, "index", "raytrec index"))
    try:
        return _read(uri, about)
    except ConfigError:  # of faiss, which is not installed
        raise
    except (DataError, OSError, ValueError, LookupError, RuntimeError, pa.ArrowException) as error:
        why = error.what if isinstance(error, DataError) else first_line(error)
        raise RunError(
            f"the index is damaged: {why}",
            where=uri,
            expected=f"{ITEMS}/, {MANIFEST} and, with faiss, {FAISS}, as `raytrec index` has written them",
            do="remove the folder, and give the command again",
        ) from None


def _read(uri: str, about: dict[str, Any]) -> Index:
    """An index whose files are those of its manifest; errors of many kinds where they are not."""
    items, vectors = read_vectors(join_uri(uri, ITEMS))
    if len(vectors) != about.get("index.items", len(vectors)):
        raise ValueError(f"{ITEMS} has {len(vectors):,} vectors, and {MANIFEST} has {about['index.items']}")
    if about["item"] not in items.column_names:
        raise LookupError(f"{ITEMS} has no column '{about['item']}'")
    if not about.get("faiss"):
        return Index(items, vectors, about["item"], about)
    filesystem, path = open_filesystem(join_uri(uri, FAISS))
    with filesystem.open_input_stream(path) as stream:
        data = stream.read()
    if about.get("index.faiss_sha256", found := sha256(data).hexdigest()) != found:
        raise ValueError(f"{FAISS} is not the file that was written with {MANIFEST}")
    faiss = require_faiss().deserialize_index(np.frombuffer(data, np.uint8))
    if (faiss.ntotal, faiss.d) != vectors.shape:
        raise ValueError(
            f"{FAISS} is of {faiss.ntotal:,} vectors of width {faiss.d}, {ITEMS} of {vectors.shape}"
        )
    return Index(items, vectors, about["item"], about, faiss)


def read_vectors(uri: str) -> tuple[pa.Table, np.ndarray]:
    """(all columns but the vectors, vectors float32 [N, D]) of a folder that has vectors in files; rows that
    could not be read, which have none, are passed over."""
    table = pa.concat_tables([read_checked(file) for file in list_files(uri, "vectors").files])
    table = table.filter(table[VECTOR].is_valid())
    column = table[VECTOR].cast(pa.list_(pa.float32())).combine_chunks()
    flat = column.flatten().to_numpy(zero_copy_only=False)
    return table.drop_columns([VECTOR]), flat.reshape(len(table), -1)


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
