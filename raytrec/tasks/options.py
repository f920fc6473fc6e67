"""Checks of tasks against their losses and the model.

No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from raytrec.common.errors import ConfigError
from raytrec.config.models.base import ModelSection
from raytrec.config.tasks import TaskSection
from raytrec.tasks.losses import BatchLoss, Loss

if TYPE_CHECKING:
    from raytrec.tasks.task import Task

BINARY = (0.0, 1.0)


def check_model_learns(tasks: Sequence[Task], model: ModelSection) -> None:
    """Looks whether a task that leaves its loss to the model has a model that gives one.

    Raises:
        ConfigError: it has not, or two tasks leave it to the model, or one that is not the last with logits.
    """
    left = [place for place, task in enumerate(tasks) if task.loss.from_model]
    if len(left) > 1:
        raise ConfigError(
            "two tasks leave their loss to the model, which gives one",
            where=f"tasks[{left[1]}].loss",
            expected="from_model once",
            do="take another loss for one of them",
        )
    if left and not model.own_loss:
        of_theirs = "gives_loss" in type(model).model_fields
        raise ConfigError(
            f"the task leaves its loss to the model, and model.name={model.name}, as it is set, gives none",
            where=f"tasks[{left[0]}].loss, model.name",
            expected="a model that computes its loss: one whose model.negatives is set",
            do="set model.gives_loss=true if its outputs are followed by one"
            if of_theirs
            else "set model.negatives, if the model has it; or take another loss, such as bce",
        )
    if left and model.own_loss_of_last:
        after = [task.name for task in tasks[left[0] + 1 :] if not task.loss.reads_vectors]
        if after:
            raise ConfigError(
                f"the task leaves its loss to the model, and {after[0]} comes after it",
                where=f"tasks[{left[0]}]",
                expected=f"the last task that has logits: what {model.name} itself learns is its last score",
                do="put it behind them",
            )


def check_options(section: TaskSection, loss: Loss, where: str) -> None:
    """Holds the keys of a task against its loss.

    Args:
        where: the task, in words: tasks[0].

    Raises:
        ConfigError: one that this loss cannot do anything with, or that it lacks.
    """
    if section.positive_weight != 1 and loss.label_range != BINARY:
        raise ConfigError(
            f"positive_weight is {section.positive_weight:g}, and {section.loss} has no positives: "
            "its labels are not from 0 to 1",
            where=f"{where}.positive_weight",
            expected="a loss of labels from 0 to 1, such as bce",
            do="leave it out, or weigh rows by sample_weight",
        )
    if section.negatives_kept != 1 and not loss.log_odds:
        raise ConfigError(
            f"negatives_kept is {section.negatives_kept:g}, and {section.loss} predicts no probabilities",
            where=f"{where}.negatives_kept",
            expected="bce or focal, whose logits are log-odds",
            do="leave it out, or take one of these losses",
        )
    if section.item_frequency is not None and not (isinstance(loss, BatchLoss) and loss.reads_counts):
        raise ConfigError(
            f"item_frequency is {section.item_frequency}, and {section.loss} compares no items of a batch",
            where=f"{where}.item_frequency",
            expected="in_batch_softmax, which corrects for frequent items being in more batches",
            do="leave it out, or take this loss",
        )
    if isinstance(loss, BatchLoss) and loss.needs_column and getattr(section, loss.by or "", None) is None:
        raise ConfigError(
            f"the loss {section.loss} compares rows by the task's {loss.by}, and there is none",
            where=f"{where}.{loss.by}",
            expected="a column by which rows are grouped",
            do=f"set {loss.by} to a column of data.reserve_columns",
        )
