"""A run's metrics, their names, and how they are shown."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isnan
from typing import Any

from raytrec.common.errors import ConfigError, unknown
from raytrec.common.formatting import number
from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema
from raytrec.config.tasks import EvalSection
from raytrec.metrics.registry import (
    DIRECTIONS,
    FORMAT,
    METRICS,
    POSITIVES,
    WHERE,
    GroupMetric,
    Metric,
    SumMetric,
    at_places,
    find_metric,
)
from raytrec.tasks.task import Task, resolve_tasks

ANY_FORMAT = "{:.4g}"
LOSS = "loss"  # the key of the training loss; TASK.loss is a task's part of it
NE, LOG_LOSS = "ne", "logloss"  # names of metrics that reports look at
EVAL = "eval."  # begins the keys of result.json that are of evaluations
RETRIEVAL = "retrieval"  # of the keys of full rankings (eval.retrieval)
RANKING_COUNTS = [f"{RETRIEVAL}.{name}" for name in ("rows", "items", "unknown_items", "unknown_seen")]
PREDICTED = {  # of Loss.predicts
    "probability": "probabilities",
    "number": "numbers in the label's units",
    "classes": "probabilities of classes",
    "score": "scores that only give an order",
}


@dataclass(frozen=True)
class Figure:
    """A metric of a task as it is shown, also where the metric's code cannot be imported.

    Attributes:
        key: in messages and files: the metric's name; TASK.NAME where a run has several tasks.
        title, label, better, format: the metric's (registry.Metric), with the task's name before it.
        sums: whether training has it, too, not evaluations alone.
    """

    key: str
    title: str
    label: str
    better: str | None
    format: str
    sums: bool

    def text(self, value: Any) -> str:
        """A value as it is written; "–" where it is not defined."""
        return "–" if isnan(number(value)) else self.format.format(value)

    def loss(self, value: float) -> float:
        """A number that is smaller for better values."""
        return {"higher": -value, "lower": value, "closer to 1": abs(value - 1)}[self.better or "lower"]

    @property
    def is_ratio(self) -> bool:
        """Whether it should be 1."""
        return self.better == "closer to 1"

    @property
    def directed(self) -> bool:
        """Whether it should be as high, or as low, as possible."""
        return self.better in ("higher", "lower")


class Selection:
    """The metrics of a run's tasks.

    Args:
        tasks: in the order of the configuration; modules of the user's are imported.
        settings: the section `eval`; default: its defaults.

    Attributes:
        tasks: task → it.
        of: task → its metrics.
        settings: as they were given.
        of_ranking: the metrics of eval.retrieval, if it is set.

    Raises:
        ConfigError: there is no such metric, two of a task have one name, or one does not suit its task; a
            task has the name that full rankings have.
    """

    def __init__(self, tasks: Sequence[Task], settings: EvalSection | None = None):
        self.settings = settings or EvalSection()
        self.tasks = {task.name: task for task in tasks}
        self.of: dict[str, list[type[Metric]]] = {}
        retrieval = self.settings.retrieval
        self.of_ranking = ranking_metrics(retrieval.at) if retrieval else []
        if retrieval and len(tasks) > 1 and RETRIEVAL in self.tasks:
            raise ConfigError(
                f"a task is called {RETRIEVAL}, as the figures of eval.retrieval are",
                where="tasks, eval.retrieval",
                do="set name of that task",
            )
        for task in tasks:
            found = [find_metric(reference, os.getcwd()) for reference in task.metrics]
            if twice := [m.name for i, m in enumerate(found) if m.name in {e.name for e in found[:i]}]:
                raise ConfigError(f"task {task.name} has the metric '{twice[0]}' twice", where=WHERE)
            for metric in found:
                _check_suits(metric, task)
            self.of[task.name] = found

    @classmethod
    def of_config(cls, config: RunConfig, schema: Schema) -> Selection:
        """Those of a configuration's tasks.

        Raises:
            ConfigError: as in `resolve_tasks` and here.
        """
        return cls(resolve_tasks(config.tasks, schema), config.eval)

    def key(self, task: str, name: str) -> str:
        """What a figure of a task is called in messages and files."""
        return name if len(self.of) == 1 else f"{task}.{name}"

    @property
    def figures(self) -> list[Figure]:
        """All of them, task by task, then those of full rankings."""
        of_tasks = [
            _figure(self.key(task, metric.name), metric, "" if len(self.of) == 1 else f"{task}: ")
            for task, metrics in self.of.items()
            for metric in metrics
        ]
        return of_tasks + [_figure(f"{RETRIEVAL}.{m.name}", m, f"{RETRIEVAL}: ") for m in self.of_ranking]

    def described(self, training: bool = False) -> list[dict[str, Any]]:
        """`figures` as JSON, for the result of a run and, with the losses of `training`, for its start;
        `figures_of` reads it back."""
        losses = [*(_loss(f"{task}.{LOSS}", f"{task}: ") for task in self.tasks), _loss(LOSS)]
        return [asdict(figure) for figure in [*self.figures, *(losses if training else [])]]

    def result(self, figures: Mapping[str, Any]) -> dict[str, Any]:
        """The entries of result.json about the last evaluation."""
        return {f"{EVAL}{key}": value for key, value in figures.items()} | {"metrics": self.described()}

    @property
    def ratios(self) -> dict[str, str]:
        """Key of each metric that should be 1 → key of the positives that it is of."""
        return {
            self.key(task, metric.name): self.key(task, POSITIVES)
            for task, metrics in self.of.items()
            for metric in metrics
            if metric.better == "closer to 1"
        }

    def best(self, key: str | None, where: str = "checkpoint.best_metric") -> Figure:
        """The figure that decides which of several evaluations is the best.

        Args:
            key: METRIC, TASK.METRIC or retrieval.METRIC, or one of these after `eval.`; None: the first that
                should be low or high, those that training has before those that it has not.
            where: the key of the configuration that it comes from.

        Raises:
            ConfigError: the tasks have no such metric, or none of its values are better than others.
        """
        able = {figure.key: figure for figure in self.figures if figure.better}
        if key is None and able:
            return min(able.values(), key=lambda figure: (not figure.directed, not figure.sums))
        key = str(key).removeprefix(EVAL)
        if key not in able and len(self.of) == 1:  # which may be named all the same
            key = key.removeprefix(f"{next(iter(self.of))}.")
        if key in able:
            return able[key]
        what = f"{where} is {key}, which is not a metric of the tasks that has a direction"
        expected = "" if able else "a metric with a direction among tasks.metrics"
        raise unknown(what, key, able, where, expected)


def ranking_metrics(places: Sequence[int]) -> list[type[GroupMetric]]:
    """The metrics of full rankings: those that the ranks of a group's positive rows decide.

    Args:
        places: k of those of the first k places.
    """
    able = [m for m in METRICS.parts.values() if issubclass(m, GroupMetric) and "of_ranks" in vars(m)]
    of_places = [at_places(m, k) for m in able if m.at_k for k in dict.fromkeys(places)]
    return [*of_places, *(m for m in able if not m.at_k)]


def _check_suits(metric: type[Metric], task: Task) -> None:
    """Refuses a metric that cannot be computed of a task's predictions and columns."""
    where, predicts = f"{WHERE} of task {task.name}", task.loss.predicts
    if metric.takes is not None and predicts is not None and predicts not in metric.takes:
        able = [name for name, each in METRICS.parts.items() if each.takes is None or predicts in each.takes]
        raise ConfigError(
            f"{metric.name} does not suit the task's loss, whose predictions are {PREDICTED[predicts]}",
            where=where,
            expected=f"one of {', '.join(able)}",
        )
    if issubclass(metric, GroupMetric):
        needed = {"group": task.group} | ({"item": task.item} if metric.needs_item else {})
        if missing := [key for key, column in needed.items() if column is None]:
            raise ConfigError(
                f"{metric.name} needs a column {' and '.join(missing)}, and the task names none",
                where=where,
                expected="a column of data.reserve_columns",
                do=f"set tasks.{missing[0]}, such as {missing[0]}: {missing[0]}_id",
            )


def figures_of(*records: Any) -> list[Figure]:
    """The metrics that the first of some records (a message of kind start, result.json) describes under
    "metrics"; where none does, raytrec's own metrics, under their names.

    Records may be untrusted: what is not a description is passed over.
    """
    for record in records:
        described = record.get("metrics") if isinstance(record, Mapping) else None
        if isinstance(described, list) and (found := [f for each in described if (f := _read(each))]):
            return found
    return [_figure(name, metric, "") for name, metric in METRICS.parts.items()]


def _loss(key: str, of_task: str = "") -> Figure:
    return Figure(key, f"{of_task}training loss", f"{of_task}{LOSS}", "lower", "{:.4f}", sums=True)


def _figure(key: str, metric: type[Metric], of_task: str) -> Figure:
    return Figure(
        key,
        of_task + metric.title,
        of_task + metric.label,
        metric.better,
        metric.format,
        issubclass(metric, SumMetric),
    )


def _read(values: Any) -> Figure | None:
    """A description out of a file; None where it is not valid."""
    if not isinstance(values, dict):
        return None
    key, title, label = (values.get(name) for name in ("key", "title", "label"))
    better, form = values.get("better"), values.get("format")
    if not all(isinstance(text, str) and text for text in (key, title, label)) or better not in DIRECTIONS:
        return None
    known = isinstance(form, str) and FORMAT.fullmatch(form)
    return Figure(key, title, label, better, form if known else ANY_FORMAT, values.get("sums") is True)
