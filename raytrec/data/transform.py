"""Runs data.transforms on decoded tables (transforms.py says what each one is). No torch here."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from raytrec.common import python_path
from raytrec.common.errors import DataError
from raytrec.common.storage import open_filesystem, read_text
from raytrec.config import transforms as t
from raytrec.data import times
from raytrec.data.form import one_array, unnest
from raytrec.data.hashing import hash_integers, hash_text
from raytrec.data.kinds import is_list, is_number, is_text, value_type
from raytrec.data.sampling import ALIKE, Draw, sample

# Kind of transform → its function of (the transform, values): values, as many.
ON_VALUES: dict[type, Callable[..., pa.Array]] = {t.DatePart: times.date_part, t.Age: times.age}


def does(kind: type) -> Callable[[Callable[..., pa.Array]], Callable[..., pa.Array]]:
    """Decorator: the function does what transforms of this kind ask for."""
    return lambda function: ON_VALUES.setdefault(kind, function)


def apply_transforms(
    table: pa.Table,
    transforms: tuple[t.Transform, ...],
    where: str,
    folder: str | None = None,
    draw: Draw = ALIKE,
) -> pa.Table:
    """A table after all transforms, as many rows in the same order.

    Args:
        where: file and row group, for errors.
        folder: where modules of `module:function` may be, beside Python's own path.
        draw: by what its rows draw ids.

    Raises:
        DataError: a transform failed; names it.
    """
    for number, transform in enumerate(transforms):
        try:
            after = _apply(transform, table, folder, draw)
        except DataError:
            raise
        except Exception as error:
            first = (str(error).splitlines() or [""])[0]
            own = isinstance(transform, t.Python) or not isinstance(error, (TypeError, ValueError))
            kind = f"{type(error).__name__}: " if own or not first else ""
            raise _failed(number, transform, where, f"{kind}{first}") from error
        if not isinstance(after, pa.Table) or after.num_rows != table.num_rows:
            got = (
                f"{after.num_rows} rows for {table.num_rows}" if isinstance(after, pa.Table) else type(after)
            )
            raise _failed(number, transform, where, f"it returned {got}")
        table = after
    return table


def _failed(number: int, transform: Any, where: str, why: str) -> DataError:
    return DataError(
        f"data.transforms[{number}] ({transform.do}) failed: {why}",
        where=where,
        expected="a table with as many rows, in the same order",
        do="correct the transform's settings, or the column",
    )


def _apply(transform: t.Transform, table: pa.Table, folder: str | None, draw: Draw) -> pa.Table:
    if isinstance(transform, t.Sample):
        drawn = sample(transform, table, draw, _known(transform, table))
        return _with_columns(table, [transform.column], [drawn])
    if isinstance(transform, t.Python):
        return _function(transform.do, folder)(table, **transform.options)
    on_values = partial(ON_VALUES[type(transform)], transform)
    if isinstance(transform, t.Age):
        end = transform.until_column
        on_values = partial(on_values, until=one_array(table[end]) if end else None)
    columns = [
        _within_lists(_typed(one_array(table[name]), transform), on_values) for name in transform.columns
    ]
    return _with_columns(table, transform.writes, columns)


def _with_columns(table: pa.Table, names: list[str], columns: list[pa.Array]) -> pa.Table:
    """A table with further columns, or other ones in the place of its own."""
    for target, column in zip(names, columns, strict=True):
        if target in table.column_names:
            table = table.set_column(table.column_names.index(target), target, column)
        else:
            table = table.append_column(target, column)
    return table


_function = lru_cache(python_path.load)


def _typed(array: pa.Array, transform: t.Transform) -> pa.Array:
    """An array; one of nothing but nulls (as in files that never saw a value) in a type for the transform."""
    if not pa.types.is_null(value_type(array.type)):
        return array
    kind = pa.int64()
    if isinstance(transform, t.FillNull):
        kind = pa.scalar(transform.value).type
    elif isinstance(transform, (t.DatePart, t.Age)):
        kind = pa.timestamp("us")
    elif isinstance(transform, t.LookupVocabulary) or (
        isinstance(transform, t.Binarize) and transform.positive
    ):
        kind = pa.string()
    if not is_list(array.type):
        return array.cast(kind)
    offsets, flat = unnest(array)
    return pa.ListArray.from_arrays(offsets, flat.cast(kind))


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


@does(t.FillNull)
def _fill_null(spec: t.FillNull, array: pa.Array) -> pa.Array:
    value = pa.scalar(spec.value)
    if pa.types.is_decimal(array.type):  # by way of text: pyarrow wants room for every integer's digits
        value = pa.scalar(str(spec.value))
    value = value.cast(array.type)
    if pa.types.is_floating(array.type):
        array = pc.if_else(pc.is_nan(array), pa.scalar(None, array.type), array)
    return pc.fill_null(array, value)


def _scalar(value: float | int | str, kind: pa.DataType) -> pa.Scalar:
    """A setting in a column's type; for decimals from its digits, as pyarrow wants room for any integer's."""
    return pa.scalar(str(value) if pa.types.is_decimal(kind) else value).cast(kind)


@does(t.Clip)
def _clip(spec: t.Clip, array: pa.Array) -> pa.Array:
    if spec.low is not None:
        array = pc.if_else(pc.less(array, spec.low), _scalar(spec.low, array.type), array)
    if spec.high is not None:
        array = pc.if_else(pc.greater(array, spec.high), _scalar(spec.high, array.type), array)
    return array


@does(t.Log)
def _log(spec: t.Log, array: pa.Array) -> pa.Array:
    number = array.cast(pa.float64(), safe=False)
    return pc.multiply(pc.sign(number), pc.log1p(pc.abs(number))).cast(pa.float32(), safe=False)


@does(t.Bucketize)
def _bucketize(spec: t.Bucketize, array: pa.Array) -> pa.Array:
    number = array.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)  # a null becomes NaN
    buckets = np.searchsorted(np.array(spec.boundaries), number, side="right")
    return pa.array(buckets, pa.int64(), mask=np.isnan(number))


@does(t.Hash)
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


@does(t.LookupVocabulary)
def _lookup_vocabulary(spec: t.LookupVocabulary, array: pa.Array) -> pa.Array:
    known = _vocabulary(spec.vocabulary, array.type)
    ids = pc.index_in(array, value_set=known, skip_nulls=True).cast(pa.int64())
    if spec.unknown is None:
        return ids
    return pc.if_else(array.is_valid(), pc.fill_null(ids, spec.unknown), ids)


def _known(spec: t.Sample, table: pa.Table) -> pa.Array | None:
    """The vocabulary to draw from, in the type of the first column of ids to exclude."""
    if spec.vocabulary is None:
        return None
    kinds = (value_type(table.schema.field(name).type) for name in spec.exclude)
    kind = next((kind for kind in kinds if not pa.types.is_null(kind)), None)
    return _vocabulary(spec.vocabulary, pa.int64() if kind and pa.types.is_integer(kind) else kind)


@lru_cache
def _vocabulary(uri: str, kind: pa.DataType | None) -> pa.Array:
    """The values of a vocabulary in a column's type, or in that of the file; each once."""
    if uri.endswith(".parquet"):
        filesystem, path = open_filesystem(uri)
        values = one_array(pq.read_table(path, filesystem=filesystem).column(0))
    else:
        values = pa.array(read_text(uri).splitlines(), pa.string())
    values = values.cast(kind or values.type)
    if len(values.unique()) != len(values):
        raise ValueError(f"{uri} has a value twice")
    return values


@does(t.Binarize)
def _binarize(spec: t.Binarize, array: pa.Array) -> pa.Array:
    kind = array.type
    if is_number(array.type):
        array = array.cast(pa.float64(), safe=False)
        array = pc.if_else(pc.is_nan(array), pa.scalar(None, pa.float64()), array)
    if spec.at_least is not None:
        if is_text(array.type):
            raise TypeError(f"at_least takes numbers, not {array.type}; for text: positive: [TEXT, …]")
        return pc.greater_equal(array, float(spec.at_least)).cast(pa.int8())
    if wrong := [value for value in spec.positive if isinstance(value, str) != is_text(array.type)]:
        raise TypeError(
            f"the column holds {kind}, and positive {wrong[0]!r}"
            + ("; put it into quotes (YAML's bare yes, no and numbers are no text)" * is_text(array.type))
        )
    known = spec.positive if is_text(array.type) else [float(value) for value in spec.positive]
    known = pa.array(known).cast(array.type)
    return pc.if_else(array.is_valid(), pc.is_in(array, value_set=known), pa.scalar(None, pa.bool_())).cast(
        pa.int8()
    )


@does(t.Cast)
def _cast(spec: t.Cast, array: pa.Array) -> pa.Array:
    kind = {"int64": pa.int64(), "float32": pa.float32(), "string": pa.string()}[spec.to]
    if is_text(array.type) and spec.to != "string":
        array = pc.utf8_trim_whitespace(array.cast(pa.string()))
    if pa.types.is_floating(array.type) and spec.to == "int64":  # what pandas makes of nulls among integers
        array = pc.if_else(pc.is_nan(array), pa.scalar(None, array.type), array)
    if pa.types.is_decimal(array.type) and spec.to == "float32":
        array = array.cast(pa.float64())
    return array.cast(kind, safe=spec.to != "float32")


@does(t.DropNull)
def _drop_null(spec: t.DropNull, array: pa.Array) -> pa.Array:
    return array  # lists lose their nulls after every transform
