"""Registry of metrics: classes in builtin/ and users' classes, which configurations refer to as `module:name`.

A metric is computed from sums over rows and ranks. Its base class determines the form of the rows:

    SumMetric     rows in any order; also computed during training
    RankedMetric  rows sorted by prediction, e.g. for the area under a curve
    GroupMetric   complete groups of rows with the same value in the task's `group` column, e.g. rows of one user

The decorator `@metric` sets the name of a metric and how it is displayed:

    @metric("mae", title="MAE (mean absolute error)", label="MAE", better="lower")
    class MAE(SumMetric):
        @staticmethod
        def sums(outputs):
            errors_B = (outputs.predictions - outputs.labels).abs()
            return {"error": (errors_B * outputs.weights).sum(), "weight": outputs.weights.sum()}

        @staticmethod
        def figure(sums):
            return sums["error"] / sums["weight"]

The result table, result.json, the console, MLflow, the report, `checkpoint.keep_best` and notebooks read
names, titles and formats from this registry. This module does not import torch; metrics import torch inside
functions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from raytrec.common.errors import ConfigError
from raytrec.common.registry import Registry
from raytrec.tasks.losses import Kind

if TYPE_CHECKING:
    import torch

    from raytrec.metrics.groups import Groups
    from raytrec.metrics.ranked import RankedRows

Direction = Literal["higher", "lower", "closer to 1"]
DIRECTIONS = ("higher", "lower", "closer to 1", None)
POSITIVES = "positives"  # key in SumMetric.counts: weighted sum of the labels on which a ratio is based
COUNTED_ROWS = "counted_rows"  # key: number of rows that the task does not exclude by mask, label or sample weight
# Keys of GroupMetric.counts.
GROUPS, NO_POSITIVE, ONE_CLASS = "groups", "groups_without_positive", "groups_of_one_class"
NAME = re.compile(r"[a-z][a-z0-9_]*")
FORMAT = re.compile(r"\{:,?(\.\d)?[fgeE%]\}")  # strict, because formats are read from untrusted run folders
WHERE = "tasks.metrics"
BOUND_SUFFIX = "_bound"  # suffix of the key of the maximum error of a metric computed from binned predictions
RESERVED = {"kind", "step", "total", "state", "eta_s", "rows", "skipped_rows", "nan_steps", "rows_per_s"}
RESERVED |= {"unix_s", "loss", "curves", "slices", "unknown_items", "unknown_seen"}
RESERVED |= {COUNTED_ROWS, POSITIVES, GROUPS, NO_POSITIVE, ONE_CLASS}


class Metric:
    """Base class of all metrics. Metrics are stateless classes and are never instantiated.

    Attributes:
        name: Name in configurations and results.
        title: Title in result tables.
        label: Short name for console lines and axes.
        better: Direction of better values: "higher", "lower" or "closer to 1"; None if no direction is better.
        format: Format string of values, as for str.format.
        takes: Kinds of predictions that the metric supports (Loss.predicts); None: any.
        at_k: True if configurations name the metric with a cutoff k, as in recall@10.
        k: Cutoff, i.e. number of highest predictions that count; 0 if the metric has no cutoff.
    """

    name: ClassVar[str] = ""
    title: ClassVar[str]
    label: ClassVar[str]
    better: ClassVar[Direction | None]
    format: ClassVar[str]
    takes: ClassVar[tuple[Kind, ...] | None] = None
    at_k: ClassVar[bool] = False
    k: ClassVar[int] = 0

    @staticmethod
    def sums(rows: Any, /) -> dict[str, torch.Tensor]:
        """Return name → sum over this rank's rows, a scalar on their device; base classes define the type of `rows`."""
        raise NotImplementedError

    @classmethod
    def figure(cls, sums: Mapping[str, torch.Tensor]) -> float | torch.Tensor:
        """Return the metric value, or NaN if undefined, from `sums` over all ranks (float64, in host memory)."""
        raise NotImplementedError

    @classmethod
    def counts(cls, sums: Mapping[str, torch.Tensor]) -> dict[str, float | torch.Tensor]:
        """Return name → count for counts that show how reliable the value is; empty by default."""
        return {}

    @staticmethod
    def ranked_curve(ranked: RankedRows) -> dict[str, list] | None:
        """Return axis → coordinates of a curve over rows sorted by prediction, for the report; None: no curve.

        This is a collective operation: every rank must call it, with the same result. The function's name is the key
        of the curve.
        """
        return None


class SumMetric(Metric):
    """Metric that is computed from sums over rows, steps and ranks, in training as well as in evaluations.

    `sums` takes the TaskOutputs of one or more steps. The function must not make the host wait for the device
    and must always return the same keys. It is called once for all metrics that share the function.
    """


class RankedMetric(Metric):
    """Metric over the rows of an evaluation, sorted by prediction across all ranks.

    `sums` takes this rank's part of the rows (RankedRows). The value is undefined if a prediction is NaN, or unless all
    labels are 0 or 1 and both occur.
    """

    takes = ("probability", "number", "score")

    @classmethod
    def bound(cls, sums: Mapping[str, torch.Tensor]) -> float | torch.Tensor | None:
        """Return the maximum error of `figure` if predictions are binned (eval.max_exact_rows); None: unknown."""
        return None


class GroupMetric(Metric):
    """Metric over groups of evaluation rows that have the same value in the task's `group` column.

    Ranks exchange rows until each group is complete on one rank. By default, the metric is the weighted mean
    of one value per group (`of_groups`).

    Attributes:
        needs_item: True if the task must name an `item` column.
        left_out: Key in `counts` for the number of groups without a value, which are excluded from the mean.
    """

    takes = ("probability", "number", "score")
    needs_item: ClassVar[bool] = False
    left_out: ClassVar[str] = NO_POSITIVE

    @classmethod
    def of_groups(cls, groups: Groups) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a value for each group, float64 [G], and a mask of groups with a value, bool [G]."""
        raise NotImplementedError

    @classmethod
    def of_ranks(cls, ranks_GR: torch.Tensor, positives_G: torch.Tensor) -> torch.Tensor:
        """Return the value of each group, float64 [G], from the ranks of its positive rows. Labels must be 0 or 1.

        Built-in metrics that define this method are also used in full rankings (selection.select_ranking_metrics).

        Args:
            ranks_GR: Ranks of each group's positive rows, int64 [G, R], in ascending order, where the best rank is
                1; padded with values above any k.
            positives_G: Number of positive rows of each group, int64 [G], at least 1.
        """
        raise NotImplementedError

    @classmethod
    def weights(cls, groups: Groups) -> torch.Tensor:
        """Return the weight of each group, float64 [G]. By default, this is the mean weight of the group's rows."""
        return groups.add(groups.weights) / groups.sizes

    @classmethod
    def sums(cls, groups: Groups) -> dict[str, torch.Tensor]:
        """Return sums over groups: values (weighted), weight, groups (number), left_out (number without a value)."""
        values_G, counted_G = cls.of_groups(groups)
        weights_G = cls.weights(groups) * counted_G
        return {
            "values": (values_G.masked_fill(~counted_G, 0) * weights_G).sum(),
            "weight": weights_G.sum(),
            "groups": counted_G.new_tensor(len(counted_G), dtype=weights_G.dtype),
            "left_out": (~counted_G).sum(),
        }

    @classmethod
    def distinct(cls, groups: Groups) -> dict[str, torch.Tensor]:
        """Return name → keys, int64 [n]. The number of distinct keys over all ranks is added to the sums by name."""
        return {}

    @classmethod
    def figure(cls, sums: Mapping[str, torch.Tensor]) -> float | torch.Tensor:
        """Return the weighted mean over groups; NaN if no group has a value."""
        return sums["values"] / sums["weight"]

    @classmethod
    def counts(cls, sums: Mapping[str, torch.Tensor]) -> dict[str, float | torch.Tensor]:
        """Return the number of groups (key GROUPS) and the number of groups without a value (key `left_out`)."""
        return {GROUPS: sums["groups"], cls.left_out: sums["left_out"]}


T = TypeVar("T", bound=type[Metric])
KINDS = (SumMetric, RankedMetric, GroupMetric)
KIND_NAMES = " or ".join(kind.__name__ for kind in KINDS)


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
    """Return a decorator that sets the attributes of a metric class, registers built-in metrics and returns the class.

    Args:
        name: Name: a lower-case letter, then lower-case letters, digits and _. Names in RESERVED are not allowed.
        title: Title in result tables; default: the name.
        label: Short name for console lines and axes; default: the name.
        better: Direction of better values: higher, lower, closer to 1, or None. None: it cannot rank checkpoints.
        format: Format string for values, such as "{:.4f}" or "{:.1%}".
        takes: Supported kinds of predictions (Loss.predicts); default: the class attribute `takes`.
        at_k: True if configurations name the metric as NAME@10, where 10 is `k`; {k} in title and label is
            replaced by that number.

    Raises:
        ConfigError: Raised by the decorator if an argument is invalid, or the object is not a subclass of KINDS.
    """

    def register(cls: T) -> T:
        where = f"@metric({name!r}) of {cls.__module__}:{cls.__qualname__}"
        if name in RESERVED:
            expected = f"a name other than {', '.join(sorted(RESERVED))}"
            raise ConfigError(f"the metric name '{name}' is reserved", where=where, expected=expected)
        if not NAME.fullmatch(name):
            expected = "a lower-case letter, followed by lower-case letters, digits and _"
            raise ConfigError(f"'{name}' is not a valid metric name", where=where, expected=expected)
        if better not in DIRECTIONS:
            expected = f"one of {', '.join(map(repr, DIRECTIONS))}"
            raise ConfigError(f"better={better!r} is invalid", where=where, expected=expected)
        if not FORMAT.fullmatch(format):
            expected = 'a format string such as "{:.4f}", "{:.1%}" or "{:,.0f}"'
            raise ConfigError(f"format={format!r} is invalid", where=where, expected=expected)
        if not (isinstance(cls, type) and issubclass(cls, KINDS)):
            raise ConfigError(f"{cls.__name__} is not a metric", where=where, expected=f"a subclass of {KIND_NAMES}")
        cls.name, cls.better, cls.format, cls.at_k = name, better, format, at_k
        cls.title, cls.label = title or name, label or name
        cls.takes = takes or cls.takes
        METRICS(name)(cls)
        return cls

    return register


METRICS: Registry[type[Metric]] = Registry("metric", f"{__package__}.builtin")


def find_metric(reference: str, folder: str | None = None) -> type[Metric]:
    """Return the metric class that a configuration names.

    Args:
        reference: Name of a metric, or `module:name` of a user's class, with @k if the metric has a cutoff.
        folder: Folder that is added to sys.path if the module is not found; None: no folder.

    Raises:
        ConfigError: The metric does not exist or cannot be imported, is not a class with @metric, or reuses the name
            of a built-in metric; or k is missing, not an integer from 1 to 999,999,999, or not supported.
        Exception: Any error raised by the user's module during import.
    """
    (name, separator, places), where = reference.partition("@"), f"{WHERE}: {reference}"
    cls = METRICS.find(name, WHERE, folder)
    # The class itself must be registered; a registered base class is not enough.
    if not (isinstance(cls, type) and issubclass(cls, Metric) and vars(cls).get("name")):
        raise ConfigError(
            f"{name} is not a metric class with the decorator @metric",
            where=where,
            expected=f"a subclass of {KIND_NAMES} with @metric (raytrec/metrics/registry.py)",
        )
    if METRICS.parts.get(cls.name, cls) is not cls:
        raise ConfigError(
            f"the metric name '{cls.name}' of {name} is already used by raytrec",
            where=where,
            expected="another name in @metric",
        )
    if not cls.at_k and not separator:
        return cls
    if not cls.at_k:
        raise ConfigError(f"metric {name} does not support @{places}", where=where, expected=f"{name} without @")
    if not re.fullmatch(r"[1-9]\d{0,8}", places):
        raise ConfigError(
            f"metric {name} is computed from the k highest scores, but k is {places or 'missing'}",
            where=where,
            expected=f"an integer from 1 to 999,999,999 after @, such as {name}@10",
        )
    return specialize_at_k(cls, int(places))  # type: ignore[arg-type]


@cache
def specialize_at_k(metric: Any, k: int) -> Any:
    """Return a subclass of a metric class with the cutoff k, named NAME@k. Equal arguments return the same class."""
    texts = {name: getattr(metric, name).replace("{k}", str(k)) for name in ("title", "label")}
    return type(metric.__name__, (metric,), {**texts, "name": f"{metric.name}@{k}", "k": k})
