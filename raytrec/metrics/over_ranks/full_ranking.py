"""The rank of a row's item among all items (eval.retrieval).

The items' vectors are computed once an evaluation and stay on the rank that computed them. A batch's queries
go to all ranks; each compares them with its own items, block by block, and the counts are added up. So no
rank has all items, and queries × items are never in memory at once.

A score is the dot product of two float32 vectors, summed up in float64 and rounded to float32: equal vectors
have equal scores, in whichever block they are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from raytrec.common.collectives import Peers
from raytrec.data.arrow import one_array, unnest
from raytrec.data.batch import Batch
from raytrec.data.hashing import group_keys
from raytrec.metrics.over_ranks.evaluation import place_for
from raytrec.metrics.over_ranks.groups import RELEVANT
from raytrec.metrics.selection import RANKED_ITEMS, RANKED_ROWS, RETRIEVAL, UNKNOWN_ITEMS, Selection

CELLS = 1 << 22  # queries × items of a block: 56 MiB while it is counted
MOST_CELLS = 1 << 28  # the same on a GPU, if it has so much memory
BYTES = 128  # of a GPU's free memory for each of them: four times what it takes
UNSURE = 8  # where more than this part of a block is not decided in float32, all of it is in float64


class FullRanking:
    """The ranking of one evaluation.

    Rows count whose label in the first task is positive, and whose weight there is not 0.

    Args:
        selection: of the run; its settings name the columns that are read.
        device: that the model is on.
        cells: see CELLS; default: on a GPU by its free memory.
    """

    def __init__(self, selection: Selection, device: torch.device, cells: int | None = None):
        self._selection, self._settings = selection, selection.settings.retrieval
        self._task = next(iter(selection.tasks.values()))
        self._peers, self._device, self._cells = Peers(device), device, cells or cells_for(device)
        self._coming: deque[Queries] = deque()
        self._items: Items | None = None
        self._sums = torch.zeros(len(selection.of_ranking), dtype=torch.float64, device=device)
        self._rows, self._known = 0, torch.zeros((), dtype=torch.int64, device=device)

    def take_items(self, step: Any, items: Any) -> None:
        """Computes the vectors of all items; a collective.

        Args:
            step: worker.step.Step, of a model that retrieves. items: the Stream of eval.retrieval.items.
        """
        keys: list[np.ndarray] = []

        def noted() -> Iterator[Batch]:
            for batch in items.batches():
                keys.append(group_keys(one_array(batch.reserved[self._settings.item])))
                yield batch

        rows = items.dataset.rows // self._peers.world + 1
        parts, place = [], None
        for outputs in step.evaluate(noted(), "item"):
            vectors = outputs.vectors[outputs.rows > 0]
            place = place or place_for(rows, self._device, 4 * vectors.shape[1])
            parts.append(vectors.to(place))
        self._items = Items.make(torch.from_numpy(np.concatenate(keys)), torch.cat(parts))

    def note(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The same batches; what they ask for is kept until their vectors come."""
        for batch in batches:
            self._coming.append(self._queries(batch))
            yield batch

    def _queries(self, batch: Batch) -> Queries:
        there = batch.weights > 0
        weights = batch.weights if batch.task_weights is None else batch.task_weights[:, 0]
        counted = there & (weights > 0) & (batch.labels[:, self._task.column] > RELEVANT)
        asked = counted[there].numpy()
        reserved = batch.reserved.filter(asked)
        items = group_keys(one_array(reserved[self._settings.item]))
        of, seen = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for column in self._settings.seen:
            offsets, values = unnest(one_array(reserved[column]))
            of.append(np.repeat(np.arange(len(items)), np.diff(offsets)))
            seen.append(group_keys(values))
        order = np.argsort(np.concatenate(of), kind="stable")
        lengths = np.bincount(np.concatenate(of), minlength=len(items))
        found = (torch.from_numpy(part) for part in (items, lengths, np.concatenate(seen)[order]))
        return Queries(counted.nonzero().squeeze(1), *found)

    def add(self, vectors_BD: torch.Tensor) -> None:
        """Ranks the items of the next batch's rows, given the vectors of all of its rows; a collective."""
        asked = self._coming.popleft()
        mine = vectors_BD[asked.rows.to(vectors_BD.device)]
        rows, seen = self._peers.stack(torch.tensor([len(asked.items), len(asked.seen)])).T.tolist()
        if not sum(rows):
            return
        together = self._peers.concatenate
        items, lengths = together(torch.stack([asked.items, asked.lengths], 1), rows).unbind(1)
        of = torch.arange(len(items)).repeat_interleave(lengths)
        ranks_Q, known_Q = self._ranks(together(mine, rows), items, of, together(asked.seen, seen))
        for place, metric in enumerate(self._selection.of_ranking):
            self._sums[place] += (metric.of_ranks(ranks_Q) * known_Q).sum()
        self._rows += len(items)
        self._known += known_Q.sum()

    def _ranks(self, queries_QD: torch.Tensor, *asked: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(ranks int64 [Q], from 1; which of the items there are bool [Q]); a collective."""
        keys_Q, of_S, seen_S = (part.to(self._items.keys.device) for part in asked)
        own_Q, place_S = self._items.find(keys_Q), self._items.find(seen_S)
        scores_Q = self._items.scores(queries_QD, own_Q)
        here_Q = (own_Q >= 0).to(scores_Q.device)
        scores_Q, known_Q = self._peers.sum(torch.stack([scores_Q.double(), here_Q.double()]))
        scores_Q, known_Q = scores_Q.float(), known_Q > 0
        number = torch.arange(len(keys_Q), device=own_Q.device)
        left_out = torch.stack([torch.cat([of_S, number]), torch.cat([place_S, own_Q])])
        above_Q = self._items.count_above(queries_QD, scores_Q, left_out, self._cells)
        return 1 + self._peers.sum(above_Q), known_Q

    def figures(self) -> dict[str, float | None]:
        """Its figures, by their keys; None where no row counted. The same on all ranks."""
        found: dict[str, float | None] = {
            f"{RETRIEVAL}.{metric.name}": total / self._rows if self._rows else None
            for metric, total in zip(self._selection.of_ranking, self._sums.tolist(), strict=True)
        }
        counts = {
            RANKED_ROWS: self._rows,
            RANKED_ITEMS: int(self._peers.sum(torch.tensor([len(self._items.keys)]))),
            UNKNOWN_ITEMS: self._rows - int(self._known),
        }
        return found | counts


@dataclass(frozen=True)
class Queries:
    """The rows of a batch that ask, on the host.

    Attributes:
        rows: their places in the batch, int64 [Q]. items: keys of their items, int64 [Q].
        lengths: how many items each has seen, int64 [Q]. seen: their keys, query after query, int64 [S].
    """

    rows: torch.Tensor
    items: torch.Tensor
    lengths: torch.Tensor
    seen: torch.Tensor


@dataclass(frozen=True)
class Items:
    """The items of one rank, by their keys.

    Attributes:
        keys: int64 [N], rising. vectors: float32 [N, D], in their order.
    """

    keys: torch.Tensor
    vectors: torch.Tensor

    @classmethod
    def make(cls, keys_N: torch.Tensor, vectors_ND: torch.Tensor) -> Items:
        """Of items in any order."""
        keys, order = keys_N.to(vectors_ND.device).sort()
        return cls(keys, vectors_ND[order])

    def find(self, keys_K: torch.Tensor) -> torch.Tensor:
        """The places of keys, int64 [K]; -1 where this rank has no such item."""
        if not len(self.keys):
            return torch.full_like(keys_K, -1)
        places = torch.searchsorted(self.keys, keys_K).clamp(max=len(self.keys) - 1)
        return torch.where(self.keys[places] == keys_K, places, -1)

    def scores(self, queries_QD: torch.Tensor, places_Q: torch.Tensor) -> torch.Tensor:
        """The score of an item for each query, float32 [Q]; 0 where the place is -1."""
        if not len(self.keys):
            return torch.zeros(len(places_Q), device=queries_QD.device)
        items = self.vectors[places_Q.clamp(min=0)].to(queries_QD.device).double()
        here = (places_Q >= 0).to(queries_QD.device)
        return (queries_QD.double() * items).sum(1).float().where(here, 0)

    def count_above(
        self, queries_QD: torch.Tensor, scores_Q: torch.Tensor, left_out: torch.Tensor, cells: int
    ) -> torch.Tensor:
        """How many items have a score that is not below the given one, int64 [Q]; NaN is below nothing.

        Args:
            left_out: [2, P], queries and places of items that do not count for them; -1: of none.
            cells: queries × items that are held at a time.
        """
        device, block = queries_QD.device, max(1, cells // max(1, len(queries_QD)))
        left_out = left_out[:, left_out[1].argsort()]
        starts = torch.arange(0, len(self.keys) + block, block, device=left_out.device)
        bounds = torch.searchsorted(left_out[1].contiguous(), starts).tolist()
        above_Q = torch.zeros(len(queries_QD), dtype=torch.int64, device=device)
        compare = not_below_fast if device.type == "cuda" else not_below
        for number, start in enumerate(range(0, len(self.keys), block)):
            items = self.vectors[start : start + block].to(device)
            above = compare(queries_QD, items, scores_Q)
            of, places = left_out[:, bounds[number] : bounds[number + 1]].to(device)
            above[of, places - start] = False
            above_Q += above.sum(1)
        return above_Q


def cells_for(device: torch.device) -> int:
    """How many queries × items a block has."""
    if device.type != "cuda":
        return CELLS
    return min(MOST_CELLS, max(CELLS, torch.cuda.mem_get_info(device)[0] // BYTES))


def not_below(queries_QD: torch.Tensor, items_ND: torch.Tensor, scores_Q: torch.Tensor) -> torch.Tensor:
    """Where an item's score is not below the given one, bool [Q, N]."""
    return ~((queries_QD.double() @ items_ND.double().T).float() < scores_Q.unsqueeze(1))


def not_below_fast(queries_QD: torch.Tensor, items_ND: torch.Tensor, scores_Q: torch.Tensor) -> torch.Tensor:
    """The same, by products in float32, and in float64 only where these do not decide: most GPUs have a 32nd
    or a 64th of the speed in float64.

    A product of D terms in float32 is off by at most D · 2⁻²⁴ · ‖query‖ · ‖item‖, in whatever order they are
    added (Higham 2002, 3.1), and the rounding of a score by 2⁻²⁴ of it. The limits here are twice as wide.
    """
    if torch.get_float32_matmul_precision() != "highest":
        return not_below(queries_QD, items_ND, scores_Q)
    given, unit = scores_Q.unsqueeze(1), 2.0**-23
    lengths = torch.outer(*(part.double().norm(dim=1).float() for part in (queries_QD, items_ND)))
    limits = lengths.mul_((queries_QD.shape[1] + 2) * unit).add_(given.abs() * unit + 1e-30)
    beyond = (queries_QD @ items_ND.T).sub_(given)
    above = beyond > limits
    unsure = ~(above | (beyond < -limits))  # NaN, too
    of, places = unsure.nonzero(as_tuple=True)
    if len(of) * UNSURE > unsure.numel():
        return not_below(queries_QD, items_ND, scores_Q)
    for part in torch.arange(len(of), device=of.device).split(max(1, CELLS // queries_QD.shape[1])):
        of_part, place = of[part], places[part]
        exactly = (queries_QD[of_part].double() * items_ND[place].double()).sum(1).float()
        above[of_part, place] = ~(exactly < scores_Q[of_part])
    return above


def ranking_of(selection: Selection, device: torch.device, step: Any, items: Any) -> FullRanking | None:
    """The ranking of an evaluation that begins, with the items' vectors; a collective. None without items."""
    if items is None:
        return None
    ranking = FullRanking(selection, device)
    ranking.take_items(step, items)
    return ranking
