"""Which rows count in a task, as configured. (row_weights.py reads it.) No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class TaskColumn:
    """A column that a task reads beside its label.

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
        """What it reads beside the label."""
        found = []
        if self.mask:
            found.append(TaskColumn(self.mask, "mask", f"mask of task {self.name}"))
        if self.sample_weight:
            found.append(
                TaskColumn(self.sample_weight, "sample weight", f"sample_weight of task {self.name}")
            )
        return found
