"""Read plan of a run, and its resolved form, which also contains facts about the files of a dataset.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
import pyarrow as pa

from raytrec.config.features import resolve_input_columns
from raytrec.config.schema import Schema
from raytrec.config.transforms import Sample, Transform

NO_MANAGED_ID = -(2**63)  # value of a missing managed id


@dataclass(frozen=True)
class TaskColumn:
    """Column that a task reads in addition to its labels.

    Attributes:
        column: Name of the column.
        role: Use of the column: a mask of 0 and 1, or a weight for each row.
        named_by: Description of the configuration key that names the column, such as "the mask of task click".
    """

    column: str
    role: Literal["mask", "sample weight"]
    named_by: str


@dataclass(frozen=True)
class TaskRows:
    """Rules for the weights of rows in a task.

    Rows without a label and rows excluded by a mask have weight 0; other rows have their sample weight or 1.

    Attributes:
        label: Label of the task, one of the schema's labels.
        name: Name of the task, for messages.
        nulls: Treatment of rows without a label (null or NaN): error raises an error, skip ignores them in
            this task.
        mask: Column of 0 and 1; only rows with 1 count. None: all rows are used.
        mask_label: Label of the schema; only rows with label 1 count. None: all rows are used.
        sample_weight: Column of finite numbers ≥ 0; None: every row has weight 1.
    """

    label: str
    name: str = ""
    nulls: Literal["error", "skip"] = "error"
    mask: str | None = None
    mask_label: str | None = None
    sample_weight: str | None = None

    @property
    def is_weighted(self) -> bool:
        """Return True if rows may have different weights in the task."""
        return bool(self.mask or self.mask_label or self.sample_weight) or self.nulls == "skip"

    @property
    def columns(self) -> list[TaskColumn]:
        """Return the columns that the task reads in addition to its label."""
        mask = TaskColumn(self.mask, "mask", f"the mask of task {self.name}")
        weight = TaskColumn(self.sample_weight, "sample weight", f"the sample_weight of task {self.name}")
        return [read for read in (mask, weight) if read.column]


ValueRange = tuple[float, float]  # (smallest, largest) allowed value


@dataclass(frozen=True)
class ReservedColumnSet:
    """Columns that accompany rows in addition to the model's inputs.

    Args:
        columns: Columns passed through with unchanged values (Batch.reserved).
        keys: Columns by which rows are grouped (groups, items, slices), in the order of Batch.keys.
        groups: Reserved columns whose values are counted or compared: integers, text, booleans or dates.
        lists: Reserved columns whose values must be lists.
        optional_lists: Reserved columns whose values may be lists.
        named_by: Column → configuration key that names the column, for messages; default:
            data.reserve_columns.
    """

    columns: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    lists: tuple[str, ...] = ()
    optional_lists: tuple[str, ...] = ()
    named_by: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def names(self) -> list[str]:
        """Return the names of all reserved columns without duplicates."""
        return list(dict.fromkeys([*self.keys, *self.columns]))


@dataclass(frozen=True)
class ReadPlan:
    """Columns and rules by which a run reads rows, independent of the files' contents.

    Args:
        schema: Schema of the run.
        transforms: Transforms (data.transforms) that are applied to the columns first.
        tasks: Rules for the rows of each task, in the order of the configuration; (): every row has weight 1.
        reserved: Columns read in addition to those of the schema.
        label_ranges: Label → (smallest, largest) allowed value, or None for any finite number; labels not in
            the mapping must be in [0, 1].
        whole_labels: Labels that must be whole numbers.
        read_labels: False to read no labels, masks and sample weights; all labels are then 0.
        folder: Folder to search for the transforms' modules, in addition to Python's path; None: only the path.
    """

    schema: Schema
    transforms: tuple[Transform, ...] = ()
    tasks: tuple[TaskRows, ...] = ()
    reserved: ReservedColumnSet = ReservedColumnSet()
    label_ranges: Mapping[str, ValueRange | None] = field(default_factory=dict)
    whole_labels: Collection[str] = ()
    read_labels: bool = True
    folder: str | None = None

    def label_range(self, label: str) -> ValueRange | None:
        """Return the (smallest, largest) allowed value of a label; None: any finite number."""
        return self.label_ranges.get(label, (0.0, 1.0))

    @property
    def labels(self) -> list[str]:
        """Return the names of the labels to read, in the schema's order."""
        return self.schema.labels if self.read_labels else []

    @cached_property
    def has_task_weights(self) -> bool:
        """Return True if batches have task_weights, because rows may have different weights in some task."""
        return self.read_labels and any(task.is_weighted for task in self.tasks)

    @cached_property
    def task_columns(self) -> list[TaskColumn]:
        """Return the columns that tasks read in addition to labels."""
        return [column for task in self.tasks for column in task.columns] if self.read_labels else []

    def named_by(self, column: str) -> str | None:
        """Return a description of the configuration key, other than the schema's keys, that names a column.

        The result is None if the schema contains the column, or if no key names the column.
        """
        if column in self.schema.columns:
            return None
        keys = [c.named_by for c in self.task_columns if c.column == column]
        if column in self.reserved.names:
            keys.append(self.reserved.named_by.get(column, "data.reserve_columns"))
        return keys[0] if keys else None

    def skips_nulls(self, label: str) -> bool:
        """Return True if rows may lack this label.

        Rows may lack a label if all tasks that learn the label skip such rows, or if the label is used only as
        a mask.
        """
        rules = {task.nulls for task in self.tasks if task.label == label}
        return rules == {"skip"} if rules else any(task.mask_label == label for task in self.tasks)


@dataclass(frozen=True)
class ResolvedReadPlan:
    """Read plan together with facts about the files of a dataset.

    Args:
        plan: Read plan of the run.
        lists: Sparse features whose column is a list in some file. These features are bags of any length, as
            are features with weights or side features and candidate features. All other features are single
            (at most one id per row).
        types: Column → common type over all files, for reserved columns and columns from folder names. Other
            columns keep the type of each file.
        from_folders: Columns whose values are in folder names such as date=2026-11-07 instead of the files.
    """

    plan: ReadPlan
    lists: frozenset[str] = frozenset()
    types: Mapping[str, pa.DataType] = field(default_factory=dict)
    from_folders: frozenset[str] = frozenset()

    @property
    def schema(self) -> Schema:
        """Return the schema of the plan."""
        return self.plan.schema

    @property
    def folders(self) -> dict[str, pa.DataType | None]:
        """Return a mapping from each column read from folder names to its type; None stands for text."""
        return {name: self.types.get(name) for name in self.from_folders}

    @cached_property
    def columns_after_transforms(self) -> list[str]:
        """Return the names of the columns that must exist after the transforms, without duplicates."""
        plan = self.plan
        names = plan.schema.columns if plan.read_labels else plan.schema.inputs
        return list(dict.fromkeys([*names, *(c.column for c in plan.task_columns), *plan.reserved.names]))

    @cached_property
    def columns(self) -> list[str]:
        """Return the columns to read from files or folder names, before the transforms."""
        return resolve_input_columns(self.plan.transforms, self.columns_after_transforms)

    @cached_property
    def trained_columns(self) -> list[str]:
        """Return the columns in `columns` that can affect training: all but those that are only reserved, not compared.

        Inputs of all transforms, and columns of groups (reserved.groups), are included.
        """
        plan = self.plan
        learned = {*plan.schema.columns, *plan.reserved.groups, *(c.column for c in plan.task_columns)}
        return resolve_input_columns(
            plan.transforms, [name for name in self.columns_after_transforms if name in learned]
        )

    @cached_property
    def singles(self) -> list[str]:
        """Return the features with at most one id per row, in the schema's order."""
        return [name for name in self.schema.sparse if not self._is_list(name)]

    @cached_property
    def features_with_side_features(self) -> list[str]:
        """Return the features that have side features, in the schema's order."""
        return [name for name, spec in self.schema.sparse.items() if spec.side_features]

    @cached_property
    def bags(self) -> list[str]:
        """Return the features that are bags of any length, in the schema's order."""
        return [name for name in self.schema.sparse if self._is_list(name)]

    def _is_list(self, feature: str) -> bool:
        spec = self.schema.sparse[feature]
        listed = feature in self.lists or feature in self.schema.candidates
        return listed or spec.weights is not None or bool(spec.side_features)

    @cached_property
    def of_candidates(self) -> tuple[int, int, int]:
        """Return (number of labels, number of dense columns, number of task weights) per candidate."""
        dense = self.schema.select_candidate_names(self.schema.dense)
        return len(self.plan.labels), len(dense), len(self.plan.tasks) * self.plan.has_task_weights

    @cached_property
    def accepts_out_of_range_ids(self) -> bool:
        """Return True if any table accepts out-of-range ids."""
        return any(table.out_of_range != "error" for table in self.schema.tables.values())

    @cached_property
    def id_dtype(self) -> type:
        """Return the NumPy type of ids in canonical tables."""
        tables = self.schema.tables.values()
        small = max(table.rows for table in tables) <= 2**31 and not self.schema.managed
        return np.int32 if small else np.int64

    @cached_property
    def no_id(self) -> int:
        """Return the value that marks a missing id.

        With managed ids, -1 is a valid id, so the smallest int64 marks a missing id. A managed id with this value is
        replaced by the next larger integer.
        """
        return NO_MANAGED_ID if self.schema.managed else -1

    @cached_property
    def full_vocabulary_features(self) -> dict[str, int]:
        """Return feature → number of ids, for features that contain every id once in each global training batch.

        The transform `sample` with `count: all` writes these features.
        """
        samples = (transform for transform in self.plan.transforms if isinstance(transform, Sample))
        rows = {sample.column: sample.rows for sample in samples if sample.count == "all"}
        columns = {name: self.schema.get_ids_column(name) for name in self.schema.sparse}
        return {name: rows[column] for name, column in columns.items() if column in rows}

    @cached_property
    def row_bytes(self) -> int:
        """Return the approximate size of a row in bytes, assuming 8 ids per bag and including drawn ids."""
        samples = [transform for transform in self.plan.transforms if isinstance(transform, Sample)]
        drawn = sum(sample.count for sample in samples if sample.count != "all")
        numbers = len(self.schema.labels) + len(self.schema.dense) + len(self.plan.tasks) * self.plan.has_task_weights
        reserved = 8 * len(self.plan.reserved.keys) + 16 * len(self.plan.reserved.columns)
        reserved += sum(8 * 8 * len(spec.side_features) for spec in self.schema.sparse.values())
        return (
            reserved + 4 * numbers + np.dtype(self.id_dtype).itemsize * (len(self.singles) + 8 * len(self.bags) + drawn)
        )
