"""Rows in the order of their predictions, sorted by all ranks together."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from raytrec.metrics.over_ranks.exchange import Alone, Exchange

SAMPLES = 256  # of a rank's predictions, from which the borders between the ranks' parts are chosen


@dataclass(frozen=True)
class Ties:
    """Rows with equal predictions put together: D distinct predictions, which rise.

    Attributes:
        predictions: float64 [D].
        positive, negative: the sums of the weights of rows with label 1 and label 0, float64 [D].
        rows: how many there are, float64 [D].
    """

    predictions: torch.Tensor
    positive: torch.Tensor
    negative: torch.Tensor
    rows: torch.Tensor

    @classmethod
    def of(cls, predictions_N: torch.Tensor, labels_N: torch.Tensor, weights_N: torch.Tensor) -> Ties:
        """Of rows in any order; labels 0 and 1. A prediction that is NaN makes all that follows NaN."""
        weights = weights_N.double()
        positive = weights * labels_N
        broken = predictions_N.isnan()
        return cls.merge(
            predictions_N.double().masked_fill(broken, 0),
            positive.masked_fill(broken, float("nan")),
            weights - positive,
            torch.ones_like(weights),
        )

    @classmethod
    def merge(cls, predictions: torch.Tensor, *sums: torch.Tensor) -> Ties:
        """Of ties in any order, several of which may have one prediction."""
        predictions, order = predictions.sort()
        distinct, places = predictions.unique_consecutive(return_inverse=True)
        added = (torch.zeros_like(distinct).index_add_(0, places, each[order]) for each in sums)
        return cls(distinct, *added)

    @property
    def columns(self) -> tuple[torch.Tensor, ...]:
        """Its attributes."""
        return self.predictions, self.positive, self.negative, self.rows


@dataclass(frozen=True)
class Ranked:
    """This rank's part of the rows of all ranks in the order of their predictions: those of the first ranks
    are the lowest, and rows with equal predictions are on one rank.

    Attributes:
        ties: of this rank.
        below: the sums of positive, negative and rows of all lower ranks' parts, float64 [3].
        total: those of all ranks.
        both_classes: whether there are rows of both labels, and of no other.
        exchange: between these ranks.
    """

    ties: Ties
    below: torch.Tensor
    total: torch.Tensor
    both_classes: bool
    exchange: Exchange

    @classmethod
    def sort(cls, ties: Ties, exchange: Exchange, binary: bool = True) -> Ranked:
        """Sorts the ties of all ranks; a collective. A rank then has about as many as any other.

        Args:
            binary: whether all labels of this rank are 0 and 1.
        """
        if exchange.world > 1:
            borders = _borders(ties.predictions, exchange).to(ties.predictions.device)
            ranks = torch.bucketize(ties.predictions, borders)
            ties = Ties.merge(*exchange.send(ties.columns, ranks))
        sums = torch.stack([x.sum() for x in (ties.positive, ties.negative, ties.rows)])
        parts = exchange.stack(torch.cat([sums, sums.new_tensor([not binary])]))
        below, total = parts[: exchange.rank].sum(0), parts.sum(0)
        both = bool(total[0] > 0 and total[1] > 0 and total[3] == 0)
        return cls(ties, below[:3].to(sums.device), total[:3].to(sums.device), both, exchange)

    @classmethod
    def of(
        cls, predictions_N: torch.Tensor, labels_N: torch.Tensor, weights_N: torch.Tensor | None = None
    ) -> Ranked:
        """Of rows that are all in this process."""
        weights_N = torch.ones_like(labels_N) if weights_N is None else weights_N
        return cls.sort(Ties.of(predictions_N, labels_N, weights_N), Alone(), is_binary(labels_N))

    def before(self, which: int) -> torch.Tensor:
        """What is below each of this rank's ties, float64 [D]: of positive (0), negative (1) or rows (2)."""
        values = self.ties.columns[1 + which]
        return self.below[which] + values.cumsum(0) - values


def is_binary(labels_N: torch.Tensor) -> bool:
    """Whether labels are 0 and 1 alone."""
    return bool(((labels_N == 0) | (labels_N == 1)).all())


def _borders(rising_D: torch.Tensor, exchange: Exchange) -> torch.Tensor:
    """Values [ranks - 1] between which about equally many of all ranks' values are; a rank is given those up
    to its border."""
    places = torch.linspace(0, max(0, len(rising_D) - 1), SAMPLES, device=rising_D.device).long()
    mine = rising_D[places] if len(rising_D) else rising_D.new_zeros(SAMPLES)
    weights = torch.full_like(mine, len(rising_D) / SAMPLES)
    values, weights = exchange.stack(torch.stack([mine, weights])).transpose(0, 1).flatten(1)
    values, order = values.sort()
    reached = weights[order].cumsum(0)
    shares = torch.arange(1, exchange.world, dtype=torch.float64) / exchange.world * reached[-1]
    return values[torch.searchsorted(reached, shares).clamp(max=len(values) - 1)]
