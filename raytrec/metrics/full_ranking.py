"""The ranks of a row's right items among all items (eval.retrieval): of one, or of a list of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from raytrec.common.collectives import Peers
from raytrec.data.arrow import one_array
from raytrec.data.batch import Batch
from raytrec.data.ids import group_keys, keys_of_rows
from raytrec.metrics.evaluation import place_for
from raytrec.metrics.groups import RELEVANT
from raytrec.metrics.selection import RANKING_COUNTS, RETRIEVAL, Selection

ABSENT = 1 << 62  # the rank of a right item that is not among all items


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
        self._rows, self._unknown = 0, torch.zeros((), dtype=torch.int64, device=device)
        self._seen, self._seen_here = 0, torch.zeros((), dtype=torch.int64, device=device)

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
        together = torch.cat(parts)
        rising, order = torch.from_numpy(np.concatenate(keys)).to(together.device).sort()
        self._items = Items(rising, together[order])

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
        right, items = keys_of_rows([reserved[self._settings.right_column]])
        of = np.repeat(np.arange(len(right)), right)
        order = np.lexsort((items, of))  # each item once
        of, items = of[order], items[order]
        first = np.append(True, (of[1:] != of[:-1]) | (items[1:] != items[:-1]))[: len(items)]
        right, items = np.bincount(of[first], minlength=len(right)), items[first]
        lengths, seen = keys_of_rows([reserved[column] for column in self._settings.seen], len(right))
        kept = np.repeat(right > 0, lengths)
        numbers = right[right > 0], items, lengths[right > 0], seen[kept]
        rows = counted.nonzero().squeeze(1)[torch.from_numpy(right > 0)]
        return Queries(rows, *map(torch.from_numpy, numbers))

    def add(self, vectors_BD: torch.Tensor) -> None:
        """Ranks the items of the next batch's rows, given the vectors of all of its rows; a collective."""
        asked = self._coming.popleft()
        mine = vectors_BD[asked.rows.to(vectors_BD.device)]
        counts = torch.tensor([len(asked.rows), len(asked.items), len(asked.seen)])
        rows, items, seen = self._peers.stack(counts).T.tolist()
        if not sum(rows):
            return
        together = self._peers.concatenate
        right, lengths = together(torch.stack([asked.right, asked.lengths], 1), rows).unbind(1)
        order = right.argsort(descending=True, stable=True)  # those with most right items come first
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order))
        number = torch.arange(sum(items)) - (right.cumsum(0) - right).repeat_interleave(right)
        host = (
            order,
            right[order],
            torch.stack([place.repeat_interleave(right), number, together(asked.items, items)]).flatten(),
            torch.stack([place.repeat_interleave(lengths), together(asked.seen, seen)]).flatten(),
        )
        sizes = [len(part) for part in host]
        order, right_Q, right_3P, seen_2S = torch.cat(host).to(self._items.keys.device).split(sizes)
        active = (right.unsqueeze(1) > torch.arange(int(right.max()))).sum(0).tolist()
        queries_QD = together(mine, rows)[order.to(mine.device)]
        ranks_QR = self._ranks(queries_QD, active, right_3P.view(3, -1), seen_2S.view(2, -1))
        right_Q = right_Q.to(ranks_QR.device)
        for number, metric in enumerate(self._selection.of_ranking):
            self._sums[number] += metric.of_ranks(ranks_QR, right_Q).sum()
        self._rows, self._seen = self._rows + len(right), self._seen + sum(seen)
        self._unknown += right_Q.sum() - (ranks_QR < ABSENT).sum()

    def _ranks(
        self, queries_QD: torch.Tensor, active: Sequence[int], right_3P: torch.Tensor, seen_2S: torch.Tensor
    ) -> torch.Tensor:
        """The ranks of each query's right items: int64 [Q, R], from 1, rising; ABSENT where there is none. A
        collective.

        Args:
            active: of each of the R, how many queries have so many right items, the first ones.
            right_3P: queries, which of their right items it is, and keys, int64 [3, P].
            seen_2S: queries and keys of items that are left out, int64 [2, S].
        """
        (of_P, number_P, keys_P), (of_S, keys_S), place = right_3P, seen_2S, queries_QD.device
        own_P, place_S = self._items.find(keys_P), self._items.find(keys_S)
        self._seen_here += (place_S >= 0).sum().to(self._device)
        scores_P = self._items.scores(queries_QD[of_P.to(place)], own_P)
        here_P = (own_P >= 0).to(place)
        scores_P, known_P = self._peers.sum(torch.stack([scores_P.double(), here_P.double()]))
        least = torch.finfo(torch.float32).min  # of what is not a number, which comes last
        scores_P = torch.where(scores_P.isnan(), least, scores_P.float()).masked_fill(
            known_P == 0, -torch.inf
        )
        scores_QR = scores_P.new_full((len(queries_QD), len(active)), -torch.inf)
        scores_QR[of_P.to(place), number_P.to(place)] = scores_P
        scores_QR = scores_QR.sort(dim=1, descending=True).values
        left_out = torch.stack([torch.cat([of_S, of_P]), torch.cat([place_S, own_P])])
        above_QR = self._items.count_above(queries_QD, scores_QR, active, left_out, self._cells)
        before_R = torch.arange(1, 1 + len(active), device=place)
        return (self._peers.sum(above_QR) + before_R).masked_fill(scores_QR == -torch.inf, ABSENT)

    def figures(self) -> dict[str, float | None]:
        """Its figures, by their keys; None where no row counted. The same on all ranks."""
        found: dict[str, float | None] = {
            f"{RETRIEVAL}.{metric.name}": total / self._rows if self._rows else None
            for metric, total in zip(self._selection.of_ranking, self._sums.tolist(), strict=True)
        }
        here = torch.tensor([len(self._items.keys), int(self._seen_here)])
        items, seen = self._peers.sum(here).tolist()
        counts = self._rows, items, int(self._unknown), self._seen - seen
        return found | dict(zip(RANKING_COUNTS, counts, strict=True))


@dataclass(frozen=True)
class Queries:
    """The rows of a batch that ask, on the host.

    Attributes:
        rows: their places in the batch, int64 [Q].
        right: how many right items each has, int64 [Q]. items: their keys, query after query, int64 [P].
        lengths: how many items each has seen, int64 [Q]. seen: their keys, query after query, int64 [S].
    """

    rows: torch.Tensor
    right: torch.Tensor
    items: torch.Tensor
    lengths: torch.Tensor
    seen: torch.Tensor


CELLS = 1 << 22  # queries × items of a block: 56 MiB while it is counted
MOST_CELLS = 1 << 28  # the same on a GPU, if it has so much memory
BYTES = 128  # of a GPU's free memory for each of them: four times what it takes
UNSURE = 8  # where more than this part of a block is not decided in float32, all of it is in float64


@dataclass(frozen=True)
class Items:
    """The items of one rank, by their keys.

    Attributes:
        keys: int64 [N], rising. vectors: float32 [N, D], in their order.
    """

    keys: torch.Tensor
    vectors: torch.Tensor

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
        self,
        queries_QD: torch.Tensor,
        scores_QR: torch.Tensor,
        active: Sequence[int],
        left_out: torch.Tensor,
        cells: int,
    ) -> torch.Tensor:
        """How many items have a score that is not below each given one, int64 [Q, R]; NaN is below nothing.

        Args:
            active: of each of the R, how many queries have it, the first ones; 0 for the others.
            left_out: [2, P], queries and places of items that do not count for them; -1: of none.
            cells: queries × items that are held at a time.
        """
        device, block = queries_QD.device, max(1, cells // max(1, len(queries_QD)))
        left_out = left_out[:, left_out[1].argsort()]
        starts = torch.arange(0, len(self.keys) + block, block, device=left_out.device)
        bounds = torch.searchsorted(left_out[1].contiguous(), starts).tolist()
        above_QR = torch.zeros(scores_QR.shape, dtype=torch.int64, device=device)
        is_exact = torch.get_float32_matmul_precision() == "highest"
        compare = not_below_fast if device.type == "cuda" and is_exact else not_below
        for number, start in enumerate(range(0, len(self.keys), block)):
            items = self.vectors[start : start + block].to(device)
            of, places = left_out[:, bounds[number] : bounds[number + 1]].to(device)
            counted = torch.ones(len(queries_QD), len(items), dtype=torch.bool, device=device)
            counted[of, places - start] = False
            above = compare(queries_QD, items, scores_QR, active)
            for place, of_place in enumerate(above):
                above_QR[: active[place], place] += (of_place & counted[: active[place]]).sum(1)
        return above_QR


def cells_for(device: torch.device) -> int:
    """How many queries × items a block has."""
    if device.type != "cuda":
        return CELLS
    return min(MOST_CELLS, max(CELLS, torch.cuda.mem_get_info(device)[0] // BYTES))


def not_below(
    queries_QD: torch.Tensor, items_ND: torch.Tensor, scores_QR: torch.Tensor, active: Sequence[int]
) -> Iterator[torch.Tensor]:
    """Of each of the R, where an item's score is not below the given one: bool [active, N]."""
    products_QN = (queries_QD.double() @ items_ND.double().T).float()
    for scores_Q, count in zip(scores_QR.unbind(1), active, strict=True):
        yield ~(products_QN[:count] < scores_Q[:count].unsqueeze(1))


def not_below_fast(
    queries_QD: torch.Tensor, items_ND: torch.Tensor, scores_QR: torch.Tensor, active: Sequence[int]
) -> Iterator[torch.Tensor]:
    """The same, by products in float32, and in float64 only where these do not decide: most GPUs have a 32nd
    or a 64th of the speed in float64.

    A product of D terms in float32 is off by at most D · 2⁻²⁴ · ‖query‖ · ‖item‖, in whatever order they are
    added (Higham 2002, 3.1), and the rounding of a score by 2⁻²⁴ of it. The limits here are twice as wide.
    """
    unit = 2.0**-23
    lengths = torch.outer(*(part.double().norm(dim=1).float() for part in (queries_QD, items_ND)))
    lengths.mul_((queries_QD.shape[1] + 2) * unit)
    products_QN = queries_QD @ items_ND.T
    for place, count in enumerate(active):
        given = scores_QR[:count, place].unsqueeze(1)
        limits, beyond = lengths[:count] + (given.abs() * unit + 1e-30), products_QN[:count] - given
        above = beyond > limits
        unsure = ~(above | (beyond < -limits))  # NaN, too
        yield _decided(queries_QD[:count], items_ND, given.squeeze(1), above, unsure)


def _decided(
    queries_QD: torch.Tensor,
    items_ND: torch.Tensor,
    scores_Q: torch.Tensor,
    above: torch.Tensor,
    unsure: torch.Tensor,
) -> torch.Tensor:
    """What is above, where it is unsure by products in float64."""
    of, places = unsure.nonzero(as_tuple=True)
    if len(of) * UNSURE > unsure.numel():
        return next(not_below(queries_QD, items_ND, scores_Q.unsqueeze(1), [len(scores_Q)]))
    for part in torch.arange(len(of), device=of.device).split(max(1, CELLS // queries_QD.shape[1])):
        of_part, place = of[part], places[part]
        exactly = (queries_QD[of_part].double() * items_ND[place].double()).sum(1).float()
        above[of_part, place] = ~(exactly < scores_Q[of_part])
    return above
