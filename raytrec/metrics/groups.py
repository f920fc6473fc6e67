"""Whole groups of rows, brought together from all ranks."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import IO

import numpy as np
import torch

from raytrec.common.collectives import Peers
from raytrec.common.errors import os_errors
from raytrec.embeddings.hashing import hash_bits
from raytrec.metrics.ranked import Counted, starts_of_runs

RELEVANT = 0.5  # a label above it is positive
DISK_PARTS = 64  # into which rows on disk are divided by their keys


@dataclass(frozen=True)
class Groups:
    """The rows of G whole groups: group after group, the highest prediction of each first; of rows with equal
    predictions, the lowest label first, so that no order among ties makes a figure better than it is.

    Attributes:
        of: the group of each row, int64 [N], from 0 to G - 1.
        count: G.
        predictions, labels, weights: float64 [N]; weights are above 0.
        items: int64 [N]; None where the task has no column `item`.
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
        """Of rows in any order, among which each group is whole.

        Args:
            keys_N: int64; rows with the same key are a group. A prediction that is NaN makes the figures NaN.
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
        """The sum over the rows of each group, float64 [G]."""
        return self.weights.new_zeros(self.count).index_add_(0, self.of, values_N.double())

    @cached_property
    def sizes(self) -> torch.Tensor:
        """Rows of each group, float64 [G]."""
        return self.add(torch.ones_like(self.weights))

    @cached_property
    def ranks(self) -> torch.Tensor:
        """Each row's place in its group, int64 [N], from 1."""
        starts = self.sizes.cumsum(0) - self.sizes
        return torch.arange(len(self.of), device=self.of.device) - starts.long()[self.of] + 1

    @cached_property
    def relevant(self) -> torch.Tensor:
        """Whether each row's label is positive, bool [N]."""
        return self.labels > RELEVANT

    @cached_property
    def positives(self) -> torch.Tensor:
        """Positive rows of each group, float64 [G]."""
        return self.add(self.relevant)

    def best_first(self, values_N: torch.Tensor) -> torch.Tensor:
        """Values of rows, the greatest of each group first."""
        order = values_N.argsort(descending=True)
        return values_N[order[self.of[order].argsort(stable=True)]]

    def auc(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `auc_of_groups` of these, rows by their weights."""
        positive, negative = self.weights * self.relevant, self.weights * ~self.relevant
        return auc_of_groups(self.of, self.count, self.predictions, positive, negative)


def auc_of_groups(
    of_N: torch.Tensor,
    count: int,
    predictions_N: torch.Tensor,
    positive_N: torch.Tensor,
    negative_N: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(the AUC of each group, ties counted half, float64 [G]; which groups have positive and negative rows,
    bool [G]).

    Args:
        of_N, count, predictions_N: as in Groups, group after group, the highest prediction of each first.
        positive_N, negative_N: float64, the weights of each row's positive and negative part.
    """

    def add(values_N: torch.Tensor) -> torch.Tensor:
        return values_N.new_zeros(count).index_add_(0, of_N, values_N)

    tie = starts_of_runs(of_N, predictions_N).cumsum(0) - 1  # rows with equal predictions of one group
    ties = len(tie) and int(tie[-1]) + 1
    tied_negative = negative_N.new_zeros(ties).index_add_(0, tie, negative_N)
    all_positive, all_negative = add(positive_N), add(negative_N)
    before = all_negative.cumsum(0) - all_negative  # of the groups before each
    above = tied_negative.cumsum(0)[tie] - before[of_N]  # or equal, in the group
    below = all_negative[of_N] - above
    pairs = add(positive_N * (below + tied_negative[tie] / 2))
    both = (all_positive > 0) & (all_negative > 0)
    return pairs / (all_positive * all_negative).masked_fill(~both, 1), both


class GroupRows:
    """Rows of one task on this rank, until all ranks exchange them for whole groups.

    A row is 20 bytes, or 28 with its item. Beyond `exact_rows` rows, all are appended to files, one for each
    column, in the folder for temporary files; the files have no names and are gone with the process.

    Args:
        predict: Function from logits to predictions, of the task.
        exact_rows: Rows that are kept in memory, eval.max_exact_rows.
        columns: The task's column `group` and, if metrics need it, `item`.
    """

    def __init__(
        self, predict: Callable[[torch.Tensor], torch.Tensor], exact_rows: int, columns: Sequence[str]
    ):
        self._predict, self._columns, self._most = predict, columns, exact_rows
        key, value = torch.empty(0, dtype=torch.int64), torch.empty(0)
        self._none = [key, value, value, value, *[key] * (len(columns) - 1)]
        self._begin()

    def _begin(self) -> None:
        """Keep nothing."""
        self._pieces: list[Sequence[torch.Tensor]] = [self._none]
        self._files: list[IO[bytes]] = []
        # Of the rows of each part in the files: first, how many.
        self._ranges: list[list[tuple[int, int]]] = [[] for _ in range(DISK_PARTS)]
        self._rows = self._written = 0

    def add(self, rows: Counted) -> None:
        """Add rows, in host memory."""
        group, *item = (rows.keys[name] for name in self._columns)
        self._pieces.append([group, rows.logits, rows.labels, rows.weights, *item])
        self._rows += len(group)
        if self._rows > self._most:
            self._write()

    def groups(self, peers: Peers, place: torch.device) -> Iterator[Groups]:
        """All groups, each whole on one rank, in as many parts as all ranks have; a collective for each.

        Args:
            place: the device that rows are sorted on.
        """
        for rows in self._parts(peers):
            keys, logits, labels, weights, *item = peers.send(rows, rank_of(rows[0], peers.world))
            predictions = self._predict(logits.to(place).double())
            yield Groups.make(keys.to(place), predictions, *(x.to(place) for x in (labels, weights, *item)))

    def _parts(self, peers: Peers) -> Iterator[list[torch.Tensor]]:
        """Yield this rank's rows in one part, or in DISK_PARTS if a rank has rows on disk.

        Rows of a group are in the same part on all ranks. A collective, after which nothing is kept.
        """
        if peers.largest(bool(self._files)) > 0:
            self._write()
            for part in range(DISK_PARTS):
                yield self._read(part)
            for file in self._files:
                file.close()
        else:
            yield self._joined()
        self._begin()

    def _joined(self) -> list[torch.Tensor]:
        return [torch.cat(pieces) for pieces in zip(*self._pieces, strict=True)]

    def _write(self) -> None:
        """Appends what is in memory to the files, part after part."""
        columns = self._joined()
        parts = hash_bits(columns[0]) % DISK_PARTS
        order, counts = parts.argsort(stable=True), parts.bincount(minlength=DISK_PARTS).tolist()
        with os_errors(
            "rows of the evaluation cannot be written",
            where=tempfile.gettempdir(),
            expected=f"room for {self._written + len(order):,} rows and more",
            do="make room, set TMPDIR to another folder, or raise eval.max_exact_rows if memory allows",
        ):
            self._files = self._files or [tempfile.TemporaryFile() for _ in columns]  # noqa: SIM115
            for file, column in zip(self._files, columns, strict=True):
                column[order].numpy().tofile(file)
        for ranges, count in zip(self._ranges, counts, strict=True):
            ranges.append((self._written, count))
            self._written += count
        self._pieces, self._rows = [self._none], 0

    def _read(self, part: int) -> list[torch.Tensor]:
        found = []
        for file, none in zip(self._files, self._none, strict=True):
            pieces = [none.numpy()]
            for first, count in self._ranges[part]:
                file.seek(first * none.element_size())
                pieces.append(np.fromfile(file, pieces[0].dtype, count))
            found.append(torch.from_numpy(np.concatenate(pieces)))
        return found


def rank_of(keys_N: torch.Tensor, world: int) -> torch.Tensor:
    """The rank that owns each key, int64 [N]: evenly spread, whatever the keys have in common."""
    return (hash_bits(keys_N) >> 8) % world
