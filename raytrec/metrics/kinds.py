"""The kinds of metrics: what each gets and returns.

What a metric sums adds up over ranks, so that no metric needs all rows in one place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from raytrec.tasks.losses import Kind

if TYPE_CHECKING:
    import torch

    from raytrec.metrics.over_ranks.groups import Groups
    from raytrec.metrics.over_ranks.ranked import Ranked
    from raytrec.tasks.outputs import TaskOutputs

Direction = Literal["higher", "lower", "closer to 1"]
DIRECTIONS = ("higher", "lower", "closer to 1", None)
POSITIVES = "positives"  # a count (SumMetric.counts) of what a ratio that should be 1 is of
COUNTED_ROWS = "counted_rows"  # of a task: how many rows its mask, labels and sample weights leave
# GroupMetric.counts
GROUPS, NO_POSITIVE, ONE_CLASS = "groups", "groups_without_positive", "groups_of_one_class"


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
    def ranked_curve(ranked: Ranked) -> dict[str, list] | None:
        """A curve of an evaluation's rows in the order of their predictions (builtin/areas.py), for the
        report; a collective, which returns the same on all ranks. None: the metric has no curve."""
        return None


class SumMetric(Metric):
    """A metric of sums, which add up over rows, steps and ranks; in training it is known at every report."""

    @staticmethod
    def sums(outputs: TaskOutputs) -> dict[str, torch.Tensor]:
        """What rows of one rank add, of one step or of a few, as scalars on its device; it must not make the
        host wait for that.

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
        """Further figures, which show how much it is worth, by name; none by default."""
        return {}


class RankedMetric(Metric):
    """A metric of an evaluation's rows in the order of their predictions, which the ranks sort together: each
    has a part of that order. Not defined where labels are not both 0 and 1, and nothing else."""

    takes = ("probability", "number", "score")

    @classmethod
    def sums(cls, ranked: Ranked) -> dict[str, torch.Tensor]:
        """What this rank's part of the order adds, as scalars."""
        raise NotImplementedError

    @classmethod
    def figure(cls, sums: Mapping[str, torch.Tensor]) -> float | torch.Tensor:
        """The metric.

        Args:
            sums: over all ranks, float64 scalars in host memory.
        """
        raise NotImplementedError

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
        return groups.mean_weights

    @classmethod
    def sums(cls, groups: Groups) -> dict[str, torch.Tensor]:
        """What this rank's groups add, as scalars."""
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
        """The metric; NaN where it is not defined.

        Args:
            sums: over all ranks, float64 scalars in host memory.
        """
        return sums["values"] / sums["weight"]

    @classmethod
    def counts(cls, sums: Mapping[str, torch.Tensor]) -> dict[str, float | torch.Tensor]:
        """Further figures: the groups, and how many have no value and are left out."""
        return {GROUPS: sums["groups"], cls.left_out: sums["left_out"]}
