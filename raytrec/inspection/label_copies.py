"""Columns that copy a label: each of their values goes with one value of the label, and with no other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from raytrec.data.arrow import one_array
from raytrec.inspection.column_stats import ColumnStats, comparable

ROWS = 100  # of fewer, columns agree by chance


def pair_with_labels(
    column: ColumnStats, data: Mapping[str, pa.ChunkedArray], labels: Sequence[ColumnStats]
) -> None:
    """Adds a row group's pairs of values; a label that is not copied drops out at its first contradiction.

    Args:
        data: name → the row group's column.
    """
    for label in labels:
        known = column.pairs.setdefault(label.name, {})
        if known is None or label.name == column.name:
            continue
        both = (column, label)
        if column.trouble or column.is_list or label.is_list or any(s.few is None for s in both):
            column.pairs[label.name] = None
            continue
        (ours, ours_N), (theirs, theirs_N) = (_coded(s, data[s.name]) for s in both)
        codes = np.unique(ours_N.astype(np.int64) * len(theirs) + theirs_N)
        for value, of_label in ((ours[code // len(theirs)], theirs[code % len(theirs)]) for code in codes):
            if known.setdefault(value, of_label) != of_label:
                column.pairs[label.name] = None
                break


def copied_label(column: ColumnStats, labels: Sequence[str]) -> str | None:
    """The label that a column copies, if there is one; nulls are a value, too."""
    for label in labels:
        pairs = column.pairs.get(label) or {}
        if column.rows > ROWS and len(pairs) >= 2 and len(set(pairs.values())) == len(pairs):
            return label
    return None


def _coded(s: ColumnStats, data: pa.ChunkedArray) -> tuple[list, np.ndarray]:
    """(values, the place of each row's among them); NaN is null."""
    coded = comparable(one_array(data), s.base, s.mixed).dictionary_encode(null_encoding="encode")
    values = [None if value != value else value for value in coded.dictionary.to_pylist()]
    return values, coded.indices.to_numpy()
