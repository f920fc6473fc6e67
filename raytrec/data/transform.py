"""Apply data.transforms to decoded tables. config/transforms.py describes the transforms.

Ids drawn by a transform are computed from the name of the target column and the row's index in the dataset, and, in
training, from run.seed and the epoch. The ids depend neither on the reader nor on other rows of the same read, and
stay the same after a resume. This module does not import torch.
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
from raytrec.common.formatting import format_count
from raytrec.common.registry import load_code
from raytrec.config import transforms as t
from raytrec.data.arrow import is_list, is_text, to_plain_array, unnest, value_type
from raytrec.data.ids import hash_bits
from raytrec.data.transform_functions import VALUE_FUNCTIONS, read_cumulative_shares, read_vocabulary

MAX_IDS_PER_DRAW = 1 << 20  # number of ids drawn at a time; each int64 array takes 8 MiB
_load_function = lru_cache(load_code)


@dataclass(frozen=True)
class Draw:
    """Seed for the ids that the transform `sample` draws for the rows of a table.

    Attributes:
        key: (run.seed, epoch); () for evaluations and predictions, which draw the same ids in every run.
        first: Index of the table's first row in its dataset.
    """

    key: tuple[int, ...] = ()
    first: int = 0


def apply_transforms(
    table: pa.Table, transforms: tuple[t.Transform, ...], where: str, folder: str | None = None, draw: Draw = Draw()
) -> pa.Table:
    """Return a table with all transforms applied; the number and order of rows are unchanged.

    Args:
        table: Decoded table.
        transforms: Transforms in the order of their application.
        where: File and row group, for error messages.
        folder: Folder that is added to sys.path if a module of `module:function` is not found; None: no folder.
        draw: Seed for drawn ids; default: the seed of evaluations.

    Raises:
        DataError: A transform failed, returned another number of rows, or did not return a table.
    """
    for transform in transforms:
        try:
            after = _apply(transform, table, folder, draw)
        except DataError:
            raise
        except Exception as error:
            message = (str(error).splitlines() or [""])[0]
            is_unexpected = isinstance(transform, t.Python) or not isinstance(error, (TypeError, ValueError))
            kind = f"{type(error).__name__}: " if is_unexpected or not message else ""
            expected = "modules that every node can import" if isinstance(error, ImportError) else None
            raise _transform_error(transform, where, f"{kind}{message}", expected) from error
        if not isinstance(after, pa.Table) or after.num_rows != table.num_rows:
            rows = isinstance(after, pa.Table) and f"{format_count(after.num_rows, 'row')}, not {table.num_rows:,}"
            why = f"it returned {rows or f'an object of type {type(after).__name__}'}"
            expected = "a pyarrow.Table with the same number of rows, in the same order"
            raise _transform_error(transform, where, why, expected)
        table = after
    return table


def _transform_error(transform: Any, where: str, why: str, expected: str | None) -> DataError:
    of_columns = f" of {', '.join(transform.writes)}" if transform.writes else ""
    return DataError(
        f"transform {transform.do}{of_columns} in data.transforms failed: {why}",
        where=where,
        expected=expected,
        do="correct the transform, or the data",
    )


def _apply(transform: t.Transform, table: pa.Table, folder: str | None, draw: Draw) -> pa.Table:
    if isinstance(transform, t.Sample):
        drawn = sample(transform, table, draw, _read_sample_vocabulary(transform, table))
        return _with_columns(table, transform.writes, drawn)
    if isinstance(transform, t.Python):
        return _load_function(transform.do, folder)(table, **transform.options)
    on_values = partial(VALUE_FUNCTIONS[type(transform)], transform)
    if isinstance(transform, t.Age):
        end = transform.until_column
        on_values = partial(on_values, until=to_plain_array(table[end]) if end else None)
    columns = [
        _map_list_values(_cast_null_array(to_plain_array(table[name]), transform), on_values)
        for name in transform.columns
    ]
    return _with_columns(table, transform.writes, columns)


def _with_columns(table: pa.Table, names: list[str], columns: list[pa.Array]) -> pa.Table:
    """Return a table with `columns` added under `names`; existing columns of these names are replaced."""
    for target, column in zip(names, columns, strict=True):
        if target in table.column_names:
            table = table.set_column(table.column_names.index(target), target, column)
        else:
            table = table.append_column(target, column)
    return table


def _cast_null_array(array: pa.Array, transform: t.Transform) -> pa.Array:
    """Return an array; if its values have type null, cast them to a type that the transform accepts.

    A column, or the lists in it, has type null in a file that contains no other values in this column.
    """
    if not pa.types.is_null(value_type(array.type)):
        return array
    kind = pa.int64()
    if isinstance(transform, t.FillNull):
        kind = pa.scalar(transform.value).type
    elif isinstance(transform, (t.DatePart, t.Age)):
        kind = pa.timestamp("us")
    elif isinstance(transform, t.LookupVocabulary) or (isinstance(transform, t.Binarize) and transform.positive):
        kind = pa.string()
    if not is_list(array.type):
        return array.cast(kind)
    offsets, flat = unnest(array)
    return pa.ListArray.from_arrays(offsets, flat.cast(kind))


def _map_list_values(array: pa.Array, on_values: Callable[[pa.Array], pa.Array]) -> pa.Array:
    """Return the result of a function on an array, or on the values in its lists; nulls in the lists are removed."""
    if not is_list(array.type):
        return on_values(array)
    offsets, flat = unnest(array)
    values = on_values(flat)
    if values.null_count:  # e.g. a value outside the vocabulary has no id and is removed from the bag
        is_valid = values.is_valid().to_numpy(zero_copy_only=False)
        offsets = np.concatenate([[0], np.cumsum(is_valid)]).astype(np.int32)[offsets]
        values = values.drop_null()
    return pa.ListArray.from_arrays(offsets, values)


def _read_sample_vocabulary(spec: t.Sample, table: pa.Table) -> pa.Array | None:
    """Return the vocabulary to draw from, cast to the type of the first excluded column whose type is not null.

    Integers are cast to int64. The result is None if the transform sets no vocabulary.
    """
    if spec.vocabulary is None:
        return None
    kinds = (value_type(table.schema.field(name).type) for name in spec.exclude)
    kind = next((kind for kind in kinds if not pa.types.is_null(kind)), None)
    return read_vocabulary(spec.vocabulary, pa.int64() if kind and pa.types.is_integer(kind) else kind)


def sample(
    spec: t.Sample, table: pa.Table, draw: Draw, vocabulary_values: pa.Array | None = None
) -> list[pa.ListArray]:
    """Draw `count` ids for each row from [0, rows) or a vocabulary, except the ids in columns `exclude`.

    Draws are independent, so an id may be drawn twice. Excluded ids that are out of range or not in the
    vocabulary are ignored. A row that excludes all ids gets no ids. Evaluations and predictions draw no ids if
    `in_evaluations` is False. With `count: all`, the lists are empty, because Assembler adds the ids.

    Args:
        spec: Settings of the transform.
        table: Table with the columns of excluded ids.
        draw: Seed for drawn ids.
        vocabulary_values: Vocabulary; None: ids are drawn from [0, rows).

    Returns:
        An array with the list of ids drawn for each row. With `frequency` and `log_share`, also an array with the
        natural logarithm of the ratio of each id's probability (without exclusions) to the uniform probability.

    Raises:
        DataError: The ids in an excluded column and the drawn ids have different types.
        ValueError: The frequencies are invalid (`read_cumulative_shares`).
    """
    if spec.count == "all":  # Assembler adds the ids
        return [pa.ListArray.from_arrays(np.zeros(table.num_rows + 1, np.int32), pa.array([], pa.int64()))]
    id_count = spec.rows if vocabulary_values is None else len(vocabulary_values)
    begins = read_cumulative_shares(spec.vocabulary, spec.frequency, spec.power) if spec.frequency else None
    total = id_count if begins is None else int(begins[-1])
    rows, (owners, ids) = table.num_rows, _excluded(spec, table, id_count, vocabulary_values)
    numbers = [*spec.column.encode(), *draw.key]  # the seed differs between target columns
    seed = hash_bits(np.random.SeedSequence(numbers, spawn_key=(len(draw.key),)).generate_state(1, np.uint64))
    lengths, parts = np.full(rows, spec.count, np.int64), [np.empty(0, np.int64)]
    if not draw.key and not spec.in_evaluations:
        lengths[:], rows = 0, 0
    size = max(1, min(MAX_IDS_PER_DRAW // spec.count, (1 << 62) // (total + 1)))
    for first in range(0, rows, size):
        stop = min(first + size, rows)
        begin, end = (int(np.searchsorted(owners, place)) for place in (first, stop))
        row_numbers = np.arange(draw.first + first, draw.first + stop, dtype=np.uint64)
        bits = hash_bits(hash_bits(row_numbers ^ seed)[:, np.newaxis] + np.arange(spec.count, dtype=np.uint64))
        drawn, has_ids = _to_allowed_ids(bits, total, begins, owners[begin:end] - first, ids[begin:end])
        lengths[first:stop][~has_ids] = 0
        parts.append(drawn[has_ids].ravel())
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    numbers_drawn = np.concatenate(parts)
    values = [pa.array(numbers_drawn) if vocabulary_values is None else vocabulary_values.take(pa.array(numbers_drawn))]
    if begins is not None and spec.log_share:
        values.append(pa.array(np.log(np.diff(begins)[numbers_drawn] * (id_count / total))))
    return [pa.ListArray.from_arrays(offsets, column) for column in values]


def _excluded(spec: t.Sample, table: pa.Table, id_count: int, vocab: pa.Array | None) -> tuple[np.ndarray, np.ndarray]:
    """Return (rows int64 [N], ascending; ids int64 [N]) for all excluded ids that could be drawn.

    The ids are positions in the vocabulary if there is one.
    """
    owners, ids = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for name in spec.exclude:
        offsets, flat = unnest(to_plain_array(table[name]))
        values = _to_positions(flat, name, vocab).fill_null(-1).to_numpy(zero_copy_only=False)
        within = (values >= 0) & (values < id_count)
        owners.append(np.repeat(np.arange(table.num_rows), np.diff(offsets))[within])
        ids.append(values[within])
    owner, value = np.concatenate(owners), np.concatenate(ids)
    order = np.argsort(owner, kind="stable")
    return owner[order], value[order]


def _to_positions(ids: pa.Array, name: str, vocab: pa.Array | None) -> pa.Array:
    """Return ids as int64; if there is a vocabulary, positions in the vocabulary, and null for unknown ids."""
    if pa.types.is_null(ids.type) or (vocab is None and pa.types.is_integer(ids.type)):
        return ids.cast(pa.int64(), safe=False)
    if vocab is not None and (is_text if is_text(vocab.type) else pa.types.is_integer)(ids.type):
        return pc.index_in(ids.cast(vocab.type), value_set=vocab, skip_nulls=True).cast(pa.int64())
    advice = f"convert {name} or the vocabulary, so that both contain integers, or both text"
    if vocab is None:
        advice = f"convert {name} to integers first (do: cast or lookup_vocabulary), or set vocabulary to a file of ids"
    raise DataError(
        f"sample draws ids of type {'int64' if vocab is None else vocab.type}, but {name} has type {ids.type}",
        where=f"data.transforms, do: sample, exclude: {name}",
        expected="integers, or text if the vocabulary contains text",
        do=advice,
    )


def _to_allowed_ids(
    bits: np.ndarray, total: int, begins: np.ndarray | None, owners: np.ndarray, ids: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Convert random bits to ids, leaving out the excluded ids of each row.

    Each id occupies a part of [0, total), whose size is proportional to the id's probability. Let [bᵢ, bᵢ + mᵢ)
    be the parts of a row's excluded ids e₀ < e₁ < …. The u-th number outside these parts is u plus the sizes of all
    parts with bᵢ − (m₀ + … + mᵢ₋₁) ≤ u.

    Args:
        bits: Random bits, uint64 [n, count].
        total: Sum of the sizes of the parts of all ids.
        begins: Start of each id's part, followed by the total, int64 [ids + 1]; None: each part has size 1.
        owners: Rows of the excluded ids, in [0, n), int64 [N].
        ids: Excluded ids, int64 [N].

    Returns:
        Ids, int64 [n, count], and a mask, bool [n], that is False for rows that exclude all ids.
    """
    count, width = len(bits), total + 1
    owners, ids = np.unique(np.stack([owners, ids]), axis=1) if len(ids) else np.empty((2, 0), np.int64)
    first = ids if begins is None else begins[ids]
    sizes = np.ones_like(ids) if begins is None else begins[ids + 1] - first
    totals = np.concatenate([[0], np.cumsum(sizes)])  # cumulative sizes of the excluded parts, row after row
    bounds = totals[np.searchsorted(owners, np.arange(count + 1))]
    free = total - np.diff(bounds)
    u = (bits % np.maximum(free, 1).astype(np.uint64)[:, np.newaxis]).astype(np.int64)
    shifted = owners * width + first - (totals[:-1] - bounds[owners])
    skipped = totals[np.searchsorted(shifted, np.arange(count)[:, np.newaxis] * width + u, side="right")]
    allowed = u + skipped - bounds[:-1, np.newaxis]
    if begins is not None:
        allowed = np.searchsorted(begins, allowed, side="right") - 1
    return allowed, free > 0
