"""The registry of metrics. A new one is a class in a file of builtin/ and nothing else, or `module:name`.

A metric is a class of one of three kinds, by what its sums are of; what it sums adds up over ranks:

    SumMetric     rows in any order; known in training, too
    RankedMetric  rows in the order of their predictions, as the area under a curve needs them
    GroupMetric   whole groups of rows (tasks.group), as of one request or user

`@metric` gives it a name and decides how it is shown:

    @metric("mae", title="MAE (mean absolute error)", label="MAE", better="lower")
    class MAE(SumMetric):
        @staticmethod
        def sums(outputs):
            errors_B = (outputs.predictions - outputs.labels).abs()
            return {"error": (errors_B * outputs.weights).sum(), "weight": outputs.weights.sum()}

        @staticmethod
        def figure(sums):
            return sums["error"] / sums["weight"]

Result table, result.json, console, MLflow, report, `checkpoint.keep_best` and notebooks take names, titles
and formats from here. No torch in this module: files of metrics import it in their functions.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

from raytrec.common.errors import ConfigError
from raytrec.common.registry import Registry
from raytrec.metrics.kinds import (
    COUNTED_ROWS,
    DIRECTIONS,
    GROUPS,
    NO_POSITIVE,
    ONE_CLASS,
    POSITIVES,
    Direction,
    GroupMetric,
    Metric,
    RankedMetric,
    SumMetric,
)
from raytrec.tasks.losses import Kind

NAME = re.compile(r"[a-z][a-z0-9_]*")
FORMAT = re.compile(r"\{:,?(\.\d)?[fgeE%]\}")  # it may come from an untrusted run folder
WHERE = "tasks.metrics"
BOUND = "_bound"  # NAME_bound: how far a figure out of bins may be from the exact one
RESERVED = {"kind", "step", "total", "state", "eta_s", "rows", "skipped_rows", "nan_steps", "rows_per_s"}
RESERVED |= {"unix_s", "loss", "curves", "slices", "unknown_items", "unknown_seen"}
RESERVED |= {COUNTED_ROWS, POSITIVES, GROUPS, NO_POSITIVE, ONE_CLASS}
T = TypeVar("T", bound=type[Metric])
KINDS = (SumMetric, RankedMetric, GroupMetric)
NAMES_OF_KINDS = ", ".join(kind.__name__ for kind in KINDS)


def metric(
    name: str,
    *,
    title: str | None = None,
    label: str | None = None,
    better: Direction | None = None,
    format: str = "{:.4f}",
    takes: tuple[Kind, ...] | None = None,
    at_k: bool = False,
) -> Callable[[T], T]:
    """Registers a metric.

    Args:
        name: lower-case letters, digits and _.
        title: for tables of results; default: the name.
        label: for lines and axes; default: the name.
        better: higher, lower, closer to 1, or None, by which no checkpoint can be kept.
        format: of its figures, such as "{:.4f}" or "{:.1%}".
        takes: kinds of predictions that it can be computed of (Loss.predicts); default: the class's, any.
        at_k: configurations name it with a number of places, NAME@10, which is its `k`; {k} in title and
            label becomes that number.

    Raises:
        ConfigError: one of them is not valid, or the class is not a metric class.
    """

    def register(cls: T) -> T:
        where = f"@metric({name!r}) of {cls.__module__}:{cls.__qualname__}"
        if not NAME.fullmatch(name) or name in RESERVED:
            raise ConfigError(
                f"'{name}' cannot be a metric's name",
                where=where,
                expected="lower-case letters, digits and _, and none of " + ", ".join(sorted(RESERVED)),
            )
        if better not in DIRECTIONS:
            raise ConfigError(
                f"{better!r} is not a direction", where=where, expected=", ".join(map(str, DIRECTIONS))
            )
        if not FORMAT.fullmatch(format):
            raise ConfigError(f"{format!r} is not a format", where=where, expected='such as "{:.4f}"')
        if not issubclass(cls, KINDS):
            raise ConfigError("not a metric class", where=where, expected=f"a subclass of {NAMES_OF_KINDS}")
        cls.name, cls.better, cls.format, cls.at_k = name, better, format, at_k
        cls.title, cls.label = title or name, label or name
        cls.takes = takes or cls.takes
        METRICS(name)(cls)
        return cls

    return register


METRICS: Registry[type[Metric]] = Registry("metric", f"{__package__}.builtin")


def find_metric(reference: str, folder: str | None = None) -> type[Metric]:
    """The metric that a configuration names.

    Args:
        reference: a name, or `module:name` of a class out of tree; with @k where the metric has places.
        folder: where that module may be found, in addition to Python's own path.

    Raises:
        ConfigError: there is no such metric; the class is not a metric, or has the name of another one; k is
            missing, not above 0, or not wanted.
    """
    name, at, places = reference.partition("@")
    found = METRICS.find(name, WHERE, folder)
    # Registered itself, not through what it inherits from.
    if not (isinstance(found, type) and issubclass(found, Metric) and vars(found).get("name")):
        raise ConfigError(
            "not a metric class",
            where=f"{WHERE}: {reference}",
            expected=f"a subclass of {NAMES_OF_KINDS} with @metric (raytrec/metrics/registry.py)",
        )
    if METRICS.parts.get(found.name, found) is not found:
        raise ConfigError(
            f"raytrec has a metric of the name '{found.name}'",
            where=f"{WHERE}: {reference}",
            expected="another name in @metric",
        )
    if not found.at_k and not at:
        return found
    if not found.at_k:
        raise ConfigError(f"{name} has no places to count", where=f"{WHERE}: {reference}", expected=name)
    if not re.fullmatch(r"[1-9]\d{0,8}", places):
        raise ConfigError(
            f"{name} counts the first k places, and k is {places or 'missing'}",
            where=f"{WHERE}: {reference}",
            expected=f"a whole number of at least 1 after @, as in {name}@10",
        )
    return at_places(found, int(places))


def at_places(metric: Any, k: int) -> Any:
    """A metric of so many places; the same class for the same number."""
    return _at(metric, k)


@cache
def _at(metric: Any, k: int) -> Any:
    texts = {name: getattr(metric, name).replace("{k}", str(k)) for name in ("title", "label")}
    return type(metric.__name__, (metric,), {**texts, "name": f"{metric.name}@{k}", "k": k})
