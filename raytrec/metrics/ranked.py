"""Rows of all ranks in the order of their predictions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from raytrec.common.collectives import Peers

SAMPLES = 256  # of a rank's predictions, from which the borders between the ranks' parts are chosen
BIN_BITS = 20  # of a prediction that tell its bin: sign, exponent and 11 bits of fraction
BIN_COUNT = 1 << BIN_BITS
DROPPED = 32 - BIN_BITS
LOWER = 0x7FFFFFFF


@dataclass(frozen=True)
class Counted:
    """Rows of a task that count in it, in host memory.

    Attributes:
        logits, labels, weights: float32 [n]; weights are above 0; logits [n, C] for C classes.
        keys: column → int64 [n].
    """

    logits: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor
    keys: dict[str, torch.Tensor] = field(default_factory=dict)


def starts_of_runs(*columns_N: torch.Tensor) -> torch.Tensor:
    """Return where rows differ from the row before in some column, bool [N]; the first row does."""
    starts = torch.ones_like(columns_N[0], dtype=torch.bool)
    starts[1:] = torch.stack([column[1:] != column[:-1] for column in columns_N]).any(0)
    return starts


def put_together(
    order_N: torch.Tensor, equal: Sequence[torch.Tensor], sums: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Add up consecutive rows that have equal values.

    Args:
        order_N: Order of the rows, in which those with equal values are consecutive.
        equal: Columns [N] of these values.
        sums: Columns [N] that are added up.

    Returns:
        The columns of `equal` and of `sums`, [D] each.
    """
    values = [column[order_N] for column in equal]
    starts = starts_of_runs(*values)
    first, places = starts.nonzero().squeeze(1), starts.cumsum(0) - 1
    added = (torch.zeros_like(first, dtype=x.dtype).index_add_(0, places, x[order_N]) for x in sums)
    return [*(column[first] for column in values), *added]


class Ties(NamedTuple):
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
        return cls(*put_together(predictions.argsort(), [predictions], sums))


@dataclass(frozen=True)
class Ranked:
    """This rank's part of the rows of all ranks in the order of their predictions: those of the first ranks
    are the lowest, and rows with equal predictions are on one rank.

    Attributes:
        ties: of this rank.
        below: the sums of positive, negative and rows of all lower ranks' parts, float64 [3].
        total: those of all ranks.
        both_classes: whether there are rows of both labels, and of no other.
        peers: these ranks.
    """

    ties: Ties
    below: torch.Tensor
    total: torch.Tensor
    both_classes: bool
    peers: Peers

    @classmethod
    def sort(cls, ties: Ties, peers: Peers, binary: bool = True) -> Ranked:
        """Sorts the ties of all ranks; a collective. A rank then has about as many as any other.

        Args:
            binary: whether all labels of this rank are 0 and 1.
        """
        if peers.world > 1:
            ranks = torch.bucketize(ties.predictions, _borders(ties.predictions, peers))
            ties = Ties.merge(*peers.send(ties, ranks))
        sums = torch.stack([x.sum() for x in ties[1:]])
        parts = peers.stack(torch.cat([sums, sums.new_tensor([not binary])]))
        below, total = parts[: peers.rank].sum(0), parts.sum(0)
        both = bool(total[0] > 0 and total[1] > 0 and total[3] == 0)
        return cls(ties, below[:3], total[:3], both, peers)

    def before(self, which: int) -> torch.Tensor:
        """What is below each of this rank's ties, float64 [D]: of positive (0), negative (1) or rows (2)."""
        values = self.ties[1 + which]
        return self.below[which] + values.cumsum(0) - values


def is_binary(labels_N: torch.Tensor) -> bool:
    """Whether labels are 0 and 1 alone."""
    return bool(((labels_N == 0) | (labels_N == 1)).all())


def _borders(rising_D: torch.Tensor, peers: Peers) -> torch.Tensor:
    """Values [ranks - 1] between which about equally many of all ranks' values are; a rank is given those up
    to its border."""
    places = torch.linspace(0, max(0, len(rising_D) - 1), SAMPLES, device=rising_D.device).long()
    mine = rising_D[places] if len(rising_D) else rising_D.new_zeros(SAMPLES)
    weights = torch.full_like(mine, len(rising_D) / SAMPLES)
    values, weights = peers.stack(torch.stack([mine, weights])).transpose(0, 1).flatten(1)
    values, order = values.sort()
    reached = weights[order].cumsum(0)
    shares = torch.arange(1, peers.world, dtype=torch.float64, device=values.device) / peers.world
    shares *= reached[-1]
    return values[torch.searchsorted(reached, shares).clamp(max=len(values) - 1)]


class BoundedRows:
    """Rows of one task on this rank in bounded memory: beyond `exact_rows` rows, all are put into bins. Rows
    whose predictions agree in sign, exponent and 11 bits of fraction (1 in 2,048 of their size) then count as
    tied.

    Args:
        predict: logits → predictions, of the task.
        exact_rows: eval.max_exact_rows.
        columns: whose keys are kept, too.
    """

    def __init__(
        self,
        predict: Callable[[torch.Tensor], torch.Tensor],
        exact_rows: int,
        columns: Sequence[str] = (),
    ):
        self._predict, self._exact_rows, self._columns = predict, exact_rows, columns
        none = torch.empty(0)
        self._none = [none, none, none, *[none.long() for _ in columns]]
        self._parts, self._rows, self._binary = [self._none], 0, True

    def add(self, rows: Counted) -> None:
        """Add rows."""
        keys = [rows.keys[name] for name in self._columns]
        self._parts.append([rows.logits, rows.labels, rows.weights, *keys])
        self._rows += len(rows.labels)
        self._binary = self._binary and is_binary(rows.labels)
        if self._rows > self._exact_rows:
            self._put_into_bins()

    def _put_into_bins(self) -> None:
        """Adds what `_joined` gives to the bins, and empties it."""
        raise NotImplementedError

    def _joined(self) -> list[torch.Tensor]:
        """Return the rows that are kept: logits, labels, weights and keys."""
        joined = [torch.cat(pieces) for pieces in zip(*self._parts, strict=True)]
        self._parts, self._rows = [self._none], 0
        return joined


class Scores(BoundedRows):
    """Rows of which `Ranked` is made: 12 bytes each, or 24 MiB of bins."""

    _bins: torch.Tensor | None = None  # float64 [3, BIN_COUNT]: positive, negative, rows

    def ranked(self, peers: Peers, place: torch.device) -> tuple[Ranked, bool]:
        """The rows of all ranks in the order of their predictions, and whether they are in bins: all ranks'
        are, if one's are. A collective, after which nothing is kept here.

        Args:
            place: the device that rows are sorted on.
        """
        binned = peers.largest(self._bins is not None) > 0
        if binned:
            self._put_into_bins()
            filled = (self._bins[2] > 0).nonzero().squeeze(1)
            ties = Ties(midpoints(filled), *self._bins[:, filled])
        else:
            logits, labels, weights = (column.to(place) for column in self._joined())
            ties = Ties.of(self._predict(logits.double()), labels, weights)
        self._bins = None
        return Ranked.sort(ties, peers, self._binary), binned

    def _put_into_bins(self) -> None:
        if self._bins is None:
            self._bins = torch.zeros(3, BIN_COUNT, dtype=torch.float64)
        logits, labels, weights = self._joined()
        predictions = self._predict(logits.double())
        middles = midpoints(bins_of(predictions)).masked_fill(predictions.isnan(), float("nan"))
        ties = Ties.of(middles, labels, weights)
        self._bins.index_add_(1, bins_of(ties.predictions), torch.stack(ties[1:]))


def bins_of(predictions_N: torch.Tensor) -> torch.Tensor:
    """The bin of each prediction, int64 [N]; higher predictions are in higher bins."""
    limits = torch.finfo(torch.float32)
    bits = predictions_N.float().clamp(limits.min, limits.max).nan_to_num() + 0.0  # -0.0 is 0.0
    bits = bits.view(torch.int32)
    rising = bits ^ ((bits >> 31) & LOWER)  # floats rise as integers do, but for negative ones
    return (rising.long() >> DROPPED) + BIN_COUNT // 2


def midpoints(bins_N: torch.Tensor) -> torch.Tensor:
    """The prediction in the middle of each bin, float64 [N]."""
    rising = (((bins_N - BIN_COUNT // 2) << DROPPED) + (1 << (DROPPED - 1))).int()
    return (rising ^ ((rising >> 31) & LOWER)).view(torch.float32).double()
