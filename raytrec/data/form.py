"""What a run reads of its rows: a plan, whatever the files hold, and its form for the files of a dataset.

No torch here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
import pyarrow as pa

from raytrec.config.features import columns_before
from raytrec.config.schema import Schema
from raytrec.config.transforms import Sample, Transform

NO_MANAGED_ID = -(2**63)  # in the place of a managed id where there is none


@dataclass(frozen=True)
class TaskColumn:
    """A column that a task reads in addition to its label.

    Attributes:
        role: a mask of 0 and 1, or a factor of the row.
        named_by: the key of the configuration, in words.
    """

    column: str
    role: Literal["mask", "sample weight"]
    named_by: str


@dataclass(frozen=True)
class TaskRows:
    """Which rows count in a task, and how much: 0 for a row without a label and one that the mask excludes,
    else its sample weight.

    Attributes:
        label: of the task, among the schema's labels.
        name: of the task, for messages.
        nulls: a row without a label (null or NaN) is an error, or has no part in this task.
        mask: a column of 0 and 1: rows where it is 1 count; None: all do.
        mask_label: a label of the schema: rows where it is 1 count.
        sample_weight: a column of finite numbers ≥ 0; None: 1.
    """

    label: str
    name: str = ""
    nulls: Literal["error", "skip"] = "error"
    mask: str | None = None
    mask_label: str | None = None
    sample_weight: str | None = None

    @property
    def is_weighted(self) -> bool:
        """Whether rows may count differently in it."""
        return bool(self.mask or self.mask_label or self.sample_weight) or self.nulls == "skip"

    @property
    def columns(self) -> list[TaskColumn]:
        """What it reads in addition to the label."""
        mask = TaskColumn(self.mask, "mask", f"mask of task {self.name}")
        weight = TaskColumn(self.sample_weight, "sample weight", f"sample_weight of task {self.name}")
        return [read for read in (mask, weight) if read.column]


Range = tuple[float, float]


@dataclass(frozen=True)
class Reserved:
    """Columns that go along with rows, in addition to what a model reads.

    Args:
        columns: with their own types: Batch.reserved.
        keys: that rows are grouped by (groups, items, slices): Batch.keys, in this order.
        groups: those of them whose rows are compared with each other, or counted: no floats.
        lists: those whose values are lists, of what groups can be. or_lists: those whose values may be.
        named_by: column → what names it, for messages; default: data.reserve_columns.
    """

    columns: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    lists: tuple[str, ...] = ()
    or_lists: tuple[str, ...] = ()
    named_by: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def names(self) -> list[str]:
        """All of them, each once."""
        return list(dict.fromkeys([*self.keys, *self.columns]))


@dataclass(frozen=True)
class ReadPlan:
    """What a run reads of its rows, whatever their files hold.

    Args:
        transforms: what is done to columns first.
        tasks: which rows count in each task, in the order of the configuration; none: every row in all.
        reserved: further columns.
        label_ranges: label → the least and greatest value that is learned from, None: any finite number;
            default: 0 to 1.
        whole_labels: labels that are whole numbers.
        read_labels: whether there are labels; without, they are 0.
        folder: where the transforms' modules may be, in addition to Python's own path.
    """

    schema: Schema
    transforms: tuple[Transform, ...] = ()
    tasks: tuple[TaskRows, ...] = ()
    reserved: Reserved = Reserved()
    label_ranges: Mapping[str, Range | None] = field(default_factory=dict)
    whole_labels: Collection[str] = ()
    read_labels: bool = True
    folder: str | None = None

    def label_range(self, label: str) -> Range | None:
        """The least and greatest value of a label; None: any finite number."""
        return self.label_ranges.get(label, (0.0, 1.0))

    @property
    def labels(self) -> list[str]:
        """The labels that are read, in the schema's order."""
        return self.schema.labels if self.read_labels else []

    @cached_property
    def weighs_tasks(self) -> bool:
        """Whether rows may count differently in some task: Batch.task_weights."""
        return self.read_labels and any(task.is_weighted for task in self.tasks)

    @cached_property
    def columns_of_tasks(self) -> list[TaskColumn]:
        """What tasks read in addition to labels."""
        return [column for task in self.tasks for column in task.columns] if self.read_labels else []

    def named_by(self, column: str) -> str | None:
        """What names a column that the schema does not, in words; None: nothing does."""
        if column in self.schema.columns:
            return None
        found = [c.named_by for c in self.columns_of_tasks if c.column == column]
        if column in self.reserved.names:
            found.append(self.reserved.named_by.get(column, "data.reserve_columns"))
        return found[0] if found else None

    def skips_nulls(self, label: str) -> bool:
        """Whether a row may be without this label: all tasks that learn it take such rows, or it is only a
        mask."""
        rules = {task.nulls for task in self.tasks if task.label == label}
        return rules == {"skip"} if rules else any(task.mask_label == label for task in self.tasks)


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
