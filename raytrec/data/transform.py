"""Runs data.transforms on decoded tables (transforms.py says what each one is). No torch here."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from raytrec import python_path
from raytrec import transforms as t
from raytrec.data.form import one_array, unnest
from raytrec.data.hashing import hash_integers, hash_text
from raytrec.data.kinds import is_list, is_text
from raytrec.errors import DataError
from raytrec.storage import open_filesystem, read_text


def transformed(
    table: pa.Table, transforms: tuple[t.Transform, ...], where: str, folder: str | None = None
) -> pa.Table:
    """A table after all transforms, as many rows in the same order.

    Args:
        where: file and row group, for errors.
        folder: where modules of `module:function` may lie beside Python's own path.

    Raises:
        DataError: a transform failed; names it.
    """
    for number, transform in enumerate(transforms):
        try:
            after = _apply(transform, table, folder)
        except DataError:
            raise
        except Exception as error:
            first = (str(error).splitlines() or [""])[0]
            raise _failed(number, transform, where, f"{type(error).__name__}: {first}") from error
        if not isinstance(after, pa.Table) or after.num_rows != table.num_rows:
            got = (
                f"{after.num_rows} rows for {table.num_rows}" if isinstance(after, pa.Table) else type(after)
            )
            raise _failed(number, transform, where, f"it returned {got}")
        table = after
    return table


def _failed(number: int, transform: t.Transform, where: str, why: str) -> DataError:
    return DataError(
        f"data.transforms[{number}] ({transform.do}) failed: {why}",
        where=where,
        expected="a table with as many rows, in the same order",
        do="correct the transform's settings, or the column",
    )


def _apply(transform: t.Transform, table: pa.Table, folder: str | None) -> pa.Table:
    if isinstance(transform, t.Python):
        return _function(transform.do, folder)(table, **transform.options)
    on_values = partial(BUILT_IN[type(transform)], transform)
    columns = [_within_lists(one_array(table[name]), on_values) for name in transform.reads]
    for target, column in zip(transform.writes, columns, strict=True):
        if target in table.column_names:
            table = table.set_column(table.column_names.index(target), target, column)
        else:
            table = table.append_column(target, column)
    return table


_function = lru_cache(python_path.load)


def _within_lists(array: pa.Array, on_values: Callable[[pa.Array], pa.Array]) -> pa.Array:
    """The function's result on an array, or on what its lists hold."""
    if not is_list(array.type):
        return on_values(array)
    offsets, flat = unnest(array)
    values = on_values(flat)
    if values.null_count:  # e.g. not in the vocabulary: no id, so the bag gets shorter
        kept = values.is_valid().to_numpy(zero_copy_only=False)
        offsets = np.concatenate([[0], np.cumsum(kept)]).astype(np.int32)[offsets]
        values = values.drop_null()
    return pa.ListArray.from_arrays(offsets, values)


def _fill_null(spec: t.FillNull, array: pa.Array) -> pa.Array:
    value = pa.scalar(spec.value).cast(array.type)
    if pa.types.is_floating(array.type):
        array = pc.if_else(pc.is_nan(array), pa.scalar(None, array.type), array)
    return pc.fill_null(array, value)


def _clip(spec: t.Clip, array: pa.Array) -> pa.Array:
    if spec.low is not None:
        array = pc.if_else(pc.less(array, spec.low), pa.scalar(spec.low).cast(array.type), array)
    if spec.high is not None:
        array = pc.if_else(pc.greater(array, spec.high), pa.scalar(spec.high).cast(array.type), array)
    return array


def _log(spec: t.Log, array: pa.Array) -> pa.Array:
    number = array.cast(pa.float64(), safe=False)
    return pc.multiply(pc.sign(number), pc.log1p(pc.abs(number))).cast(pa.float32(), safe=False)


def _bucketize(spec: t.Bucketize, array: pa.Array) -> pa.Array:
    number = array.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)  # a null becomes NaN
    buckets = np.searchsorted(np.array(spec.boundaries), number, side="right")
    return pa.array(buckets, pa.int64(), mask=np.isnan(number))


def _hash(spec: t.Hash, array: pa.Array) -> pa.Array:
    valid = array.is_valid().to_numpy(zero_copy_only=False)
    flat = array.drop_null()
    if is_text(flat.type):
        ids = hash_text(flat, spec.rows)
    else:
        if not pa.types.is_integer(flat.type):
            raise TypeError(f"hash takes integers or text, not {flat.type}")
        ids = hash_integers(flat.to_numpy(), spec.rows)
    out = np.zeros(len(array), np.int64)
    out[valid] = ids
    return pa.array(out, mask=~valid)


def _lookup_vocabulary(spec: t.LookupVocabulary, array: pa.Array) -> pa.Array:
    known = _vocabulary(spec.vocabulary, array.type)
    ids = pc.index_in(array, value_set=known, skip_nulls=True).cast(pa.int64())
    if spec.unknown is None:
        return ids
    return pc.if_else(array.is_valid(), pc.fill_null(ids, spec.unknown), ids)


@lru_cache
def _vocabulary(uri: str, kind: pa.DataType) -> pa.Array:
    """The values of a vocabulary in a column's type; each once."""
    if uri.endswith(".parquet"):
        filesystem, path = open_filesystem(uri)
        values = one_array(pq.read_table(path, filesystem=filesystem).column(0))
    else:
        values = pa.array(read_text(uri).splitlines(), pa.string())
    values = values.cast(kind)
    if len(values.unique()) != len(values):
        raise ValueError(f"{uri} has a value twice")
    return values


BUILT_IN: dict[type, Callable[..., pa.Array]] = {
    t.FillNull: _fill_null,
    t.Clip: _clip,
    t.Log: _log,
    t.Bucketize: _bucketize,
    t.Hash: _hash,
    t.LookupVocabulary: _lookup_vocabulary,
}
