"""Selection of the metrics that a run computes, with their keys and display properties."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isnan
from typing import Any

from raytrec.common.errors import ConfigError, make_unknown_word_error
from raytrec.common.formatting import parse_number
from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema
from raytrec.config.tasks import EvalSection
from raytrec.metrics.registry import (
    DIRECTIONS,
    FORMAT,
    METRICS,
    POSITIVES,
    GroupMetric,
    Metric,
    SumMetric,
    find_metric,
    specialize_at_k,
)
from raytrec.tasks.task import Task, resolve_tasks

DEFAULT_FORMAT = "{:.4g}"
EXAMPLE_COLUMNS = {"group": "user_id", "item": "item_id"}
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
            retrieval.NAME for metrics of full rankings (eval.retrieval).
        title: Title in result tables (registry.Metric). If the key has a prefix (TASK or retrieval), the title
            and the label begin with this prefix.
        label: Short name for console lines and axes.
        better: Direction of better values: higher, lower or closer to 1; None if no direction is better.
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
        """Return a value as text; "–" if the value is not a finite number."""
        return "–" if isnan(parse_number(value)) else self.format.format(value)

    def loss(self, value: float) -> float:
        """Return a number that decreases as the value improves, or the value if no direction is better."""
        return {"higher": -value, "lower": value, "closer to 1": abs(value - 1)}[self.better or "lower"]

    @property
    def is_ratio(self) -> bool:
        """Return True if the metric is a ratio whose best value is 1."""
        return self.better == "closer to 1"

    @property
    def is_directed(self) -> bool:
        """Return True if the highest or the lowest value is the best."""
        return self.better in ("higher", "lower")


class Selection:
    """Metrics of a run's tasks.

    The constructor imports the modules of user-defined metrics; if one is not found, it adds the working directory to
    sys.path.

    Args:
        tasks: Tasks in the order of the configuration.
        settings: Section `eval`; default: its default values.

    Attributes:
        tasks: Task name → task.
        of: Task name → metrics of the task.
        settings: Section `eval`.
        retrieval_metrics: Metrics of eval.retrieval; empty if retrieval is not set.

    Raises:
        ConfigError: A metric is invalid (`find_metric`), occurs twice in a task, or does not support the task; or one
            of several tasks has the name "retrieval", although eval.retrieval is set.
        Exception: Any error raised by a user's module during import.
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
        for place, task in enumerate(tasks):
            metrics, where = [find_metric(reference, os.getcwd()) for reference in task.metrics], f"tasks[{place}]"
            if repeated := [m.name for i, m in enumerate(metrics) if m.name in {e.name for e in metrics[:i]}]:
                what, do = f"task {task.name} has the metric '{repeated[0]}' twice", "remove one of the two"
                raise ConfigError(what, where=f"{where}.metrics", do=do)
            for metric in metrics:
                _check_metric_supported(metric, task, where)
            self.of[task.name] = metrics

    @classmethod
    def from_config(cls, config: RunConfig, schema: Schema) -> Selection:
        """Return the Selection for the tasks and the section `eval` of a configuration.

        Raises:
            ConfigError: See `resolve_tasks` and the constructor.
            Exception: Any error raised by a user's module during import.
        """
        return cls(resolve_tasks(config.tasks, schema), config.eval)

    def key(self, task: str, name: str) -> str:
        """Return the key of a task's value in messages and files: NAME, or TASK.NAME if there are several tasks."""
        return name if len(self.of) == 1 else f"{task}.{name}"

    @property
    def figures(self) -> list[MetricDisplay]:
        """Return the display properties of all metrics: metrics of tasks, followed by metrics of full rankings."""
        parts: list[Any] = [("" if len(self.of) == 1 else task, metrics) for task, metrics in self.of.items()]
        parts.append((RETRIEVAL_PREFIX, self.retrieval_metrics))
        return [_make_figure(metric, prefix) for prefix, metrics in parts for metric in metrics]

    def describe_metrics(self, training: bool = False) -> list[dict[str, Any]]:
        """Return `figures`, and with `training` also the training losses, as dicts (inverse: read_metric_displays)."""
        losses = [_make_loss_figure(prefix) for prefix in (*self.tasks, "")]
        return [asdict(figure) for figure in [*self.figures, *(losses if training else [])]]

    def result(self, figures: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries of result.json for an evaluation: eval.KEY → value, and descriptions under "metrics"."""
        return {f"{EVAL_PREFIX}{key}": value for key, value in figures.items()} | {"metrics": self.describe_metrics()}

    @property
    def ratios(self) -> dict[str, str]:
        """Return key of metric → key of its count of positives (POSITIVES), for tasks' metrics whose best value is 1.

        A user-defined metric need not have this count.
        """
        return {
            self.key(task, metric.name): self.key(task, POSITIVES)
            for task, metrics in self.of.items()
            for metric in metrics
            if metric.better == "closer to 1"
        }

    def best(self, key: str | None, where: str = "checkpoint.best_metric") -> MetricDisplay:
        """Return the metric that ranks evaluations.

        Args:
            key: METRIC, TASK.METRIC or retrieval.METRIC, optionally prefixed with `eval.`. None: the first metric
                whose highest or lowest value is best; without one, the first metric whose best value is 1. In both
                cases, metrics that training computes take precedence.
            where: Configuration key that contains `key`, for error messages.

        Raises:
            ConfigError: No metric with this key (None: no metric) has values that can be ranked.
        """
        directed = {figure.key: figure for figure in self.figures if figure.better}
        if (is_default := key is None) and directed:
            return min(directed.values(), key=lambda figure: (not figure.is_directed, not figure.sums))
        what = f"{'' if is_default else f'{where} is {key}, but '}the tasks have no metric"
        key = str(key).removeprefix(EVAL_PREFIX)
        if key not in directed and len(self.of) == 1:  # the name of a single task is optional
            key = key.removeprefix(f"{next(iter(self.of))}.")
        if key in directed:
            return directed[key]
        what += " with this name whose values can be ranked" if directed else " whose values can be ranked"
        expected = "" if directed else "a metric whose values are better if they are higher, lower or closer to 1"
        raise make_unknown_word_error(what, key, directed, "tasks.metrics" if is_default else where, expected)


def select_ranking_metrics(places: Sequence[int]) -> list[type[GroupMetric]]:
    """Return the metrics of full rankings: all built-in metrics that define `of_ranks`, those with a cutoff first.

    Args:
        places: Cutoffs k, at least 1, for metrics with a cutoff, such as recall@k; duplicates are ignored.
    """
    rankable: list[Any] = [m for m in METRICS.parts.values() if issubclass(m, GroupMetric) and "of_ranks" in vars(m)]
    at_places = [specialize_at_k(m, k) for m in rankable if m.at_k for k in dict.fromkeys(places)]
    return [*at_places, *(m for m in rankable if not m.at_k)]


def _check_metric_supported(metric: type[Metric], task: Task, where: str) -> None:
    """Raise ConfigError if a task's predictions or columns do not support the metric; `where` is the task's key."""
    predicts = task.loss.predicts
    if metric.takes is not None and predicts is not None and predicts not in metric.takes:
        fitting = [m for m in METRICS.parts.values() if m.takes is None or predicts in m.takes]
        supported = [m.name + "@10" * m.at_k for m in fitting]
        raise ConfigError(
            f"metric {metric.name} does not support the predictions of the task's loss, which are "
            f"{PREDICTION_DESCRIPTIONS[predicts]}",
            where=f"{where}.metrics, task {task.name}",
            expected=f"a metric that supports them, such as {', '.join(supported)}",
        )
    if issubclass(metric, GroupMetric):
        needed = {"group": task.group} | ({"item": task.item} if metric.needs_item else {})
        if missing := [key for key, column in needed.items() if column is None]:
            raise ConfigError(
                f"metric {metric.name} requires {' and '.join(missing)}, which task {task.name} does not set",
                where=f"{where}.metrics",
                expected=f"{' and '.join(missing)} set to {'a column' if len(missing) == 1 else 'columns'} of "
                "data.reserve_columns",
                do="set " + ", and ".join(f"{where}.{key}, for example to {EXAMPLE_COLUMNS[key]}" for key in missing),
            )


def read_metric_displays(*records: Any) -> list[MetricDisplay]:
    """Return the metrics described under "metrics" in the first record that contains valid descriptions.

    Records are start messages of runs and contents of result.json. If no record contains a valid description,
    raytrec's built-in metrics are returned. Records may be untrusted, so invalid descriptions are skipped.
    """
    for record in records:
        described = record.get("metrics") if isinstance(record, Mapping) else None
        if isinstance(described, list) and (found := [f for each in described if (f := _read_figure(each))]):
            return found
    return [_make_figure(metric) for metric in METRICS.parts.values()]


def _make_loss_figure(prefix: str) -> MetricDisplay:
    return MetricDisplay(*_add_prefix(prefix, LOSS, "training loss", LOSS), "lower", "{:.4f}", sums=True)


def _make_figure(metric: type[Metric], prefix: str = "") -> MetricDisplay:
    texts = _add_prefix(prefix, metric.name, metric.title, metric.label)
    return MetricDisplay(*texts, metric.better, metric.format, issubclass(metric, SumMetric))


def _add_prefix(prefix: str, key: str, title: str, label: str) -> tuple[str, str, str]:
    return (f"{prefix}.{key}", f"{prefix}: {title}", f"{prefix}: {label}") if prefix else (key, title, label)


def _read_figure(values: Any) -> MetricDisplay | None:
    """Return a metric description from a file, or None if it is invalid; DEFAULT_FORMAT replaces an invalid format."""
    if not isinstance(values, dict):
        return None
    key, title, label = (values.get(name) for name in ("key", "title", "label"))
    better, form = values.get("better"), values.get("format")
    if not all(isinstance(text, str) and text for text in (key, title, label)) or better not in DIRECTIONS:
        return None
    is_valid = isinstance(form, str) and FORMAT.fullmatch(form)
    return MetricDisplay(key, title, label, better, form if is_valid else DEFAULT_FORMAT, values.get("sums") is True)
