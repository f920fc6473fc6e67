"""What the values of slices are called."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from raytrec.data.batch import Batch

MOST = 100_000  # values of a column whose text a rank keeps


class Names:
    """Notes the text of slices' values as batches pass, on the host.

    Args:
        columns: whose values are slices.
        key_columns: of Batch.keys, in its order.

    Attributes:
        of: column → key → text of its value; the first MOST that this rank has seen.
    """

    def __init__(self, columns: Sequence[str], key_columns: Sequence[str]):
        self.of: dict[str, dict[int, str]] = {name: {} for name in columns}
        self._places = {name: key_columns.index(name) for name in columns}

    def note(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The same batches."""
        for batch in batches:
            if self.of and batch.reserved is not None and batch.keys is not None:
                keys_BK = batch.keys[batch.weights > 0].numpy()
                for name, known in self.of.items():
                    if name in batch.reserved.column_names:
                        self._note(known, keys_BK[:, self._places[name]], batch.reserved.column(name))
            yield batch

    def _note(self, known: dict[int, str], keys, values) -> None:
        distinct, first = np.unique(keys, return_index=True)
        new = [
            (key, row) for key, row in zip(distinct.tolist(), first.tolist(), strict=True) if key not in known
        ]
        for key, row in new[: MOST - len(known)]:
            value = values[row].as_py()
            known[key] = "null" if value is None else str(value)
