"""Evaluation rows sorted by prediction across all ranks, exactly or in bins."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from raytrec.common.collectives import Peers

SAMPLES = 256  # number of predictions that each rank samples to choose the borders between the ranks' parts
BIN_BITS = 20  # leading bits that determine the bin: sign, exponent and 11 bits of fraction
BIN_COUNT = 1 << BIN_BITS
DROPPED_BITS = 32 - BIN_BITS
MAGNITUDE_MASK = 0x7FFFFFFF


def mark_run_starts(*columns_N: torch.Tensor) -> torch.Tensor:
    """Return a mask, bool [N], of the rows that differ from the previous row in any column; True for the first row."""
    starts = torch.ones_like(columns_N[0], dtype=torch.bool)
    starts[1:] = torch.stack([column[1:] != column[:-1] for column in columns_N]).any(0)
    return starts


def sum_equal_rows(
    order_N: torch.Tensor, equal: Sequence[torch.Tensor], sums: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return one row for each set of rows that have equal values, with sums over these rows.

    Args:
        order_N: Indices of the rows in an order in which equal rows are consecutive, int64.
        equal: Columns [N] that are compared.
        sums: Columns [N] that are summed.

    Returns:
        The columns of `equal` and of `sums`, with one entry for each of D runs of equal rows, [D] each.
    """
    values = [column[order_N] for column in equal]
    starts = mark_run_starts(*values)
    first, places = starts.nonzero().squeeze(1), starts.cumsum(0) - 1
    added = (torch.zeros_like(first, dtype=x.dtype).index_add_(0, places, x[order_N]) for x in sums)
    return [*(column[first] for column in values), *added]


class Ties(NamedTuple):
    """Rows with equal predictions (ties) summed: D distinct predictions in ascending order.

    Attributes:
        predictions: Distinct predictions, float64 [D].
        positive: Sum of weight × label, i.e. the weight of rows with label 1, float64 [D].
        negative: Sum of weight × (1 − label), i.e. the weight of rows with label 0, float64 [D].
        rows: Number of rows, float64 [D].
    """

    predictions: torch.Tensor
    positive: torch.Tensor
    negative: torch.Tensor
    rows: torch.Tensor

    @classmethod
    def of(cls, predictions_N: torch.Tensor, labels_N: torch.Tensor, weights_N: torch.Tensor) -> Ties:
        """Return the ties of rows with labels 0 and 1, in any order.

        A NaN prediction makes `positive` and `negative` NaN, so that RankedRows.both_classes is False.
        """
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
        """Return ties in which entries with the same prediction are merged; the entries can be in any order."""
        return cls(*sum_equal_rows(predictions.argsort(), [predictions], sums))


@dataclass(frozen=True)
class RankedRows:
    """This rank's part of the rows of all ranks, sorted by prediction.

    Lower ranks have lower predictions, and rows with equal predictions are on the same rank.

    Attributes:
        ties: This rank's part, summed by prediction.
        below: Sums of `positive`, `negative` and `rows` of Ties over all lower ranks, float64 [3].
        total: The same sums over all ranks, float64 [3].
        both_classes: True if the labels on all ranks contain 0 and 1 and no other value, and no prediction is NaN.
        peers: Ranks among which the rows are divided.
    """

    ties: Ties
    below: torch.Tensor
    total: torch.Tensor
    both_classes: bool
    peers: Peers

    @classmethod
    def sort(cls, ties: Ties, peers: Peers, binary: bool = True) -> RankedRows:
        """Sort the ties of all ranks into parts of about equal size, and return this rank's part.

        This is a collective operation: every rank must call it. `binary` is True if all labels of this rank are 0 or
        1.
        """
        if peers.world > 1:
            ranks = torch.bucketize(ties.predictions, _estimate_borders(ties.predictions, peers))
            ties = Ties.merge(*peers.send(ties, ranks))
        sums = torch.stack([x.sum() for x in ties[1:]])
        parts = peers.stack(torch.cat([sums, sums.new_tensor([not binary])]))
        below, total = parts[: peers.rank].sum(0), parts.sum(0)
        has_both = bool(total[0] > 0 and total[1] > 0 and total[3] == 0)
        return cls(ties, below[:3], total[:3], has_both, peers)

    def sum_below(self, which: int) -> torch.Tensor:
        """Return a sum over all rows with lower predictions than each tie of this rank, float64 [D].

        `which` selects the sum: positive weights (0), negative weights (1) or rows (2).
        """
        values = self.ties[1 + which]
        return self.below[which] + values.cumsum(0) - values


def is_binary(labels_N: torch.Tensor) -> bool:
    """Return True if all labels are 0 or 1."""
    return bool(((labels_N == 0) | (labels_N == 1)).all())


def _estimate_borders(rising_D: torch.Tensor, peers: Peers) -> torch.Tensor:
    """Return the upper bounds [ranks - 1] of the ranks' parts, estimated from samples of all ranks.

    About the same number of values lies between two consecutive bounds.
    """
    positions = torch.linspace(0, max(0, len(rising_D) - 1), SAMPLES, device=rising_D.device).long()
    samples = rising_D[positions] if len(rising_D) else rising_D.new_zeros(SAMPLES)
    weights = torch.full_like(samples, len(rising_D) / SAMPLES)
    values, weights = peers.stack(torch.stack([samples, weights])).transpose(0, 1).flatten(1)
    values, order = values.sort()
    cumulative = weights[order].cumsum(0)
    shares = torch.arange(1, peers.world, dtype=torch.float64, device=values.device) / peers.world
    shares *= cumulative[-1]
    return values[torch.searchsorted(cumulative, shares).clamp(max=len(values) - 1)]


class BoundedRows:
    """Rows of one task on this rank, of which a limited number is kept in memory one by one.

    Args:
        predict: Function of the task that converts logits to predictions.
        exact_rows: Maximum number of rows kept in memory one by one (eval.max_exact_rows).
        columns: Columns whose keys are stored with the rows.
    """

    def __init__(self, predict: Callable[[torch.Tensor], torch.Tensor], exact_rows: int, columns: Sequence[str] = ()):
        self._predict, self._exact_rows, self._columns = predict, exact_rows, columns
        empty = torch.empty(0)
        self._empty_rows = [empty, empty, empty, *[empty.long() for _ in columns]]
        self._pieces, self._rows = [self._empty_rows], 0
        self._binary = True  # False if any label is neither 0 nor 1

    def add(
        self, logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, keys: Mapping[str, torch.Tensor]
    ) -> None:
        """Add rows in host memory with weights above 0. If more than `exact_rows` rows are stored, compact all of them.

        Args:
            logits: Logits, float32 [n].
            labels: Labels, float32 [n].
            weights: Weights, float32 [n].
            keys: Column → key of each row's value (data.ids.compute_group_keys), int64 [n].
        """
        self._pieces.append([logits, labels, weights, *(keys[name] for name in self._columns)])
        self._rows += len(labels)
        if self._rows > self._exact_rows:
            self._compact()

    def _compact(self) -> None:
        """Store the rows in memory (`_concatenate_rows`) in a form that needs less memory."""
        raise NotImplementedError

    def _concatenate_rows(self) -> list[torch.Tensor]:
        """Return the logits, labels, weights and keys of the rows in memory, and discard the rows."""
        joined = [torch.cat(pieces) for pieces in zip(*self._pieces, strict=True)]
        self._pieces, self._rows = [self._empty_rows], 0
        self._binary = self._binary and is_binary(joined[1])
        return joined


class Scores(BoundedRows):
    """Rows of one task to be sorted into `RankedRows`. They take 12 bytes per row, or 24 MiB once they are binned.

    Rows are binned if there are more than `exact_rows`. Rows whose predictions agree in sign, exponent and 11 bits
    of fraction (to within 1/2,048 of their value) are in the same bin, and count as tied.
    """

    _bins: torch.Tensor | None = None  # float64 [3, BIN_COUNT]: positive, negative, rows

    def ranked(self, peers: Peers, device: torch.device) -> tuple[RankedRows, bool]:
        """Return (this rank's part of the sorted rows of all ranks, True if rows are binned).

        This is a collective operation: every rank must call it once, after all rows have been added. If any rank has
        binned its rows, all ranks do so. Exact rows are sorted on `device`.
        """
        binned = peers.max_number(self._bins is not None) > 0
        if binned:
            self._compact()
            filled = (self._bins[2] > 0).nonzero().squeeze(1)
            ties = Ties(compute_midpoints(filled), *self._bins[:, filled])
        else:
            logits, labels, weights = (column.to(device) for column in self._concatenate_rows())
            ties = Ties.of(self._predict(logits.double()), labels, weights)
        return RankedRows.sort(ties, peers, self._binary), binned

    def _compact(self) -> None:
        if self._bins is None:
            self._bins = torch.zeros(3, BIN_COUNT, dtype=torch.float64)
        logits, labels, weights = self._concatenate_rows()
        predictions = self._predict(logits.double())
        middles = compute_midpoints(assign_bins(predictions)).masked_fill(predictions.isnan(), float("nan"))
        ties = Ties.of(middles, labels, weights)
        self._bins.index_add_(1, assign_bins(ties.predictions), torch.stack(ties[1:]))


def assign_bins(predictions_N: torch.Tensor) -> torch.Tensor:
    """Return the bin of each prediction, int64 [N], in the order of predictions; NaN is in the bin of 0."""
    limits = torch.finfo(torch.float32)
    bits = predictions_N.float().clamp(limits.min, limits.max).nan_to_num() + 0.0  # converts -0.0 to 0.0
    bits = bits.view(torch.int32)
    rising = bits ^ ((bits >> 31) & MAGNITUDE_MASK)  # bits order floats like integers, negative floats reversed
    return (rising.long() >> DROPPED_BITS) + BIN_COUNT // 2


def compute_midpoints(bins_N: torch.Tensor) -> torch.Tensor:
    """Return the prediction in the middle of each bin, float64 [N]."""
    rising = (((bins_N - BIN_COUNT // 2) << DROPPED_BITS) + (1 << (DROPPED_BITS - 1))).int()
    return (rising ^ ((rising >> 31) & MAGNITUDE_MASK)).view(torch.float32).double()
