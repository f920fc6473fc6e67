"""Runs data.transforms on decoded tables (config/transforms.py describes each). No torch here.

Ids that a transform draws follow from run.seed, the epoch and the row's number in the dataset by arithmetic:
they are the same whatever reads the row, whatever is read with it, and after a resume.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raytrec.common.errors import DataError
from raytrec.common.registry import load_code
from raytrec.config import transforms as t
from raytrec.config.transforms import Sample
from raytrec.data.arrow import is_list, is_text, one_array, unnest, value_type
from raytrec.data.ids import hash_bits
from raytrec.data.transform_functions import ON_VALUES, read_shares, read_vocabulary

IDS_AT_ONCE = 1 << 20  # ids that are drawn together: 8 MiB for each number about them
_function = lru_cache(load_code)


@dataclass(frozen=True)
class Draw:
    """By what the rows of a table draw.

    Attributes:
        key: run.seed and the epoch; (): of evaluations and predictions, which draw alike in every run.
        first: the number of the table's first row in its dataset.
    """

    key: tuple[int, ...] = ()
    first: int = 0


ALIKE = Draw()  # also where only types, or existing values, are looked at


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
        folder: where modules of `module:function` may be, in addition to Python's own path.
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
        return _with_columns(table, transform.writes, drawn)
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
    """A table with further columns, or with some replaced."""
    for target, column in zip(names, columns, strict=True):
        if target in table.column_names:
            table = table.set_column(table.column_names.index(target), target, column)
        else:
            table = table.append_column(target, column)
    return table


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


def _known(spec: t.Sample, table: pa.Table) -> pa.Array | None:
    """The vocabulary to draw from, in the type of the first column of ids to exclude."""
    if spec.vocabulary is None:
        return None
    kinds = (value_type(table.schema.field(name).type) for name in spec.exclude)
    kind = next((kind for kind in kinds if not pa.types.is_null(kind)), None)
    return read_vocabulary(spec.vocabulary, pa.int64() if kind and pa.types.is_integer(kind) else kind)


def sample(spec: Sample, table: pa.Table, draw: Draw, known: pa.Array | None = None) -> list[pa.ListArray]:
    """`count` ids for each row, of [0, rows) or a vocabulary, without those in columns `exclude`; and with
    `log_share`, ln of how much more likely than uniformly each was drawn where nothing is excluded.

    Draws are independent, so that an id may come twice. Excluded ids that are out of range, or not in the
    vocabulary, change nothing; a row that excludes all ids gets none.

    Args:
        known: the vocabulary.

    Raises:
        DataError: a column to exclude holds other ids than those that are drawn.
    """
    if spec.count == "all":  # Assembler brings them
        return [pa.ListArray.from_arrays(np.zeros(table.num_rows + 1, np.int32), pa.array([], pa.int64()))]
    among = spec.rows if known is None else len(known)
    begins = read_shares(spec.vocabulary, spec.frequency, spec.power) if spec.frequency else None
    total = among if begins is None else int(begins[-1])
    rows, (owners, ids) = table.num_rows, _excluded(spec, table, among, known)
    seed = hash_bits(_seed(spec, draw))
    lengths, parts = np.full(rows, spec.count, np.int64), [np.empty(0, np.int64)]
    if not draw.key and not spec.in_evaluations:
        lengths[:], rows = 0, 0
    size = max(1, min(IDS_AT_ONCE // spec.count, (1 << 62) // (total + 1)))
    for first in range(0, rows, size):
        stop = min(first + size, rows)
        begin, end = (int(np.searchsorted(owners, place)) for place in (first, stop))
        numbers = np.arange(draw.first + first, draw.first + stop, dtype=np.uint64)
        bits = hash_bits(hash_bits(numbers ^ seed)[:, np.newaxis] + np.arange(spec.count, dtype=np.uint64))
        drawn, some = _others(bits, total, begins, owners[begin:end] - first, ids[begin:end])
        lengths[first:stop][~some] = 0
        parts.append(drawn[some].ravel())
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    found = np.concatenate(parts)
    values = [pa.array(found) if known is None else known.take(pa.array(found))]
    if begins is not None and spec.log_share:
        values.append(pa.array(np.log(np.diff(begins)[found] * (among / total))))
    return [pa.ListArray.from_arrays(offsets, each) for each in values]


def _seed(spec: Sample, draw: Draw) -> np.ndarray:
    """uint64 [1]; two columns of one row draw differently."""
    numbers = [*spec.column.encode(), *draw.key]
    return np.random.SeedSequence(numbers, spawn_key=(len(draw.key),)).generate_state(1, np.uint64)


def _excluded(
    spec: Sample, table: pa.Table, among: int, known: pa.Array | None
) -> tuple[np.ndarray, np.ndarray]:
    """(row int64 [N] rising, id int64 [N]) of what rows exclude, as far as it could be drawn; an id of a
    vocabulary is its place."""
    owners, ids = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for name in spec.exclude:
        offsets, flat = unnest(one_array(table[name]))
        values = _places(flat, name, known).fill_null(-1).to_numpy(zero_copy_only=False)
        within = (values >= 0) & (values < among)
        owners.append(np.repeat(np.arange(table.num_rows), np.diff(offsets))[within])
        ids.append(values[within])
    owner, value = np.concatenate(owners), np.concatenate(ids)
    order = np.argsort(owner, kind="stable")
    return owner[order], value[order]


def _places(ids: pa.Array, name: str, known: pa.Array | None) -> pa.Array:
    """Ids as int64, as they are drawn: of a vocabulary, their places in it."""
    if pa.types.is_null(ids.type) or (known is None and pa.types.is_integer(ids.type)):
        return ids.cast(pa.int64(), safe=False)
    if known is not None and (is_text if is_text(known.type) else pa.types.is_integer)(ids.type):
        return pc.index_in(ids.cast(known.type), value_set=known, skip_nulls=True).cast(pa.int64())
    raise DataError(
        f"sample draws {'whole numbers' if known is None else known.type}, and {name} holds {ids.type}",
        where=f"data.transforms, do: sample, exclude: {name}",
        expected="columns of such ids as are drawn",
        do="name a file of the ids to draw from, text with one in each line or Parquet: vocabulary: FILE; or "
        "make numbers of the column first: {do: lookup_vocabulary, …}",
    )


def _others(
    bits: np.ndarray, total: int, begins: np.ndarray | None, owners: np.ndarray, ids: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Random bits as ids that rows do not exclude.

    Of the row's excluded ids e₀ < e₁ < …, eᵢ has the part [bᵢ, bᵢ + mᵢ) of [0, total). The u-th number
    outside of these parts is u plus the sizes of those before it: of those with bᵢ − (m₀ + … + mᵢ₋₁) ≤ u.

    Args:
        bits: uint64 [n, count]. begins: where the part of each id begins, int64 [ids + 1]; None: each has the
            number that it is. owners, ids: int64 [N], excluded ids and their rows of these n.

    Returns:
        (ids int64 [n, count], which rows exclude fewer than all bool [n]).
    """
    count, width = len(bits), total + 1
    excluded = np.unique(np.stack([owners, ids]), axis=1) if len(ids) else np.empty((2, 0), np.int64)
    owners, ids = excluded
    first = ids if begins is None else begins[ids]
    sizes = np.ones_like(ids) if begins is None else begins[ids + 1] - first
    of_all = np.concatenate([[0], np.cumsum(sizes)])  # sizes of the excluded parts, row after row
    bounds = of_all[np.searchsorted(owners, np.arange(count + 1))]
    free = total - np.diff(bounds)
    u = (bits % np.maximum(free, 1).astype(np.uint64)[:, np.newaxis]).astype(np.int64)
    shifted = owners * width + first - (of_all[:-1] - bounds[owners])
    before = of_all[np.searchsorted(shifted, np.arange(count)[:, np.newaxis] * width + u, side="right")]
    found = u + before - bounds[:-1, np.newaxis]
    if begins is not None:
        found = np.searchsorted(begins, found, side="right") - 1
    return found, free > 0
