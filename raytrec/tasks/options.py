"""Keys of a task that not every loss can do something with. No torch here."""

from __future__ import annotations

from raytrec.common.errors import ConfigError
from raytrec.config.tasks import TaskSection
from raytrec.tasks.losses import BatchLoss, Loss

BINARY = (0.0, 1.0)


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
    if isinstance(loss, BatchLoss) and loss.needs_column and getattr(section, loss.by or "", None) is None:
        raise ConfigError(
            f"the loss {section.loss} compares rows by the task's {loss.by}, and there is none",
            where=f"{where}.{loss.by}",
            expected="a column that says which rows belong together",
            do=f"set {loss.by} to a column of data.carry",
        )
