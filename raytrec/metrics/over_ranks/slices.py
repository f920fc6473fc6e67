"""Figures of the largest slices and of the worst."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from raytrec.common.collectives import Peers
from raytrec.common.formatting import null_nonfinite
from raytrec.metrics.over_ranks.groups import auc_of_groups, rank_of
from raytrec.metrics.over_ranks.ranked import BoundedRows, bins_of, midpoints, put_together

if TYPE_CHECKING:
    from raytrec.data.batch import Batch

SHOWN_SLICES = 10  # of the largest slices, and of the worst
LEAST_ROWS = (
    30  # rows of each label that a slice needs to be among the worst: with fewer, that would be chance
)
MOST_NAMES = 100_000  # values of a column whose text a rank keeps


class Slices(BoundedRows):
    """Rows by the slice that they are in: 20 bytes each, or bins of each slice: memory then grows with the
    slices, not with the rows."""

    _bins: list[torch.Tensor] | None = None  # ties of slices (`_put_together`)

    def figures(self, peers: Peers, place: torch.device) -> SliceFigures:
        """The figures of the slices that belong to this rank; a collective, after which nothing is kept.

        Args:
            place: the device that rows are sorted on.
        """
        if binned := peers.largest(self._bins is not None) > 0:
            self._put_into_bins()
        ties = [x.to(place) for x in self._bins or self._ties()]
        self._bins = None
        ties = _put_together(*peers.send(ties, rank_of(ties[0], peers.world)))
        return SliceFigures.of(ties, peers.largest(not self._binary) == 0, binned)

    def _put_into_bins(self) -> None:
        keys, predictions, *sums = self._ties()
        new = [keys, midpoints(bins_of(predictions)), *sums]
        both = zip(self._bins or [x[:0] for x in new], new, strict=True)
        self._bins = _put_together(*(torch.cat(pair) for pair in both))

    def _ties(self) -> list[torch.Tensor]:
        """The rows that are kept as ties."""
        logits, labels, weights, keys = self._joined()
        predictions, weights = self._predict(logits.double()).double(), weights.double()
        positive = weights * labels
        sums = positive, weights - positive, weights * predictions, torch.ones_like(weights)
        return _put_together(keys, predictions, *sums)


def _put_together(keys: torch.Tensor, predictions: torch.Tensor, *sums: torch.Tensor) -> list[torch.Tensor]:
    """Ties of slices, by slice and falling prediction: keys, predictions, and the sums of those with equal
    keys and predictions: of positive weights, negative weights, weighted predictions, and rows."""
    order = predictions.argsort(descending=True)
    order = order[keys[order].argsort(stable=True)]
    return put_together(order, [keys, predictions], sums)


@dataclass(frozen=True)
class SliceFigures:
    """The figures of S slices: float64 [S] each, in host memory.

    Attributes:
        keys: of the slices, int64 [S]. rows: of each.
        figures: auc (NaN where a slice does not have both labels, or labels are not 0 and 1), calibration,
            and where rows were put into bins auc_bound.
        goodness: what the worst slices have least of: the AUC; where labels are not 0 and 1, how near the
            calibration is to 1. NaN for slices with too few rows.
    """

    keys: torch.Tensor
    rows: torch.Tensor
    figures: dict[str, torch.Tensor]
    goodness: torch.Tensor

    @classmethod
    def of(cls, ties: list[torch.Tensor], binary: bool, binned: bool) -> SliceFigures:
        """Of ties of whole slices (`_put_together`).

        Args:
            binary: whether all labels are 0 and 1.
            binned: whether rows with nearly equal predictions count as tied.
        """
        keys, predictions, positive, negative, predicted, rows = (x.cpu() for x in ties)
        keys, of = keys.unique_consecutive(return_inverse=True)
        auc, both = auc_of_groups(of, len(keys), predictions, positive, negative)
        auc = auc.masked_fill(~both if binary else torch.ones_like(both), float("nan"))
        positives, negatives, rows, predicted, tied = (
            x.new_zeros(len(keys)).index_add_(0, of, x)
            for x in (positive, negative, rows, predicted, positive * negative / 2)
        )
        calibration = predicted / positives
        enough = torch.minimum(positives, negatives) >= LEAST_ROWS if binary else rows >= 2 * LEAST_ROWS
        goodness = (auc if binary else -calibration.log().abs()).masked_fill(~enough, float("nan"))
        bound = {"auc_bound": tied / (positives * negatives)} if binary and binned else {}
        return cls(keys, rows, {"auc": auc, "calibration": calibration, **bound}, goodness)

    def first(self, values: torch.Tensor, peers: Peers) -> list[dict[str, Any]]:
        """The first SHOWN_SLICES of all ranks by some values [S], ascending; a collective."""
        order = values.nan_to_num(nan=float("inf")).argsort(stable=True)[:SHOWN_SLICES]
        columns = torch.stack([values, self.rows, *self.figures.values()], 1)
        found = zip(*(x.tolist() for x in peers.gather([columns[order], self.keys[order]])), strict=True)
        return [
            {"key": key, "rows": int(rows)} | null_nonfinite(dict(zip(self.figures, figures, strict=True)))
            for (value, rows, *figures), key in sorted(found, key=lambda row: (row[0][0], row[1]))
            if isfinite(value)
        ][:SHOWN_SLICES]


def summarize(found: SliceFigures, peers: Peers, names: Mapping[int, str]) -> dict[str, Any]:
    """The largest and the worst slices of all ranks, the same on each; a collective.

    Args:
        found: of this rank.
        names: the texts of slices' values that this rank has seen, by their keys.

    Returns:
        slices: the number of all; largest and worst: lists of slice (its value as text), rows, auc,
        calibration (None where not defined), and auc_bound where rows have been put into bins.
    """
    lists = {"largest": found.first(-found.rows, peers), "worst": found.first(found.goodness, peers)}
    wanted = {record["key"] for records in lists.values() for record in records}
    texts: dict[int, str] = {}
    for known in peers.objects({key: names[key] for key in wanted & names.keys()}):
        texts = known | texts
    for record in (each for records in lists.values() for each in records):
        key = record.pop("key")
        record["slice"] = texts.get(key, f"key {key}")
    return {"slices": int(peers.sum(torch.tensor(len(found.keys)))), **lists}


class Names:
    """Notes the text of slices' values as batches pass, on the host.

    Args:
        columns: whose values are slices.
        key_columns: of Batch.keys, in its order.

    Attributes:
        of: column → key → text of its value; the first MOST_NAMES that this rank has seen.
    """

    def __init__(self, columns: Sequence[str], key_columns: Sequence[str]):
        self.of: dict[str, dict[int, str]] = {name: {} for name in columns}
        self._places = {name: key_columns.index(name) for name in columns}

    def note(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The same batches."""
        for batch in batches:
            if self.of and batch.reserved is not None and batch.keys is not None:
                keys_BK = batch.keys[batch.weights > 0].numpy()
                for name, known in self.of.items():
                    if name in batch.reserved.column_names:
                        self._note(known, keys_BK[:, self._places[name]], batch.reserved.column(name))
            yield batch

    def _note(self, known: dict[int, str], keys, values) -> None:
        distinct, first = np.unique(keys, return_index=True)
        new = [
            (key, row) for key, row in zip(distinct.tolist(), first.tolist(), strict=True) if key not in known
        ]
        for key, row in new[: MOST_NAMES - len(known)]:
            value = values[row].as_py()
            known[key] = "null" if value is None else str(value)
