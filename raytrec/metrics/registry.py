"""The registry of metrics: a new one is a file in this folder and nothing else, or `module:name` of your own.

A metric is a class with one function. What adds up over rows is a SumMetric; what needs all rows at once, as
the area under a curve does, is a RowMetric. `@metric` gives it a name and says how it is shown:

    @metric("mae", title="MAE (mean absolute error)", label="MAE", better="lower")
    class MAE(SumMetric):
        @staticmethod
        def sums(outputs):
            errors_B = (outputs.predictions - outputs.labels).abs()
            return {"error": (errors_B * outputs.weights).sum(), "weight": outputs.weights.sum()}

        @staticmethod
        def figure(sums):
            return sums["error"] / sums["weight"]

Result table, result.json, console, MLflow, report, `checkpoint.keep_best` and notebooks take all they say of
a metric from here. No torch in this module: files of metrics import it in their functions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from raytrec.common.errors import ConfigError
from raytrec.common.registry import Registry

if TYPE_CHECKING:
    import torch

    from raytrec.metrics.rows import Rows
    from raytrec.tasks.outputs import TaskOutputs

Direction = Literal["higher", "lower", "closer to 1"]
DIRECTIONS = ("higher", "lower", "closer to 1", None)
NAME = re.compile(r"[a-z][a-z0-9_]*")
FORMAT = re.compile(r"\{:,?(\.\d)?[fgeE%]\}")  # it may come out of somebody else's run folder
WHERE = "tasks.metrics"
POSITIVES = "positives"  # a count (SumMetric.counts) of what a ratio that should be 1 is of
RESERVED = {"kind", "step", "total", "state", "eta_s", "rows", "skipped_rows", "nan_steps", "rows_per_s"}
RESERVED |= {"unix_s", "loss", "curves", POSITIVES}
T = TypeVar("T", bound="type[Metric]")


class Metric:
    """What all metrics have. A class, never an instance: what there is to remember is sums or rows.

    Attributes:
        name: in configurations and results.
        title: for tables of results.
        label: short, for lines and axes.
        better: which values are better; None: neither are.
        format: of its figures, as of str.format.
    """

    name: ClassVar[str] = ""
    title: ClassVar[str]
    label: ClassVar[str]
    better: ClassVar[Direction | None]
    format: ClassVar[str]

    @staticmethod
    def curve(rows: Rows) -> dict[str, list] | None:
        """A curve of an evaluation's rows for the report (metrics/curves.py); None: there is none."""
        return None


class SumMetric(Metric):
    """A metric of sums, which add up over rows, steps and ranks; in training it is known at every report."""

    @staticmethod
    def sums(outputs: TaskOutputs) -> dict[str, torch.Tensor]:
        """What a batch of one rank adds, as scalars on its device; it must not make the host wait for that.

        Metrics that share this very function share its sums. The names in it depend on nothing.
        """
        raise NotImplementedError

    @staticmethod
    def figure(sums: Mapping[str, torch.Tensor]) -> float | torch.Tensor:
        """The metric; NaN where it is not defined.

        Args:
            sums: over all rows of all ranks, float64 scalars in host memory.
        """
        raise NotImplementedError

    @staticmethod
    def counts(sums: Mapping[str, torch.Tensor]) -> dict[str, float | torch.Tensor]:
        """Figures beside it that say how much it is worth, by name; none by default."""
        return {}


class RowMetric(Metric):
    """A metric that needs all rows of an evaluation, gathered on rank 0. Training does not have it."""

    @staticmethod
    def figure(rows: Rows) -> float | torch.Tensor | None:
        """The metric, on rank 0; None or NaN where it is not defined.

        Args:
            rows: logits, predictions and labels of one task, without padding and what its weights mask.
        """
        raise NotImplementedError


def metric(
    name: str,
    *,
    title: str | None = None,
    label: str | None = None,
    better: Direction | None = None,
    format: str = "{:.4f}",
) -> Callable[[T], T]:
    """Registers a metric.

    Args:
        name: lower-case letters, digits and _.
        title: for tables of results; default: the name.
        label: for lines and axes; default: the name.
        better: higher, lower, closer to 1, or None, by which no checkpoint can be kept.
        format: of its figures, such as "{:.4f}" or "{:.1%}".

    Raises:
        ConfigError: one of them is none.
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
            raise ConfigError(f"{better!r} is no direction", where=where, expected=_some(DIRECTIONS))
        if not FORMAT.fullmatch(format):
            raise ConfigError(f"{format!r} is no format", where=where, expected='such as "{:.4f}"')
        if not issubclass(cls, (SumMetric, RowMetric)):
            raise ConfigError("it is no metric", where=where, expected="a subclass of SumMetric or RowMetric")
        cls.name, cls.better, cls.format = name, better, format
        cls.title, cls.label = title or name, label or name
        if cls.__module__.startswith(f"{__package__}."):
            METRICS(name)(cls)
        return cls

    return register


METRICS: Registry[type[Metric]] = Registry("metric", __package__)


def find_metric(reference: str, folder: str | None = None) -> type[Metric]:
    """The metric that a configuration names.

    Args:
        reference: a name, or `module:name` of a class out of tree.
        folder: where that module may be found beside Python's own path.

    Raises:
        ConfigError: there is none; or the class is no metric, or has the name of one of raytrec's.
    """
    found = METRICS.find(reference, WHERE, folder)
    if not _is_metric(found):
        raise ConfigError(
            "it is no metric",
            where=f"{WHERE}: {reference}",
            expected="a subclass of SumMetric or RowMetric with @metric (raytrec/metrics/registry.py)",
        )
    if METRICS.parts.get(found.name, found) is not found:
        raise ConfigError(
            f"raytrec has a metric of the name '{found.name}'",
            where=f"{WHERE}: {reference}",
            expected="another name in @metric",
        )
    return found


def _is_metric(value: Any) -> bool:
    """Whether it is a class that has been registered itself, not through what it inherits from."""
    return isinstance(value, type) and issubclass(value, Metric) and bool(vars(value).get("name"))


def _some(values: tuple) -> str:
    return ", ".join(str(value) for value in values)
