"""A rank's predictions and labels of one task, in bounded memory: rows, or beyond a number of them, bins."""

from __future__ import annotations

from collections.abc import Callable

import torch

from raytrec.metrics.over_ranks.exchange import Exchange
from raytrec.metrics.over_ranks.ranked import Ranked, Ties, is_binary

BITS = 20  # of a prediction that tell its bin: sign, exponent and 11 bits of fraction
COUNT = 1 << BITS
DROPPED = 32 - BITS
LOWER = 0x7FFFFFFF


class Scores:
    """Rows of one task on this rank, from which `Ranked` is made.

    Up to `exact_rows` rows are kept, 12 bytes each. The rows beyond that, and those before, are counted in
    COUNT bins, 24 MiB in all: rows whose predictions agree in sign, exponent and 11 bits of fraction (1 in
    2,048 of their size) then count as tied.

    Args:
        predict: logits → predictions, of the task.
        exact_rows: eval.max_exact_rows.
    """

    def __init__(self, predict: Callable[[torch.Tensor], torch.Tensor], exact_rows: int):
        self._predict, self._exact_rows = predict, exact_rows
        self._parts: list[tuple[torch.Tensor, ...]] = []
        self._rows, self._binary = 0, True
        self._bins: torch.Tensor | None = None  # float64 [3, COUNT]: positive, negative, rows

    def add(self, logits_N: torch.Tensor, labels_N: torch.Tensor, weights_N: torch.Tensor) -> None:
        """Adds rows that count, in host memory."""
        self._parts.append((logits_N, labels_N, weights_N))
        self._rows += len(labels_N)
        self._binary = self._binary and is_binary(labels_N)
        if self._rows > self._exact_rows:
            self._count()

    def ranked(self, exchange: Exchange, place: torch.device) -> tuple[Ranked, bool]:
        """The rows of all ranks in the order of their predictions, and whether they are in bins: all ranks'
        are, if one's are. A collective, after which nothing is kept here.

        Args:
            place: the device that rows are sorted on.
        """
        binned = exchange.most(self._bins is not None) > 0
        if binned:
            self._count()
            ties = _ties_of(self._bins)
        else:
            logits, labels, weights = self._joined()
            ties = Ties.of(self._predict(logits.to(place).double()), labels.to(place), weights.to(place))
        self._parts, self._bins = [], None
        return Ranked.sort(ties, exchange, self._binary), binned

    def _count(self) -> None:
        """Puts the kept rows into bins."""
        if self._bins is None:
            self._bins = torch.zeros(3, COUNT, dtype=torch.float64)
        logits, labels, weights = self._joined()
        predictions = self._predict(logits.double())
        middles = midpoints(bins_of(predictions)).masked_fill(predictions.isnan(), float("nan"))
        ties = Ties.of(middles, labels, weights)
        self._bins.index_add_(1, bins_of(ties.predictions), torch.stack(ties.columns[1:]))
        self._parts, self._rows = [], 0

    def _joined(self) -> list[torch.Tensor]:
        if not self._parts:
            return [torch.empty(0)] * 3
        return [torch.cat(columns) for columns in zip(*self._parts, strict=True)]


def _ties_of(bins: torch.Tensor) -> Ties:
    filled = (bins[2] > 0).nonzero().squeeze(1)
    return Ties(midpoints(filled), *bins[:, filled])


def bins_of(predictions_N: torch.Tensor) -> torch.Tensor:
    """The bin of each prediction, int64 [N]; higher predictions are in higher bins."""
    limits = torch.finfo(torch.float32)
    bits = predictions_N.float().clamp(limits.min, limits.max).nan_to_num() + 0.0  # -0.0 is 0.0
    bits = bits.view(torch.int32)
    rising = bits ^ ((bits >> 31) & LOWER)  # floats rise as integers do, but for negative ones
    return (rising.long() >> DROPPED) + COUNT // 2


def midpoints(bins_N: torch.Tensor) -> torch.Tensor:
    """The prediction in the middle of each bin, float64 [N]."""
    rising = (((bins_N - COUNT // 2) << DROPPED) + (1 << (DROPPED - 1))).int()
    return (rising ^ ((rising >> 31) & LOWER)).view(torch.float32).double()
