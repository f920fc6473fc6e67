"""The configuration's tasks, held to a schema: each with its column, its loss and its metrics. No torch."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from raytrec.common.errors import ConfigError, did_you_mean
from raytrec.config.schema import Schema
from raytrec.config.tasks import TaskSection
from raytrec.tasks.losses import Loss, loss

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Task:
    """One label that is learned.

    Attributes:
        column: the label's place among the schema's labels.
        weight: of its loss in the sum of all.
        metrics: names of its metrics.
        where: a task, or a column: only rows where it is 1 count. None: all rows.
        nulls: error: a null label is an error; skip: its row has no label of this task.
        sample_weight: the column with each row's factor in loss and metrics; None: 1.
        positive_weight: factor of a row's loss where its label is 1.
        negatives_kept: the share of negatives that down-sampling has kept, in (0, 1].
        divisor: what the mean of the loss divides by: rows of the global batch, or the sum of their weights.
        group, item: carried columns that say which rows belong together, and which item a row is about.
        outputs: logits of a row: the number of classes, or 1.
    """

    name: str
    label: str
    column: int
    loss: Loss
    weight: float
    metrics: tuple[str, ...]
    where: str | None = None
    nulls: Literal["error", "skip"] = "error"
    sample_weight: str | None = None
    positive_weight: float = 1.0
    negatives_kept: float = 1.0
    divisor: Literal["rows", "weights"] = "rows"
    group: str | None = None
    item: str | None = None
    outputs: int = 1

    @property
    def is_weighted(self) -> bool:
        """Whether rows may count differently in this task than padding says (Batch.task_weights)."""
        return self.where is not None or self.sample_weight is not None or self.nulls == "skip"

    def predict(self, logits: torch.Tensor) -> torch.Tensor:
        """What logits mean in the label's units, as metrics and predictions have it; same shape."""
        return self.loss.predict(logits)


def key_columns(tasks: Sequence[Task], slices: Sequence[str] = ()) -> tuple[str, ...]:
    """The columns that Batch.keys has, in its order: groups and items of tasks, then slices, each once."""
    names = [name for task in tasks for name in (task.group, task.item) if name is not None]
    return tuple(dict.fromkeys([*names, *slices]))


def resolve_tasks(sections: Sequence[TaskSection], schema: Schema) -> tuple[Task, ...]:
    """The tasks, in the order of the configuration; modules of the user's are imported.

    Raises:
        ConfigError: no such label or loss, or two tasks of one name.
    """
    tasks = tuple(_resolve(section, schema, f"tasks[{i}]") for i, section in enumerate(sections))
    names = [task.name for task in tasks]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(
            f"two tasks are called {min(twice)}",
            where="tasks",
            expected="a name of its own for each; by default it is the label",
            do="set name on one of them",
        )
    return tasks


def label_ranges(tasks: Sequence[Task], schema: Schema) -> dict[str, tuple[float, float] | None]:
    """Label → the least and greatest value that all of its tasks take; None: any finite number."""
    ranges: dict[str, tuple[float, float] | None] = dict.fromkeys(schema.labels)
    for task in tasks:
        before, mine = ranges[task.label], task.loss.label_range
        if before and mine:
            mine = max(before[0], mine[0]), min(before[1], mine[1])
        ranges[task.label] = mine or before
    return ranges


def _resolve(section: TaskSection, schema: Schema, where: str) -> Task:
    label = _label(section.label, schema, where)
    made = _loss(section, f"{where}.loss")
    metrics = made.metrics if section.metrics is None else section.metrics
    name = section.name or re.sub(r"[^\w-]", "_", label)
    return Task(name, label, schema.labels.index(label), made, section.weight, tuple(metrics))


def _label(label: str | None, schema: Schema, where: str) -> str:
    if label is not None and label not in schema.labels:
        near = did_you_mean(label, schema.labels)
        raise ConfigError(
            f"the schema has no label '{label}'" + (f"; did you mean '{near}'?" if near else ""),
            where=f"{where}.label",
            expected=f"one of {', '.join(schema.labels)}",
        )
    return label or schema.labels[0]


def _loss(section: TaskSection, where: str) -> Loss:
    found = loss.find(section.loss, where, os.getcwd())
    if not (isinstance(found, type) and issubclass(found, Loss)) or inspect.isabstract(found):
        raise ConfigError(
            f"no loss {section.loss}: it is no raytrec.tasks.losses.Loss with of_rows",
            where=where,
            expected="a class derived from raytrec.tasks.losses.Loss",
        )
    try:
        inspect.signature(found).bind(**section.options)
    except TypeError as error:
        raise ConfigError(
            f"the loss {section.loss} does not take these options: {error}",
            where=where.replace(".loss", ".options"),
            expected="the keyword arguments of its class",
        ) from None
    return found(**section.options)
