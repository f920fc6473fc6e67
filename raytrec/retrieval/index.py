"""Reads an index of items and searches it. No torch.

DIR/items/*.parquet       columns of the items, and `vector`, float32 (raytrec predict --vectors item)
DIR/index.faiss           an index of faiss over them, if there is one
DIR/index.json            what they are of; there when all is complete
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from hashlib import sha256
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
from raytrec.retrieval.search import from_bytes, scores_of, search_exactly, search_faiss

MANIFEST, FAISS, ITEMS = "index.json", "index.faiss", "items"


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
        found, scores = self.nearest(queries, most, exact=exact)
        of, rows, places = [], [], []
        for number, left_out in enumerate(wanted):
            kept = np.flatnonzero((found[number] >= 0) & ~np.isin(found[number], left_out))[:k]
            of.append(np.full(len(kept), number))
            rows.append(found[number][kept])
            places.append(scores[number][kept])
        taken = np.concatenate(rows) if rows else np.empty(0, np.int64)
        table = self.items.take(taken).to_pandas()
        rank = np.concatenate([np.arange(1, len(each) + 1) for each in rows]) if rows else []
        table.insert(0, "query", np.concatenate(of) if of else [])
        table.insert(1, "rank", rank)
        return table.assign(score=np.concatenate(places) if places else [])

    def nearest(self, queries: np.ndarray, k: int, *, exact: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """(rows int64 [Q, k], -1 where faiss finds no more; scores float32 [Q, k]), the highest first."""
        if exact or self.faiss is None:
            return search_exactly(self.vectors, queries, k)
        rows = search_faiss(self.faiss, queries, k)
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
    faiss = from_bytes(data)
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
