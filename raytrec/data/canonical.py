"""Convert decoded tables to canonical form, from which batches are assembled. Columns not needed are absent.

    labels     fixed_size_list<float32>[labels]            (absent if no labels are read)
    dense      fixed_size_list<float32>[dense columns]
    ids        fixed_size_list<int>[single features]       one id per row; `no_id` for a missing id
    ids.NAME   list<int>                                   ids of each feature in ResolvedReadPlan.bags
    weights.NAME  list<float32>                            weights of the ids of each feature with weights
    side_features.NAME  list<float64>   n values for each id of a feature with n side features
    task_weights  fixed_size_list<float32>[tasks]   factor of each row in each task (absent: 1 in all tasks)
    keys       fixed_size_list<int64>[key columns]         group keys (ids.compute_group_keys)
    reserved.NAME  any     values of each reserved column, in the column's common type over all files
    present    bool      False for skipped rows (column exists only with data.on_error: skip)
    candidates list<float32>  labels, dense columns and task_weights of each candidate (only if rows are
                         requests; labels and task_weights are then absent, and dense is of requests only)
    changed    list<int32>  number of ids brought into range for each sparse feature, then number of all ids
                         for each. One row contains the counts of its whole decoded table; other rows have
                         empty lists (only if a table accepts ids that are out of range).

A decoded table contains consecutive rows of a row group, after data.transforms. int is int32 if every embedding
table has at most 2³¹ rows and no managed ids, else int64. Does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa

from raytrec.common.errors import DataError
from raytrec.common.formatting import format_count
from raytrec.data.arrow import is_list, to_plain_array, unnest
from raytrec.data.column_conversion import (
    SKIP_ADVICE,
    Place,
    find_first_length_mismatch,
    find_first_null,
    read_label,
    read_scaled_column,
    task_weights,
)
from raytrec.data.ids import ChangeCounts, Feature, bags, compute_group_keys, read_single_ids, side_features
from raytrec.data.read_plans import ResolvedReadPlan

Columns = Sequence[np.ndarray | int]
RESERVED_PREFIX = "reserved."  # prefix of the names of reserved columns


def canonical(table: pa.Table, form: ResolvedReadPlan, place: Place) -> pa.Table:
    """Return a decoded table in canonical form.

    Args:
        table: Table with the columns of the schema, masks, sample weights and reserved columns.
        form: Resolved read plan of the rows.
        place: Location of the first row, for error messages.

    Raises:
        DataError: A value violates the schema or the rules of a task, or cannot be cast to a common type.
        KeyError: A required column is missing.
    """
    schema, sparse, tally = form.schema, form.schema.sparse, ChangeCounts()

    def dense(names: list[str], source: pa.Table, first_place: Place) -> list[np.ndarray]:
        return [read_scaled_column(source[name], name, first_place, schema.scale.get(name)) for name in names]

    features = {name: Feature(name, spec, schema.tables[spec.table], place, tally) for name, spec in sparse.items()}
    examples, example_place = unnest_candidates(table, form, place) if schema.candidates else (table, place)
    lists = [bags(table, features[name]) for name in form.bags]
    ends = {name: offsets for name, (offsets, _, _) in zip(form.bags, lists, strict=True)}
    labels = {name: read_label(examples[name], name, form, example_place) for name in form.plan.labels}
    reserved = {name: cast_reserved_column(table, name, form, place) for name in form.plan.reserved.names}
    return build_canonical_table(
        form,
        [values for values, _ in labels.values()],
        dense(schema.select_request_names(schema.dense), table, place),
        [read_single_ids(table, features[name], form.no_id) for name in form.singles],
        lists,
        table.num_rows,
        tally,
        task_weights(examples, labels, form, example_place) if form.plan.has_task_weights else (),
        [compute_group_keys(reserved[name]) for name in form.plan.reserved.keys],
        [reserved[name] for name in form.plan.reserved.columns],
        {name: side_features(table, features[name], ends[name]) for name in form.features_with_side_features},
        (example_place.offsets, dense(schema.select_candidate_names(schema.dense), examples, example_place))
        if schema.candidates
        else None,
    )


def unnest_candidates(table: pa.Table, form: ResolvedReadPlan, place: Place) -> tuple[pa.Table, Place]:
    """Return a table with one row per candidate of a table of requests, and the location of its first row.

    The columns are the labels, the candidates' dense columns, and the tasks' masks and sample weights. A column
    with one value per request is repeated for each candidate of the request.

    Raises:
        DataError: The lists of a request have different lengths, or a list is null.
    """
    schema, offsets, flat, first = form.schema, None, {}, ""
    task_columns = [read.column for read in form.plan.task_columns]
    task_names = dict.fromkeys([*form.plan.labels, *schema.select_candidate_names(schema.dense), *task_columns])
    lists = dict.fromkeys(
        schema.get_ids_column(name) if name in schema.sparse else name
        for name in schema.candidates
        if form.plan.read_labels or name not in schema.labels
    )
    lists |= {name: None for name in task_names if is_list(table[name].type)}
    for name in lists:
        array = to_plain_array(table[name])
        if (row := find_first_null(array)) is not None:
            raise DataError(
                f"column '{name}' contains a null instead of a list",
                where=place.of(name, row),
                expected="a list with one value per candidate; an empty list if there are no candidates",
                do=f"correct the data; or {SKIP_ADVICE}",
            )
        ends, values = unnest(array)
        offsets, first = (ends, name) if offsets is None else (offsets, first)
        if mismatch := find_first_length_mismatch(ends, offsets):
            row, length, other_length = mismatch
            raise DataError(
                f"column '{name}' has {format_count(length, 'value')}, but column '{first}' has {other_length}",
                where=place.of(name, row),
                expected="one value for each candidate of the row",
                do=f"correct the data, transforms that drop nulls, or the schema's candidates; or {SKIP_ADVICE}",
            )
        flat[name] = values
    rows = pa.array(np.repeat(np.arange(table.num_rows), np.diff(offsets)))
    columns = {name: flat[name] if name in flat else table[name].take(rows) for name in task_names}
    return pa.table(columns), replace(place, offsets=offsets)


def cast_reserved_column(table: pa.Table, name: str, form: ResolvedReadPlan, place: Place) -> pa.Array:
    """Return a reserved column, cast to its common type over all files if `form.types` contains the type.

    Raises:
        DataError: A value cannot be cast to the type.
    """
    kind = form.types.get(name)
    array = to_plain_array(table[name])
    if kind is None or array.type == kind:
        return array
    try:
        return array.cast(kind)
    except pa.ArrowInvalid as error:
        raise DataError(
            f"cannot cast reserved column '{name}' from {array.type} to {kind}, the common type of all files: "
            f"{str(error).splitlines()[0]}",
            where=place.of(name),
            expected=f"values that can be cast to {kind}",
            do="write all files with the same type, or use data.transforms: {do: cast, …}",
        ) from None


def build_canonical_table(
    form: ResolvedReadPlan,
    labels: Columns,
    dense: Columns,
    singles: Columns,
    lists: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray | None]],
    rows: int,
    tally: ChangeCounts | None = None,
    weights_of_tasks: Columns = (),
    keys: Columns = (),
    reserved: Sequence[pa.Array] = (),
    side_features_of: Mapping[str, np.ndarray] | None = None,
    candidates: tuple[np.ndarray, Columns] | None = None,
) -> pa.Table:
    """Return a table in canonical form (see this module) from converted columns.

    Args:
        form: Resolved read plan of the rows.
        labels: n values of each label, or one value for all rows.
        dense: n values of each dense column of requests, or one value for all rows.
        singles: n ids of each single-id feature, or one id for all rows.
        lists: (offsets int32 [n + 1] from 0, ids [offsets[n]], weights float32 [offsets[n]] or None) of each
            feature in `form.bags`.
        rows: Number of rows, n.
        tally: Counts of each feature's ids (ids.ChangeCounts); None: the lists of `changed` are empty.
        weights_of_tasks: n weights for each task; empty if every row has weight 1 in every task.
        keys: n group keys for each key column.
        reserved: Reserved columns, in the order of the plan.
        side_features_of: Feature → float64 [offsets[n], number of side features]; None: no feature has side
            features.
        candidates: (offsets int32 [n + 1] from 0, dense columns of candidates); None: rows are examples. With
            candidates, each label and each task has offsets[n] values.
    """
    columns: dict[str, pa.Array] = {}
    if candidates:
        starts, dense_columns = candidates
        if candidate_columns := [*labels, *dense_columns, *weights_of_tasks]:
            flat = _to_list_array(candidate_columns, int(starts[-1]), np.float32).flatten()
            columns["candidates"] = pa.ListArray.from_arrays(starts * np.int32(len(candidate_columns)), flat)
        labels, weights_of_tasks = [], ()
    matrices = {
        "labels": (labels, np.float32),
        "dense": (dense, np.float32),
        "ids": (singles, form.id_dtype),
        "task_weights": (weights_of_tasks, np.float32),
        "keys": (keys, np.int64),
    }
    columns |= {name: _to_list_array(of, rows, dtype) for name, (of, dtype) in matrices.items() if of}
    for name, (offsets, ids, weights) in zip(form.bags, lists, strict=True):
        columns[f"ids.{name}"] = pa.ListArray.from_arrays(offsets, ids.astype(form.id_dtype, copy=False))
        if weights is not None:
            columns[f"weights.{name}"] = pa.ListArray.from_arrays(offsets, weights)
        if side_features_of and name in side_features_of:
            values = side_features_of[name]
            ends = offsets * np.int32(values.shape[1])
            columns[f"side_features.{name}"] = pa.ListArray.from_arrays(ends, values.reshape(-1))
    for name, array in zip(form.plan.reserved.columns, reserved, strict=True):
        columns[f"{RESERVED_PREFIX}{name}"] = array
    if form.accepts_out_of_range_ids:  # the first row carries the table's counts, even after a shuffle
        counts = [tally[feature] for feature in form.schema.sparse] if tally and rows else []
        flat = np.array(counts, np.int32).T.ravel()
        offsets = np.full(rows + 1, flat.size, np.int32)
        offsets[0] = 0
        columns["changed"] = pa.ListArray.from_arrays(offsets, flat)
    return pa.table(columns)


def make_empty_rows(form: ResolvedReadPlan, rows: int) -> pa.Table:
    """Return `rows` empty rows in canonical form: no ids, and 0 or null for all other values."""
    schema, plan = form.schema, form.plan
    offsets, no_values = np.zeros(rows + 1, np.int32), np.empty(0, np.float32)
    return build_canonical_table(
        form,
        [0] * len(plan.labels),
        [0] * len(schema.select_request_names(schema.dense)),
        [form.no_id] * len(form.singles),
        [(offsets, no_values, no_values if schema.sparse[name].weights else None) for name in form.bags],
        rows,
        None,
        [0] * (len(plan.tasks) if plan.has_task_weights else 0),
        [0] * len(plan.reserved.keys),
        [pa.nulls(rows, form.types.get(name, pa.null())) for name in plan.reserved.columns],
        {name: np.empty((0, len(schema.sparse[name].side_features))) for name in form.features_with_side_features},
        (offsets, [0] * form.of_candidates[1]) if schema.candidates else None,
    )


def take_rows(table: pa.Table, order: np.ndarray) -> pa.Table:
    """Return the rows of a canonical table at the positions `order`, int64 [n]."""
    columns = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        array = to_plain_array(column)
        if pa.types.is_fixed_size_list(array.type):  # np.take on whole rows is three times as fast as Arrow
            width = array.type.list_size
            values = np.take(array.flatten().to_numpy().reshape(-1, width), order, axis=0)
            columns[name] = pa.FixedSizeListArray.from_arrays(values.reshape(-1), width)
        else:
            columns[name] = array.take(pa.array(order))
    return pa.table(columns)


def _to_list_array(columns: Columns, rows: int, dtype: type) -> pa.FixedSizeListArray:
    """Return columns of `rows` values each as an array of `rows` fixed-size lists of type `dtype`."""
    packed = np.empty((rows, len(columns)), dtype)
    for i, column in enumerate(columns):
        packed[:, i] = column
    return pa.FixedSizeListArray.from_arrays(packed.reshape(-1), len(columns))
