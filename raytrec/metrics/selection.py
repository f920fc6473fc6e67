"""Selection of the metrics that a run computes, with their keys and display properties."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isnan
from typing import Any

from raytrec.common.errors import ConfigError, make_unknown_word_error
from raytrec.common.formatting import parse_number
from raytrec.config.data import EvalSection
from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema
from raytrec.metrics.registry import (
    DIRECTIONS,
    FORMAT,
    METRICS,
    POSITIVES,
    WHERE,
    GroupMetric,
    Metric,
    SumMetric,
    find_metric,
    specialize_at_k,
)
from raytrec.tasks.task import Task, resolve_tasks

DEFAULT_FORMAT = "{:.4g}"
LOSS = "loss"  # key of the training loss; with several tasks, TASK.loss is the loss of one task
NE, LOG_LOSS = "ne", "logloss"  # names of metrics that reports use
EVAL_PREFIX = "eval."  # prefix of evaluation keys in result.json
RETRIEVAL_PREFIX = "retrieval"  # prefix of the keys of full rankings (eval.retrieval)
RANKING_COUNT_KEYS = [f"{RETRIEVAL_PREFIX}.{name}" for name in ("rows", "items", "unknown_items", "unknown_seen")]
PREDICTION_DESCRIPTIONS = {  # Loss.predicts → description
    "probability": "probabilities",
    "number": "numbers in the label's units",
    "classes": "probabilities of classes",
    "score": "scores that only define an order",
}


@dataclass(frozen=True)
class MetricDisplay:
    """Display properties of a task's metric, usable even if the metric's code cannot be imported.

    Attributes:
        key: Key in messages and files: the metric's name, or TASK.NAME if the run has several tasks;
            retrieval.NAME for metrics of full rankings.
        title: Title in result tables (registry.Metric). If the key has a prefix (TASK or retrieval), the title
            and the label begin with this prefix.
        label: Short name for console lines and axes.
        better: Direction of better values; None if no direction is better.
        format: Format string of values.
        sums: True if the metric is also computed during training, not only in evaluations.
    """

    key: str
    title: str
    label: str
    better: str | None
    format: str
    sums: bool

    def text(self, value: Any) -> str:
        """Return a value as text; "–" if the value is undefined."""
        return "–" if isnan(parse_number(value)) else self.format.format(value)

    def loss(self, value: float) -> float:
        """Return a number that decreases as the value improves, for comparisons of values."""
        return {"higher": -value, "lower": value, "closer to 1": abs(value - 1)}[self.better or "lower"]

    @property
    def is_ratio(self) -> bool:
        """Return True if the best value is 1."""
        return self.better == "closer to 1"

    @property
    def is_directed(self) -> bool:
        """Return True if the highest or the lowest value is the best."""
        return self.better in ("higher", "lower")


class Selection:
    """Metrics of a run's tasks.

    The constructor imports the modules of user-defined metrics.

    Args:
        tasks: Tasks in the order of the configuration.
        settings: Section `eval`; default: its default values.

    Attributes:
        tasks: Task name → task.
        of: Task name → metrics of the task.
        settings: Section `eval`.
        retrieval_metrics: Metrics of eval.retrieval; empty if retrieval is not set.

    Raises:
        ConfigError: A metric does not exist, occurs twice in a task, or does not support the task; or one of
            several tasks has the name that is reserved for full rankings.
    """

    def __init__(self, tasks: Sequence[Task], settings: EvalSection | None = None):
        self.settings = settings or EvalSection()
        self.tasks = {task.name: task for task in tasks}
        self.of: dict[str, list[type[Metric]]] = {}
        retrieval = self.settings.retrieval
        self.retrieval_metrics = select_ranking_metrics(retrieval.at) if retrieval else []
        if retrieval and len(tasks) > 1 and RETRIEVAL_PREFIX in self.tasks:
            raise ConfigError(
                f"the task name '{RETRIEVAL_PREFIX}' is reserved for the metrics of eval.retrieval",
                where="tasks, eval.retrieval",
                do="set another name for this task",
            )
        for task in tasks:
            metrics = [find_metric(reference, os.getcwd()) for reference in task.metrics]
            if repeated := [m.name for i, m in enumerate(metrics) if m.name in {e.name for e in metrics[:i]}]:
                raise ConfigError(f"task {task.name} has the metric '{repeated[0]}' twice", where=WHERE)
            for metric in metrics:
                _check_metric_supported(metric, task)
            self.of[task.name] = metrics

    @classmethod
    def from_config(cls, config: RunConfig, schema: Schema) -> Selection:
        """Return the metrics of the tasks in a configuration.

        Raises:
            ConfigError: See `resolve_tasks` and the constructor.
        """
        return cls(resolve_tasks(config.tasks, schema), config.eval)

    def key(self, task: str, name: str) -> str:
        """Return the key of a task's value in messages and files."""
        return name if len(self.of) == 1 else f"{task}.{name}"

    @property
    def figures(self) -> list[MetricDisplay]:
        """Return the display properties of all metrics: metrics of tasks, followed by metrics of full rankings."""
        task_figures = [
            _make_figure(self.key(task, metric.name), metric, "" if len(self.of) == 1 else f"{task}: ")
            for task, metrics in self.of.items()
            for metric in metrics
        ]
        return task_figures + [
            _make_figure(f"{RETRIEVAL_PREFIX}.{m.name}", m, f"{RETRIEVAL_PREFIX}: ") for m in self.retrieval_metrics
        ]

    def describe_metrics(self, training: bool = False) -> list[dict[str, Any]]:
        """Return `figures` as JSON values for result.json. `read_metric_displays` is the inverse.

        With `training`, the training losses are appended, for the start message of a run.
        """
        losses = [*(_make_loss_figure(f"{task}.{LOSS}", f"{task}: ") for task in self.tasks), _make_loss_figure(LOSS)]
        return [asdict(figure) for figure in [*self.figures, *(losses if training else [])]]

    def result(self, figures: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries of result.json for the last evaluation."""
        return {f"{EVAL_PREFIX}{key}": value for key, value in figures.items()} | {"metrics": self.describe_metrics()}

    @property
    def ratios(self) -> dict[str, str]:
        """Return key of metric → key of its number of positives, for all metrics whose best value is 1."""
        return {
            self.key(task, metric.name): self.key(task, POSITIVES)
            for task, metrics in self.of.items()
            for metric in metrics
            if metric.better == "closer to 1"
        }

    def best(self, key: str | None, where: str = "checkpoint.best_metric") -> MetricDisplay:
        """Return the metric that ranks evaluations.

        Args:
            key: METRIC, TASK.METRIC or retrieval.METRIC, optionally prefixed with `eval.`. None: the first
                metric whose highest or lowest value is best, preferably one that training computes, else the
                first metric whose best value is 1.
            where: Configuration key that contains `key`, for error messages.

        Raises:
            ConfigError: No task has this metric, or the metric has no direction.
        """
        directed = {figure.key: figure for figure in self.figures if figure.better}
        if key is None and directed:
            return min(directed.values(), key=lambda figure: (not figure.is_directed, not figure.sums))
        key = str(key).removeprefix(EVAL_PREFIX)
        if key not in directed and len(self.of) == 1:  # the name of a single task is optional
            key = key.removeprefix(f"{next(iter(self.of))}.")
        if key in directed:
            return directed[key]
        what = f"{where} is {key}, but the tasks have no metric with this name and a direction"
        expected = "" if directed else "a metric with a direction in tasks.metrics"
        raise make_unknown_word_error(what, key, directed, where, expected)


def select_ranking_metrics(places: Sequence[int]) -> list[type[GroupMetric]]:
    """Return the metrics of full rankings, i.e. all metrics that can be computed from the ranks of positive rows.

    Args:
        places: Cutoffs k for metrics with a cutoff, such as recall@k.
    """
    rankable = [m for m in METRICS.parts.values() if issubclass(m, GroupMetric) and "of_ranks" in vars(m)]
    at_places = [specialize_at_k(m, k) for m in rankable if m.at_k for k in dict.fromkeys(places)]
    return [*at_places, *(m for m in rankable if not m.at_k)]


def _check_metric_supported(metric: type[Metric], task: Task) -> None:
    """Raise ConfigError if a task's predictions or columns do not support the metric."""
    where, predicts = f"{WHERE} of task {task.name}", task.loss.predicts
    if metric.takes is not None and predicts is not None and predicts not in metric.takes:
        supported = [name for name, m in METRICS.parts.items() if m.takes is None or predicts in m.takes]
        raise ConfigError(
            f"metric {metric.name} does not support the predictions of the task's loss, which are "
            f"{PREDICTION_DESCRIPTIONS[predicts]}",
            where=where,
            expected=f"one of {', '.join(supported)}",
        )
    if issubclass(metric, GroupMetric):
        needed = {"group": task.group} | ({"item": task.item} if metric.needs_item else {})
        if missing := [key for key, column in needed.items() if column is None]:
            raise ConfigError(
                f"metric {metric.name} requires {' and '.join(missing)}, which the task does not set",
                where=where,
                expected="a column of data.reserve_columns",
                do=f"set tasks.{missing[0]}, for example {missing[0]}: {missing[0]}_id",
            )


def read_metric_displays(*records: Any) -> list[MetricDisplay]:
    """Return the metrics described under "metrics" in the first record that contains valid descriptions.

    Records are start messages and contents of result.json. If no record contains descriptions, raytrec's
    built-in metrics are returned. Records may be untrusted, so invalid descriptions are skipped.
    """
    for record in records:
        described = record.get("metrics") if isinstance(record, Mapping) else None
        if isinstance(described, list) and (found := [f for each in described if (f := _read_figure(each))]):
            return found
    return [_make_figure(name, metric, "") for name, metric in METRICS.parts.items()]


def _make_loss_figure(key: str, of_task: str = "") -> MetricDisplay:
    return MetricDisplay(key, f"{of_task}training loss", f"{of_task}{LOSS}", "lower", "{:.4f}", sums=True)


def _make_figure(key: str, metric: type[Metric], of_task: str) -> MetricDisplay:
    return MetricDisplay(
        key, of_task + metric.title, of_task + metric.label, metric.better, metric.format, issubclass(metric, SumMetric)
    )


def _read_figure(values: Any) -> MetricDisplay | None:
    """Return a metric description read from a file, or None if the description is invalid."""
    if not isinstance(values, dict):
        return None
    key, title, label = (values.get(name) for name in ("key", "title", "label"))
    better, form = values.get("better"), values.get("format")
    if not all(isinstance(text, str) and text for text in (key, title, label)) or better not in DIRECTIONS:
        return None
    is_valid = isinstance(form, str) and FORMAT.fullmatch(form)
    return MetricDisplay(key, title, label, better, form if is_valid else DEFAULT_FORMAT, values.get("sums") is True)
