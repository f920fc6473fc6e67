"""Keys of users or items → ids from 0, in the order in which the keys appear."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc


class Vocabulary:
    """The keys so far; it grows with each call of `ids`.

    Attributes:
        keys: the key of each id, in the type of the first values: int64 or string.
    """

    def __init__(self) -> None:
        self.keys: pa.Array | None = None

    def __len__(self) -> int:
        return 0 if self.keys is None else len(self.keys)

    def ids(self, values: pa.Array) -> np.ndarray:
        """The id of each key, new ones included: int32 [n]. None of the keys may be null."""
        encoded = pc.dictionary_encode(values)
        distinct = encoded.dictionary
        if self.keys is None:
            self.keys = distinct.slice(0, 0)
        known = pc.index_in(distinct, value_set=self.keys)
        new = pc.is_null(known).to_numpy(zero_copy_only=False)
        ids = known.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int32)
        ids[new] = len(self.keys) + np.arange(new.sum(), dtype=np.int32)
        self.keys = pa.concat_arrays([self.keys, distinct.filter(pa.array(new))])
        return ids[encoded.indices.to_numpy(zero_copy_only=False)]

    def known_ids(self, values: pa.Array) -> np.ndarray:
        """The id of each key; -1 of one that has none: int32 [n]."""
        found = pc.index_in(values, value_set=self.keys).fill_null(-1)
        return found.to_numpy(zero_copy_only=False).astype(np.int32)
