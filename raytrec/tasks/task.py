"""Tasks of a run, created from the configuration and schema, and checks of their settings, losses and model.

This module does not import torch.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import log
from typing import TYPE_CHECKING

from raytrec.common.errors import ConfigError, make_unknown_word_error
from raytrec.config.models.base import ModelSection
from raytrec.config.schema import Schema
from raytrec.config.tasks import TaskSection
from raytrec.data.read_plans import TaskRows
from raytrec.tasks.losses import BatchLoss, Loss, loss

if TYPE_CHECKING:
    import torch

BINARY = (0.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class Task(TaskRows):
    """Label to learn, with its loss and metrics.

    Attributes:
        column: Index of the label among the schema's labels.
        loss: Loss, possibly a BatchLoss.
        weight: Factor of the loss in the sum over tasks.
        metrics: Names of the metrics.
        positive_weight: Factor of the loss for rows whose label is 1.
        negatives_kept: Share of negatives that down-sampling kept in the training data, in (0, 1].
        group: Column of data.reserve_columns that contains the group of each row; None: no groups.
        item: Column of data.reserve_columns that contains the item of each row; None: no items.
        item_frequency: Column of data.reserve_columns that contains the number of occurrences of each row's item in
            the training data; None: frequencies are not used.
        outputs: Number of logits per row: the number of classes, or 1.
    """

    column: int
    loss: Loss
    weight: float
    metrics: tuple[str, ...]
    positive_weight: float = 1.0
    negatives_kept: float = 1.0
    group: str | None = None
    item: str | None = None
    item_frequency: str | None = None
    outputs: int = 1

    def factors(self, labels_B: torch.Tensor, weights_B: torch.Tensor) -> torch.Tensor:
        """Return the factor of each row's loss, float32 [B]: the row's weight, times positive_weight for label 1."""
        if self.positive_weight == 1:
            return weights_B
        return weights_B.where(labels_B != 1, weights_B * self.positive_weight)

    def calibrate(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits for metrics and predictions, float32 [B] or [B, classes], given the model's output.

        For vectors of query and item, the result is their score (Loss.scores), such as the dot product. If negatives
        were down-sampled to a share r, ln r is added, so that the result is the log-odds for the data before
        down-sampling. The corresponding probability is p ÷ (p + (1 − p) ÷ r) for the model's probability p (He et
        al. 2014, section 6.3).
        """
        scores = self.loss.scores(logits)
        return scores if self.negatives_kept == 1 else scores + log(self.negatives_kept)


def key_columns(tasks: Sequence[Task], slices: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the names of the columns of Batch.keys: group, item and frequency columns of the tasks, then slices."""
    of_tasks = (name for task in tasks for name in (task.group, task.item, task.item_frequency))
    return tuple(dict.fromkeys([*(name for name in of_tasks if name is not None), *slices]))


def count_logits(tasks: Sequence[Task]) -> dict[str, int]:
    """Return task → number of its logits, in the order of the logits; tasks whose loss reads vectors are omitted."""
    return {task.name: task.outputs for task in tasks if not task.loss.reads_vectors}


def needs_vectors(tasks: Sequence[Task]) -> bool:
    """Return True if the loss of a task reads vectors of query and item, which the model must then output."""
    return any(task.loss.reads_vectors for task in tasks)


def resolve_tasks(sections: Sequence[TaskSection], schema: Schema) -> tuple[Task, ...]:
    """Return the tasks of a configuration in their order.

    Modules of user-defined losses are imported; if one is not found, the working directory is added to sys.path.

    Raises:
        ConfigError: A label or loss does not exist, several tasks have the same name, masks form a cycle, or a loss
            cannot be imported, is not a concrete subclass of Loss, does not accept a setting of its task, or requires
            a setting.
        Exception: Any error raised by a user's module during import, or by the constructor of its loss.
    """
    tasks = [_resolve(section, schema, i, len(sections) > 1) for i, section in enumerate(sections)]
    by_name = {task.name: task for task in tasks}
    names = [task.name for task in tasks]
    if duplicates := {name for name in names if names.count(name) > 1}:
        name = min(duplicates)
        raise ConfigError(
            f"{names.count(name)} tasks have the name {name}",
            where=", ".join(f"tasks[{place}]" for place, other in enumerate(names) if other == name),
            do="set a different name for each of these tasks; the default is the label",
        )
    for task in tasks:
        _check_mask(task, by_name)
    label_of = {label: label for label in schema.labels} | {task.name: task.label for task in tasks}
    return tuple(
        replace(task, mask=None, mask_label=label_of[task.mask]) if task.mask in label_of else task for task in tasks
    )


def _resolve(section: TaskSection, schema: Schema, place: int, several: bool) -> Task:
    where = f"tasks[{place}]"
    label = schema.labels[0] if section.label is None else section.label
    if label not in schema.labels:
        raise make_unknown_word_error(f"the schema has no label '{label}'", label, schema.labels, f"{where}.label")
    task_loss = _loss(section, f"{where}.loss")
    check_options(section, task_loss, where)
    settings = section.model_dump(include={field.name for field in fields(Task)})
    resolved = {
        "name": section.name or re.sub(r"[^\w-]", "_", label),
        "label": label,
        "column": schema.labels.index(label),
        "loss": task_loss,
        "metrics": tuple(task_loss.metrics if section.metrics is None else section.metrics),
        "nulls": section.nulls or ("skip" if several else "error"),
        "outputs": task_loss.outputs,
    }
    return Task(**settings | resolved)


def _check_mask(task: Task, by_name: Mapping[str, Task]) -> None:
    """Check that the chain of masks that begins with a task's mask contains no cycle.

    Raises:
        ConfigError: The chain contains a cycle, which need not contain the task itself.
    """
    chain, current = [task.name], task
    while current.mask in by_name:
        current = by_name[current.mask]
        if current.name in chain:
            cycle = chain[chain.index(current.name) :]
            place = list(by_name).index(current.name)
            do = "set mask to a column that is not the name of a task, or remove mask"
            if len(cycle) == 1:
                what = f"task {current.name} is its own mask"
            else:
                what = f"masks of tasks form a cycle: {' → '.join([*cycle, current.name])}"
                do += " from one of the tasks"
            raise ConfigError(
                what,
                where=f"tasks[{place}].mask",
                expected="another task whose masks form no cycle, or a column of 0 and 1",
                do=do,
            )
        chain.append(current.name)


def _loss(section: TaskSection, where: str) -> Loss:
    loss_class = loss.find(section.loss, where, os.getcwd())
    if not (isinstance(loss_class, type) and issubclass(loss_class, Loss)) or inspect.isabstract(loss_class):
        raise ConfigError(
            f"loss {section.loss} is not a concrete subclass of raytrec.tasks.losses.Loss",
            where=where,
            expected="a subclass of Loss that defines of_rows, or of BatchLoss that defines of_batch",
        )
    what, options = f"loss {section.loss} does not accept these options", where.replace(".loss", ".options")
    try:
        inspect.signature(loss_class).bind(**section.options)
    except TypeError as error:
        names = ", ".join(inspect.signature(loss_class).parameters)
        expected = f"options of the loss: {names}" if names else "no options, because the loss has none"
        raise ConfigError(f"{what}: {error}", where=options, expected=expected) from None
    try:
        return loss_class(**section.options)
    except ValueError as error:
        raise ConfigError(f"{what}: {error}", where=options) from None


def check_model_learns(tasks: Sequence[Task], model: ModelSection) -> None:
    """Check that the model computes a loss for the task with loss: from_model, if there is one.

    Raises:
        ConfigError: The model computes no loss, two tasks have loss: from_model, or the model's loss refers to
            the last task with logits, but an earlier task has loss: from_model.
    """
    places = [place for place, task in enumerate(tasks) if task.loss.from_model]
    if len(places) > 1:
        raise ConfigError(
            "only one task can use loss: from_model",
            where=f"tasks[{places[1]}].loss",
            do="set another loss for one of the tasks",
        )
    if places and not model.own_loss:
        name, keys = tasks[places[0]].name, type(model).model_fields
        setting = "set model.negatives, or " if "negatives" in keys else ""
        if "gives_loss" in keys:
            setting = "set model.gives_loss=true if the model returns a loss after its outputs, or "
        raise ConfigError(
            f"task {name} uses loss: from_model, but model.name={model.name} computes no loss as configured",
            where=f"tasks[{places[0]}].loss, model.name",
            expected="a model that computes its loss, such as a model with model.negatives",
            do=f"{setting}use another loss, such as bce",
        )
    if places and model.own_loss_of_last:
        later_tasks = [task.name for task in tasks[places[0] + 1 :] if not task.loss.reads_vectors]
        if later_tasks:
            raise ConfigError(
                f"task {tasks[places[0]].name} uses loss: from_model, but task {later_tasks[0]} comes after it",
                where=f"tasks[{places[0]}]",
                expected=f"loss: from_model on the last task with logits, to which the loss of {model.name} applies",
                do=f"move task {tasks[places[0]].name} to the end of tasks",
            )


def check_options(section: TaskSection, loss: Loss, where: str) -> None:
    """Check that a task's loss supports the keys that the task sets.

    Args:
        section: Configuration of the task.
        loss: Loss of the task.
        where: Configuration key of the task, such as tasks[0].

    Raises:
        ConfigError: The loss cannot use a key that is set, or requires a key that is not set.
    """
    if section.positive_weight != 1 and loss.label_range != BINARY:
        raise ConfigError(
            f"positive_weight is {section.positive_weight:g}, but the loss {section.loss} has no positives: "
            "the range of its labels is not 0 to 1",
            where=f"{where}.positive_weight",
            expected="a loss whose labels range from 0 to 1, such as bce",
            do="remove positive_weight, or weight rows by sample_weight",
        )
    if section.negatives_kept != 1 and not loss.log_odds:
        raise ConfigError(
            f"negatives_kept is {section.negatives_kept:g}, but the logits of loss {section.loss} are not log-odds",
            where=f"{where}.negatives_kept",
            expected="a loss whose logits are log-odds, such as bce or focal",
            do="remove negatives_kept, or use one of these losses",
        )
    if section.item_frequency is not None and not (isinstance(loss, BatchLoss) and loss.reads_counts):
        raise ConfigError(
            f"item_frequency is {section.item_frequency}, but the loss {section.loss} does not use item frequencies",
            where=f"{where}.item_frequency",
            expected="a loss such as in_batch_softmax, which corrects for the frequency of items in batches",
            do="remove item_frequency, or use in_batch_softmax with a model that outputs vectors, such as two_tower",
        )
    if isinstance(loss, BatchLoss) and loss.needs_column and getattr(section, loss.by or "", None) is None:
        raise ConfigError(
            f"the loss {section.loss} requires {loss.by}, which is not set",
            where=f"{where}.{loss.by}",
            expected=f"the name of the column that identifies each row's {loss.by}",
            do=f"add the column to data.reserve_columns, and set {loss.by} to its name",
        )
