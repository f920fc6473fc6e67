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
from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from raytrec.common.errors import ConfigError
from raytrec.common.registry import Registry
from raytrec.tasks.losses import Kind

if TYPE_CHECKING:
    import torch

    from raytrec.metrics.groups import Groups
    from raytrec.metrics.ranked import Ranked

Direction = Literal["higher", "lower", "closer to 1"]
DIRECTIONS = ("higher", "lower", "closer to 1", None)
POSITIVES = "positives"  # a count (SumMetric.counts) of what a ratio that should be 1 is of
COUNTED_ROWS = "counted_rows"  # of a task: how many rows its mask, labels and sample weights leave
# GroupMetric.counts
GROUPS, NO_POSITIVE, ONE_CLASS = "groups", "groups_without_positive", "groups_of_one_class"
NAME = re.compile(r"[a-z][a-z0-9_]*")
FORMAT = re.compile(r"\{:,?(\.\d)?[fgeE%]\}")  # it may come from an untrusted run folder
WHERE = "tasks.metrics"
BOUND = "_bound"  # NAME_bound: how far a figure out of bins may be from the exact one
RESERVED = {"kind", "step", "total", "state", "eta_s", "rows", "skipped_rows", "nan_steps", "rows_per_s"}
RESERVED |= {"unix_s", "loss", "curves", "slices", "unknown_items", "unknown_seen"}
RESERVED |= {COUNTED_ROWS, POSITIVES, GROUPS, NO_POSITIVE, ONE_CLASS}


class Metric:
    """What all metrics have. A class, never an instance: metrics hold no state.

    Attributes:
        name: in configurations and results.
        title: for tables of results.
        label: short, for lines and axes.
        better: which values are better; None: neither are.
        format: of its figures, as of str.format.
        takes: kinds of predictions that it can be computed of (Loss.predicts); None: any.
        at_k: whether configurations name it with a number of places, as in recall@10.
        k: that number.
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
        """Return what rows of this rank add, as scalars on their device. Every kind has its own `rows`."""
        raise NotImplementedError

    @classmethod
    def figure(cls, sums: Mapping[str, torch.Tensor]) -> float | torch.Tensor:
        """Return the metric; NaN where it is not defined.

        Args:
            sums: Sums over all ranks, float64 scalars in host memory.
        """
        raise NotImplementedError

    @classmethod
    def counts(cls, sums: Mapping[str, torch.Tensor]) -> dict[str, float | torch.Tensor]:
        """Return further figures by name, which show how much the metric is worth; none by default."""
        return {}

    @staticmethod
    def ranked_curve(ranked: Ranked) -> dict[str, list] | None:
        """A curve of an evaluation's rows in the order of their predictions (builtin/areas.py), for the
        report; a collective, which returns the same on all ranks. None: the metric has no curve."""
        return None


class SumMetric(Metric):
    """A metric of sums, which add up over rows, steps and ranks; in training it is known at every report.

    `sums` takes the TaskOutputs of one step or of a few. It must not make the host wait for the device, and
    its names depend on nothing. Metrics that share this very function share its sums.
    """


class RankedMetric(Metric):
    """A metric of an evaluation's rows in the order of their predictions, which the ranks sort together: each
    has a part of that order (Ranked), of which `sums` are. Not defined where labels are not both 0 and 1, and
    nothing else."""

    takes = ("probability", "number", "score")

    @classmethod
    def bound(cls, sums: Mapping[str, torch.Tensor]) -> float | torch.Tensor:
        """How far `figure` may at most be from the exact one, where rows with nearly equal predictions have
        been put into one bin (eval.max_exact_rows)."""
        raise NotImplementedError


class GroupMetric(Metric):
    """A metric of an evaluation's groups: rows with the same value in the task's column `group`. The ranks
    exchange rows until each group is whole on one of them.

    By default the weighted mean of a value of each group (`of_groups`).

    Attributes:
        needs_item: whether the task has to name a column `item`.
        left_out: what groups are called that have no value, in `counts`.
    """

    takes = ("probability", "number", "score")
    needs_item: ClassVar[bool] = False
    left_out: ClassVar[str] = NO_POSITIVE

    @classmethod
    def of_groups(cls, groups: Groups) -> tuple[torch.Tensor, torch.Tensor]:
        """(values float64 [G], which groups have one bool [G]) of the groups that are whole on this rank."""
        raise NotImplementedError

    @classmethod
    def of_ranks(cls, ranks_GR: torch.Tensor, positives_G: torch.Tensor) -> torch.Tensor:
        """Its values for groups whose labels are 0 and 1: float64 [G]. Metrics that have it are also those
        of full rankings (selection.ranking_metrics).

        Args:
            ranks_GR: of each group's positive rows, int64, from 1, rising; behind them some that are larger
                than any place k.
            positives_G: how many there are, int64, at least 1.
        """
        raise NotImplementedError

    @classmethod
    def weights(cls, groups: Groups) -> torch.Tensor:
        """How much each group counts, float64 [G]: the mean weight of its rows, 1 without sample weights."""
        return groups.add(groups.weights) / groups.sizes

    @classmethod
    def sums(cls, groups: Groups) -> dict[str, torch.Tensor]:
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
        """Keys, int64 [n] each, of which the sums are to have, under these names, how many distinct ones
        there are over all groups of all ranks; none by default."""
        return {}

    @classmethod
    def figure(cls, sums: Mapping[str, torch.Tensor]) -> float | torch.Tensor:
        return sums["values"] / sums["weight"]

    @classmethod
    def counts(cls, sums: Mapping[str, torch.Tensor]) -> dict[str, float | torch.Tensor]:
        """Further figures: the groups, and how many have no value and are left out."""
        return {GROUPS: sums["groups"], cls.left_out: sums["left_out"]}


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
    (name, at, places), where = reference.partition("@"), f"{WHERE}: {reference}"
    found = METRICS.find(name, WHERE, folder)
    # Registered itself, not through what it inherits from.
    if not (isinstance(found, type) and issubclass(found, Metric) and vars(found).get("name")):
        raise ConfigError(
            "not a metric class",
            where=where,
            expected=f"a subclass of {NAMES_OF_KINDS} with @metric (raytrec/metrics/registry.py)",
        )
    if METRICS.parts.get(found.name, found) is not found:
        raise ConfigError(
            f"raytrec has a metric of the name '{found.name}'",
            where=where,
            expected="another name in @metric",
        )
    if not found.at_k and not at:
        return found
    if not found.at_k:
        raise ConfigError(f"{name} has no places to count", where=where, expected=name)
    if not re.fullmatch(r"[1-9]\d{0,8}", places):
        raise ConfigError(
            f"{name} counts the first k places, and k is {places or 'missing'}",
            where=where,
            expected=f"a whole number of at least 1 after @, as in {name}@10",
        )
    return at_places(found, int(places))


def at_places(metric: Any, k: int) -> Any:
    """Return a metric of so many places; the same class for the same number."""
    return _at(metric, k)


@cache
def _at(metric: Any, k: int) -> Any:
    texts = {name: getattr(metric, name).replace("{k}", str(k)) for name in ("title", "label")}
    return type(metric.__name__, (metric,), {**texts, "name": f"{metric.name}@{k}", "k": k})
