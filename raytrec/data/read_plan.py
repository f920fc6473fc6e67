"""What a run reads of its rows. No torch here."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from raytrec.config.schema import Schema
from raytrec.config.transforms import Transform


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
