"""Groups of evaluation rows with the same value in a task's `group` column, each gathered from all ranks on one."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import IO

import numpy as np
import torch

from raytrec.common.collectives import Peers
from raytrec.common.errors import convert_os_errors
from raytrec.embeddings.hashing import hash_bits
from raytrec.metrics.ranked import BoundedRows, mark_run_starts

RELEVANCE_THRESHOLD = 0.5  # labels above this value are positive
DISK_PARTS = 64  # number of parts into which rows on disk are divided by the hash of their group key


@dataclass(frozen=True)
class Groups:
    """Rows of G complete groups, sorted by group and descending prediction.

    Rows with equal predictions are sorted by ascending label, so that ties never improve a metric.

    Attributes:
        of: Index of each row's group, int64 [N], from 0 to G - 1.
        count: Number of groups, G.
        predictions: Predictions of the rows, float64 [N].
        labels: Labels of the rows, float64 [N].
        weights: Row weights above 0, float64 [N]; NaN for rows whose prediction is NaN.
        items: Item keys, int64 [N]; None if no metric of the task needs items.
    """

    of: torch.Tensor
    count: int
    predictions: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor
    items: torch.Tensor | None = None

    @classmethod
    def make(
        cls,
        keys_N: torch.Tensor,
        predictions_N: torch.Tensor,
        labels_N: torch.Tensor,
        weights_N: torch.Tensor,
        items_N: torch.Tensor | None = None,
    ) -> Groups:
        """Return the groups formed by rows, given in any order; all rows of a group must be present.

        Rows with the same key in `keys_N` (int64) form a group. A NaN prediction makes the row's weight NaN. The
        other arguments are float32 or float64 [N], and item keys, int64 [N]; None: no items.
        """
        weights_N = weights_N.masked_fill(predictions_N.isnan(), float("nan"))
        order = labels_N.argsort(stable=True)
        for column, falling in ((predictions_N, True), (keys_N, False)):
            order = order[column[order].argsort(stable=True, descending=falling)]
        distinct, of = keys_N[order].unique_consecutive(return_inverse=True)
        predictions, labels, weights = (x[order].double() for x in (predictions_N, labels_N, weights_N))
        items = None if items_N is None else items_N[order]
        return cls(of, len(distinct), predictions, labels, weights, items)

    def add(self, values_N: torch.Tensor) -> torch.Tensor:
        """Return the sum of the values of each group's rows, float64 [G]."""
        return self.weights.new_zeros(self.count).index_add_(0, self.of, values_N.double())

    @cached_property
    def sizes(self) -> torch.Tensor:
        """Return the number of rows in each group, float64 [G]."""
        return self.add(torch.ones_like(self.weights))

    @cached_property
    def ranks(self) -> torch.Tensor:
        """Return the rank of each row within its group, int64 [N], from 1."""
        starts = self.sizes.cumsum(0) - self.sizes
        return torch.arange(len(self.of), device=self.of.device) - starts.long()[self.of] + 1

    @cached_property
    def relevant(self) -> torch.Tensor:
        """Return a mask of the rows with a positive label, bool [N]."""
        return self.labels > RELEVANCE_THRESHOLD

    @cached_property
    def positives(self) -> torch.Tensor:
        """Return the number of positive rows in each group, float64 [G]."""
        return self.add(self.relevant)

    def sort_best_first(self, values_N: torch.Tensor) -> torch.Tensor:
        """Return the values [N], one per row, sorted by group and, within a group, in descending order."""
        order = values_N.argsort(descending=True)
        return values_N[order[self.of[order].argsort(stable=True)]]

    def auc(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weighted AUC of each group, and a mask of groups with both classes (see `compute_group_auc`)."""
        positive, negative = self.weights * self.relevant, self.weights * ~self.relevant
        return compute_group_auc(self.of, self.count, self.predictions, positive, negative)


def compute_group_auc(
    of_N: torch.Tensor, count: int, predictions_N: torch.Tensor, positive_N: torch.Tensor, negative_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the AUC of each group, float64 [G], and a mask of the groups with both classes, bool [G].

    Ties count half. The AUC of a group with only one class is undefined and returned as 0.

    Args:
        of_N: Index of each row's group, as in Groups; rows are sorted by group and descending prediction.
        count: Number of groups, G.
        predictions_N: Predictions of the rows, float [N].
        positive_N: Weight of each row as a positive row, float64; 0 for negative rows.
        negative_N: Weight of each row as a negative row, float64; 0 for positive rows.
    """

    def add(values_N: torch.Tensor) -> torch.Tensor:
        return values_N.new_zeros(count).index_add_(0, of_N, values_N)

    tie = mark_run_starts(of_N, predictions_N).cumsum(0) - 1  # index of each row's run of equal predictions
    ties = len(tie) and int(tie[-1]) + 1
    tied_negative = negative_N.new_zeros(ties).index_add_(0, tie, negative_N)
    all_positive, all_negative = add(positive_N), add(negative_N)
    negative_before = all_negative.cumsum(0) - all_negative  # negative weight of all previous groups
    above = tied_negative.cumsum(0)[tie] - negative_before[of_N]  # negative weight predicted at least as high
    below = all_negative[of_N] - above
    pairs = add(positive_N * (below + tied_negative[tie] / 2))
    both = (all_positive > 0) & (all_negative > 0)
    return pairs / (all_positive * all_negative).masked_fill(~both, 1), both


class GroupRows(BoundedRows):
    """Rows of one task on this rank, stored until the ranks exchange rows to complete all groups.

    A row takes 20 bytes, or 28 with its item. If there are more than `exact_rows` rows in memory, they are appended to
    unnamed temporary files, one per column, which the system deletes when the process ends. `add` raises RunError if a
    file cannot be written.

    Args:
        predict: Function of the task that converts logits to predictions.
        exact_rows: Maximum number of rows kept in memory (eval.max_exact_rows).
        columns: The task's `group` column, followed by its `item` column if metrics need items.
    """

    def __init__(self, predict: Callable[[torch.Tensor], torch.Tensor], exact_rows: int, columns: Sequence[str]):
        super().__init__(predict, exact_rows, columns)
        self._files: list[IO[bytes]] = []
        # Ranges of each part in the files, as (first row, number of rows).
        self._ranges: list[list[tuple[int, int]]] = [[] for _ in range(DISK_PARTS)]
        self._written = 0

    def groups(self, peers: Peers, device: torch.device) -> Iterator[Groups]:
        """Yield the groups that this rank owns, in parts. A group contains the rows of all ranks.

        Every part requires collective operations, so all ranks must consume the iterator; they yield the same number
        of parts. Rows are sorted on `device`, and discarded when they have been yielded.

        Raises:
            RunError: Another rank has rows on disk, and the rows of this rank cannot be written to temporary files.
        """
        for rows in self._parts(peers):
            logits, labels, weights, keys, *item = peers.send(rows, assign_ranks(rows[3], peers.world))
            predictions = self._predict(logits.to(device).double())
            yield Groups.make(keys.to(device), predictions, *(x.to(device) for x in (labels, weights, *item)))

    def _parts(self, peers: Peers) -> Iterator[list[torch.Tensor]]:
        """Yield this rank's rows in one part, or in DISK_PARTS parts if any rank has rows on disk.

        A group's rows are in the same part on all ranks. This is a collective operation: every rank must call it.
        """
        if peers.max_number(bool(self._files)) == 0:
            yield self._concatenate_rows()
            return
        self._compact()
        for part in range(DISK_PARTS):
            yield self._read(part)
        for file in self._files:
            file.close()

    def _compact(self) -> None:
        """Append the rows in memory to the files, sorted by part."""
        columns = self._concatenate_rows()
        parts = hash_bits(columns[3]) % DISK_PARTS
        order, counts = parts.argsort(stable=True), parts.bincount(minlength=DISK_PARTS).tolist()
        with convert_os_errors("cannot find a folder for the rows of the evaluation", where="TMPDIR"):
            folder = tempfile.gettempdir()
        with convert_os_errors(
            "cannot write the rows of the evaluation",
            where=folder,
            expected=f"a writable folder with disk space for at least {self._written + len(order):,} rows of "
            f"{sum(column.element_size() for column in columns)} bytes",
            do="free disk space, set TMPDIR to another folder, or raise eval.max_exact_rows if memory allows",
        ):
            self._files = self._files or [tempfile.TemporaryFile() for _ in columns]  # noqa: SIM115
            for file, column in zip(self._files, columns, strict=True):
                column[order].numpy().tofile(file)
        for ranges, count in zip(self._ranges, counts, strict=True):
            ranges.append((self._written, count))
            self._written += count

    def _read(self, part: int) -> list[torch.Tensor]:
        columns = []
        for file, empty in zip(self._files, self._empty_rows, strict=True):
            pieces = [empty.numpy()]
            for first, count in self._ranges[part]:
                file.seek(first * empty.element_size())
                pieces.append(np.fromfile(file, pieces[0].dtype, count))
            columns.append(torch.from_numpy(np.concatenate(pieces)))
        return columns


def assign_ranks(keys_N: torch.Tensor, world: int) -> torch.Tensor:
    """Return the rank, from 0 to world - 1, that owns each key, int64 [N]. Hashing spreads distinct keys evenly."""
    return (hash_bits(keys_N) >> 8) % world
