"""The canonical form of rows: a table of few columns.

    labels     fixed_size_list<float32>[labels]            (absent where none are read)
    dense      fixed_size_list<float32>[dense columns]     (absent without dense columns)
    ids        fixed_size_list<int>[single features]       one id a row, or `no_id` for none (absent without)
    ids.NAME   list<int>                                   of each other feature
    weights.NAME  list<float32>                            of each feature that has weights
    side_features.NAME  list<float64>   of each feature that has n of them: n values for each id
    task_weights  fixed_size_list<float32>[tasks]   each row's factor in each task (absent: 1 in all)
    keys       fixed_size_list<int64>[key columns]  (absent without)
    reserved.NAME  any     of each reserved column, as it is (absent without)
    present    bool      false: a row that is skipped (only under data.on_error: skip)
    candidates list<float32>  of each candidate of the row: its labels, dense columns and task_weights (only
                         where rows are requests; the columns above have what is the request's, then)
    changed    list<int32>  in one row of many, for all of those: for each sparse feature, how many ids were
                         brought into range, then how many there are (only where a table takes such ids)

int is int32 where every table has at most 2³¹ rows and none has managed ids, else int64. No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import pyarrow as pa

from raytrec.config.features import columns_before
from raytrec.config.schema import Schema
from raytrec.config.transforms import Sample
from raytrec.data.arrow import one_array
from raytrec.data.columns import NO_MANAGED_ID, Tally
from raytrec.data.read_plan import ReadPlan

Columns = Sequence[np.ndarray | int]
RESERVED_PREFIX = "reserved."  # begins the names of reserved columns


@dataclass(frozen=True)
class Form:
    """How the rows of a dataset are read: a plan, and what the dataset's files hold.

    Args:
        lists: sparse features whose column is a list in some file. Those, and features with weights, are bags
            of any length; all others are single: a bag of one id or none.
        types: of reserved columns, and of those from folders, in all files together; default: of each file,
            its own.
        from_folders: columns that files do not hold, but the folders that they are in: date=2026-11-07.
    """

    plan: ReadPlan
    lists: frozenset[str] = frozenset()
    types: Mapping[str, pa.DataType] = field(default_factory=dict)
    from_folders: frozenset[str] = frozenset()

    @property
    def schema(self) -> Schema:
        """The plan's."""
        return self.plan.schema

    @property
    def folders(self) -> dict[str, pa.DataType | None]:
        """Columns that are read from the folders' names, and their types; None: text."""
        return {name: self.types.get(name) for name in self.from_folders}

    @cached_property
    def wanted(self) -> list[str]:
        """The columns that there are to be after the transforms, each once."""
        plan = self.plan
        names = [name for name in plan.schema.columns if plan.read_labels or name not in plan.schema.labels]
        names += [c.column for c in plan.columns_of_tasks]
        names += plan.reserved.names
        return list(dict.fromkeys(names))

    @cached_property
    def columns(self) -> list[str]:
        """The columns to read from files, or from the names of their folders."""
        return columns_before(self.plan.transforms, self.wanted)

    @cached_property
    def trained_columns(self) -> list[str]:
        """Those of them that decide what is learned."""
        plan = self.plan
        learned = {*plan.schema.columns, *plan.reserved.groups, *(c.column for c in plan.columns_of_tasks)}
        aside = set(plan.reserved.names) - learned
        return columns_before(plan.transforms, [name for name in self.wanted if name not in aside])

    @cached_property
    def singles(self) -> list[str]:
        """Single features, in the schema's order."""
        return [name for name in self.schema.sparse if not self._is_list(name)]

    @cached_property
    def with_side_features(self) -> list[str]:
        """Features that have side features, in the schema's order."""
        return [name for name, spec in self.schema.sparse.items() if spec.side_features]

    @cached_property
    def bags(self) -> list[str]:
        """All other features, in the schema's order."""
        return [name for name in self.schema.sparse if self._is_list(name)]

    def _is_list(self, feature: str) -> bool:
        spec = self.schema.sparse[feature]
        listed = feature in self.lists or feature in self.schema.candidates
        return listed or spec.weights is not None or bool(spec.side_features)

    @cached_property
    def of_candidates(self) -> tuple[int, int, int]:
        """How many labels, dense columns and task weights each candidate has."""
        dense = self.schema.of_candidates(self.schema.dense)
        return len(self.plan.labels), len(dense), len(self.plan.tasks) * self.plan.weighs_tasks

    @cached_property
    def counts_changes(self) -> bool:
        """Whether any table takes ids that are out of range."""
        return any(table.out_of_range != "error" for table in self.schema.tables.values())

    @cached_property
    def id_dtype(self) -> type:
        """NumPy's type of ids on their way to the worker."""
        tables = self.schema.tables.values()
        small = max(table.rows for table in tables) <= 2**31 and not self.schema.managed
        return np.int32 if small else np.int64

    @cached_property
    def no_id(self) -> int:
        """What stands in the place of an id where there is none.

        Among managed ids -1 is one. The least number of 64 bits is none: it is taken for the one after it.
        """
        return NO_MANAGED_ID if self.schema.managed else -1

    @cached_property
    def every_id(self) -> dict[str, int]:
        """Features of which each global batch has every id once → how many there are."""
        samples = (transform for transform in self.plan.transforms if isinstance(transform, Sample))
        rows = {sample.column: sample.rows for sample in samples if sample.count == "all"}
        columns = {name: self.schema.column_of(name) for name in self.schema.sparse}
        return {name: rows[column] for name, column in columns.items() if column in rows}

    @cached_property
    def row_bytes(self) -> int:
        """About how many bytes a row takes, if bags have 8 ids, and those that are drawn."""
        samples = [transform for transform in self.plan.transforms if isinstance(transform, Sample)]
        drawn = sum(sample.count for sample in samples if sample.count != "all")
        numbers = (
            len(self.schema.labels) + len(self.schema.dense) + len(self.plan.tasks) * self.plan.weighs_tasks
        )
        reserved = 8 * len(self.plan.reserved.keys) + 16 * len(self.plan.reserved.columns)
        reserved += sum(8 * 8 * len(spec.side_features) for spec in self.schema.sparse.values())
        return (
            reserved
            + 4 * numbers
            + np.dtype(self.id_dtype).itemsize * (len(self.singles) + 8 * len(self.bags) + drawn)
        )

    def table(
        self,
        labels: Columns,
        dense: Columns,
        singles: Columns,
        bags: list[tuple[np.ndarray, np.ndarray, np.ndarray | None]],
        rows: int,
        tally: Tally | None = None,
        task_weights: Columns = (),
        keys: Columns = (),
        reserved: Sequence[pa.Array] = (),
        side_features: Mapping[str, np.ndarray] | None = None,
        candidates: tuple[np.ndarray, Columns] | None = None,
    ) -> pa.Table:
        """A table of this form.

        Args:
            labels, dense, singles: n values for each column, or one for all rows.
            bags: (offsets int32 [n + 1] from 0, ids [offsets[n]], weights or None) for each.
            rows: n.
            tally: of ids that were brought into range.
            task_weights, keys, reserved: n values for each task (none where no task weighs rows), key column
                and reserved column.
            side_features: of each feature that has some: float64 [offsets[n], its side features].
            candidates: (offsets int32 [n + 1] from 0, their dense columns), where rows are requests; labels
                and task_weights then have offsets[n] values.
        """
        columns: dict[str, pa.Array] = {}
        if candidates:
            starts, beside = candidates
            if of_each := [*labels, *beside, *task_weights]:
                flat = _matrix(of_each, int(starts[-1]), np.float32).flatten()
                columns["candidates"] = pa.ListArray.from_arrays(starts * np.int32(len(of_each)), flat)
            labels, task_weights = [], ()
        matrices = {
            "labels": (labels, np.float32),
            "dense": (dense, np.float32),
            "ids": (singles, self.id_dtype),
            "task_weights": (task_weights, np.float32),
            "keys": (keys, np.int64),
        }
        columns |= {name: _matrix(of, rows, dtype) for name, (of, dtype) in matrices.items() if of}
        for name, (offsets, ids, weights) in zip(self.bags, bags, strict=True):
            columns[f"ids.{name}"] = pa.ListArray.from_arrays(offsets, ids.astype(self.id_dtype, copy=False))
            if weights is not None:
                columns[f"weights.{name}"] = pa.ListArray.from_arrays(offsets, weights)
            if side_features and name in side_features:
                values = side_features[name]
                ends = offsets * np.int32(values.shape[1])
                columns[f"side_features.{name}"] = pa.ListArray.from_arrays(ends, values.reshape(-1))
        for name, array in zip(self.plan.reserved.columns, reserved, strict=True):
            columns[f"{RESERVED_PREFIX}{name}"] = array
        if self.counts_changes:
            columns["changed"] = self._changes(tally, rows)
        return pa.table(columns)

    def _changes(self, tally: Tally | None, rows: int) -> pa.ListArray:
        """The first row has the counts; they go wherever that row goes."""
        counts = np.array([tally[f] for f in self.schema.sparse], np.int32).T if tally and rows else None
        offsets = np.full(rows + 1, 0 if counts is None else counts.size, np.int32)
        offsets[0] = 0
        return pa.ListArray.from_arrays(offsets, np.empty(0, np.int32) if counts is None else counts.ravel())

    def nothing(self, rows: int) -> pa.Table:
        """Rows in which there is nothing."""
        schema, plan = self.schema, self.plan
        offsets, none = np.zeros(rows + 1, np.int32), np.empty(0, np.float32)
        return self.table(
            [0] * len(plan.labels),
            [0] * len(schema.of_requests(schema.dense)),
            [self.no_id] * len(self.singles),
            [(offsets, none, none if schema.sparse[name].weights else None) for name in self.bags],
            rows,
            task_weights=[0] * (len(plan.tasks) if plan.weighs_tasks else 0),
            keys=[0] * len(plan.reserved.keys),
            reserved=[pa.nulls(rows, self.types.get(name, pa.null())) for name in plan.reserved.columns],
            side_features={
                name: np.empty((0, len(schema.sparse[name].side_features)))
                for name in self.with_side_features
            },
            candidates=(offsets, [0] * self.of_candidates[1]) if schema.candidates else None,
        )


def shuffled(table: pa.Table, rng: np.random.Generator) -> pa.Table:
    """The rows of a table of this form in random order."""
    order, columns = rng.permutation(table.num_rows), {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        array = one_array(column)
        if pa.types.is_fixed_size_list(array.type):  # NumPy takes whole rows, three times as fast as Arrow
            width = array.type.list_size
            values = np.take(array.flatten().to_numpy().reshape(-1, width), order, axis=0)
            columns[name] = pa.FixedSizeListArray.from_arrays(values.reshape(-1), width)
        else:
            columns[name] = array.take(pa.array(order))
    return pa.table(columns)


def _matrix(columns: Columns, rows: int, dtype: type) -> pa.FixedSizeListArray:
    """Columns of n values as n lists."""
    packed = np.empty((rows, len(columns)), dtype)
    for i, column in enumerate(columns):
        packed[:, i] = column
    return pa.FixedSizeListArray.from_arrays(packed.reshape(-1), len(columns))
