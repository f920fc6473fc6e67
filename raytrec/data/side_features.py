"""What stands beside the ids of a sequence: numbers and times, one for each id. No torch here."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from raytrec.common.errors import DataError
from raytrec.config.schema import Sparse, scalar
from raytrec.data.columns import Place, RowsOf
from raytrec.data.form import one_array, unnest

PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
DAY_S = 86_400


def side_features(
    table: pa.Table, feature: str, spec: Sparse, offsets: np.ndarray, place: Place
) -> np.ndarray:
    """The side features of each id of a sequence: float64 [N, side features], times as seconds since 1970.

    Args:
        offsets: int32 [n + 1], of the ids, from 0.

    Raises:
        DataError: another number of values than of ids; a null, NaN or infinity.
    """
    out = np.empty((int(offsets[-1]), len(spec.side_features)))
    for number, column in enumerate(spec.side_features):
        ends, flat = unnest(one_array(table[column]))
        if not np.array_equal(offsets, ends):
            lengths, ids = np.diff(ends), np.diff(offsets)
            row = int((lengths != ids).argmax())
            raise DataError(
                f"'{column}' has {lengths[row]} values for {ids[row]} ids of '{feature}'",
                where=place.of(column, row),
                expected="one value for each id",
            )
        values = as_float64(flat)
        bad = ~np.isfinite(values)
        if flat.null_count or bad.any():
            at = pc.index(flat.is_null(), True).as_py() if flat.null_count else int(bad.argmax())
            found = "a null inside a list" if flat.null_count else f"{values[at]:g}".replace("nan", "NaN")
            raise DataError(
                f"column '{column}' has {found}",
                where=place.of(column, RowsOf(offsets)(at)),
                expected=f"a finite number or a time for each id of '{feature}'",
                do="correct the data; or skip such rows: data.on_error=skip; or take "
                f"{scalar(column)} out of sparse.{feature}.side_features",
            )
        out[:, number] = values
    return out


def as_float64(array: pa.Array) -> np.ndarray:
    """Numbers as they are, times in seconds (of days: of their beginning in UTC): float64; NaN for a null."""
    kind = array.type
    scale: float = 1
    if types.is_timestamp(kind) or types.is_duration(kind):
        array, scale = array.cast(pa.int64()), PER_SECOND[kind.unit]
    elif types.is_date(kind):
        array, scale = array.cast(pa.date32()).cast(pa.int32()), 1 / DAY_S
    return array.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False) / scale
