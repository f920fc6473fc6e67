"""Figures of slices: rows with the same value in a column; of the largest slices and of the worst."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from typing import Any

import torch

from raytrec.metrics.over_ranks.exchange import Exchange, rank_of
from raytrec.metrics.over_ranks.ranked import is_binary
from raytrec.metrics.over_ranks.scores import bins_of, midpoints

LEAST = 30  # rows of each label that a slice needs to be among the worst: with fewer, that would be chance


class Slices:
    """Rows of one task on this rank, by the slice that they are in: 20 bytes each up to `exact_rows` rows.

    Beyond, rows of one slice whose predictions are in one bin (scores.py) count as tied and are put together:
    memory then grows with the slices, not with the rows.

    Args:
        predict: logits → predictions, of the task.
        exact_rows: eval.max_exact_rows.
    """

    def __init__(self, predict: Callable[[torch.Tensor], torch.Tensor], exact_rows: int):
        self._predict, self._exact_rows = predict, exact_rows
        self._rows, self._binary = 0, True
        self._parts: list[tuple[torch.Tensor, ...]] = []
        self._binned: list[torch.Tensor] = []  # Ties of slices; none before there were more than exact_rows

    def add(
        self, keys_N: torch.Tensor, logits_N: torch.Tensor, labels_N: torch.Tensor, weights_N: torch.Tensor
    ) -> None:
        """Adds rows that count, in host memory, with the keys of their slices."""
        self._parts.append((keys_N, logits_N, labels_N, weights_N))
        self._rows += len(keys_N)
        self._binary = self._binary and is_binary(labels_N)
        if self._rows > self._exact_rows:
            self._bin()

    def figures(self, exchange: Exchange, place: torch.device) -> OfSlices:
        """The figures of the slices that belong to this rank; a collective, after which nothing is kept.

        Args:
            place: the device that rows are sorted on.
        """
        if binned := exchange.most(bool(self._binned)) > 0:
            self._bin()
        ties = [x.to(place) for x in (self._binned if binned else self._ties())]
        self._parts, self._binned = [], []
        ties = _put_together(*exchange.send(ties, rank_of(ties[0], exchange.world)))
        return OfSlices(ties, exchange.most(not self._binary) == 0, binned)

    def _bin(self) -> None:
        """Puts the kept rows into bins of their slices."""
        keys, predictions, *sums = self._ties()
        new = [keys, midpoints(bins_of(predictions)), *sums]
        both = zip(self._binned or [x[:0] for x in new], new, strict=True)
        self._binned = _put_together(*(torch.cat(pair) for pair in both))
        self._parts, self._rows = [], 0

    def _ties(self) -> list[torch.Tensor]:
        """The kept rows as ties."""
        if self._parts:
            keys, logits, labels, weights = (torch.cat(columns) for columns in zip(*self._parts, strict=True))
        else:
            keys, logits, labels, weights = torch.empty(0, dtype=torch.int64), *[torch.empty(0)] * 3
        predictions, weights = self._predict(logits.double()).double(), weights.double()
        positive = weights * labels
        sums = positive, weights - positive, weights * predictions, torch.ones_like(weights)
        return _put_together(keys, predictions, *sums)


def _put_together(keys: torch.Tensor, predictions: torch.Tensor, *sums: torch.Tensor) -> list[torch.Tensor]:
    """Ties of slices, by slice and rising prediction: keys, predictions, and the sums of those with equal
    keys and predictions: of positive weights, negative weights, weighted predictions, and rows."""
    order = predictions.argsort()
    order = order[keys[order].argsort(stable=True)]
    keys, predictions = keys[order], predictions[order]
    new = torch.ones_like(keys, dtype=torch.bool)
    new[1:] = (keys[1:] != keys[:-1]) | (predictions[1:] != predictions[:-1])
    places = new.cumsum(0) - 1
    first = new.nonzero().squeeze(1)
    added = (torch.zeros_like(first, dtype=x.dtype).index_add_(0, places, x[order]) for x in sums)
    return [keys[first], predictions[first], *added]


class OfSlices:
    """The figures of some slices.

    Args:
        ties: of whole slices (`_put_together`).
        binary: whether all labels are 0 and 1; else there is no AUC.
        binned: whether rows with nearly equal predictions count as tied.

    Attributes:
        keys: of the slices, int64 [S].
        rows: of each, float64 [S].
    """

    def __init__(self, ties: list[torch.Tensor], binary: bool, binned: bool):
        keys, _, positive, negative, predicted, rows = (x.cpu() for x in ties)
        self.keys, of = keys.unique_consecutive(return_inverse=True)

        def add(values: torch.Tensor) -> torch.Tensor:
            return values.new_zeros(len(self.keys)).index_add_(0, of, values)

        all_negative = add(negative)
        below = negative.cumsum(0) - negative - (all_negative.cumsum(0) - all_negative)[of]
        all_positive, tied = add(positive), positive * negative / 2
        pairs = all_positive * all_negative
        self.rows = add(rows)
        self._auc = add(positive * below + tied) / pairs if binary else torch.full_like(pairs, float("nan"))
        self._bound = add(tied) / pairs if binary and binned else None
        self._calibration = add(predicted) / all_positive
        # How far calibration is from 1, in either direction, where there is no AUC to go by.
        off = -self._calibration.log().abs()
        enough = torch.minimum(all_positive, all_negative) >= LEAST if binary else self.rows >= 2 * LEAST
        self._goodness = torch.where(enough, self._auc if binary else off, float("nan"))

    def largest(self, count: int) -> list[tuple[float, dict[str, Any]]]:
        """The slices with the most rows, each after what it is sorted by, ascending."""
        return self._first(-self.rows, count)

    def worst(self, count: int) -> list[tuple[float, dict[str, Any]]]:
        """Of slices with enough rows, those with the lowest AUC; where labels are not 0 and 1, those whose
        calibration is the farthest from 1."""
        return self._first(self._goodness, count)

    def _first(self, values: torch.Tensor, count: int) -> list[tuple[float, dict[str, Any]]]:
        order = values.nan_to_num(nan=float("inf")).argsort(stable=True)[:count].tolist()
        return [(float(values[i]), self._record(i)) for i in order if isfinite(values[i])]

    def _record(self, i: int) -> dict[str, Any]:
        figures = {"auc": self._auc, "auc_bound": self._bound, "calibration": self._calibration}
        known = {name: float(x[i]) for name, x in figures.items() if x is not None}
        finite = {name: value if isfinite(value) else None for name, value in known.items()}
        return {"key": int(self.keys[i]), "rows": int(self.rows[i]), **finite}


def summarize(found: OfSlices, count: int, exchange: Exchange, names: dict[int, str]) -> dict[str, Any]:
    """The largest and the worst slices of all ranks, the same on each; a collective.

    Args:
        found: of this rank.
        count: how many of each.
        names: what this rank knows of slices' values, by their keys.

    Returns:
        slices: how many there are; largest and worst: lists of slice (its value as text), rows, auc,
        calibration (None where not defined), and auc_bound where rows have been put into bins.
    """
    said = exchange.tell((len(found.keys), found.largest(count), found.worst(count)))

    def best(which: int) -> list[dict[str, Any]]:
        of_all = sorted(
            (each for rank in said for each in rank[which]), key=lambda each: (each[0], each[1]["key"])
        )
        return [record for _, record in of_all[:count]]

    largest, worst = best(1), best(2)
    wanted = {record["key"] for record in largest + worst}
    texts: dict[int, str] = {}
    for known in exchange.tell({key: names[key] for key in wanted & names.keys()}):
        texts = known | texts

    def named(record: dict[str, Any]) -> dict[str, Any]:
        key = record["key"]
        return {"slice": texts.get(key, f"key {key}"), **{k: v for k, v in record.items() if k != "key"}}

    return {
        "slices": sum(rank[0] for rank in said),
        "largest": [named(record) for record in largest],
        "worst": [named(record) for record in worst],
    }
