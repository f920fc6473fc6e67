"""Ranking of all items for each row of an evaluation (eval.retrieval).

The right items of a row are the items that should rank first (eval.retrieval.right_items). The seen items of a row,
which the columns eval.retrieval.seen contain, are excluded from the row's ranking, except right items. A row for
which items are ranked is called a query.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from raytrec.common.collectives import Peers
from raytrec.data.arrow import to_plain_array
from raytrec.data.batch import Batch
from raytrec.data.ids import compute_group_keys, compute_row_keys
from raytrec.metrics.evaluation import choose_ranking_device
from raytrec.metrics.groups import RELEVANCE_THRESHOLD
from raytrec.metrics.selection import RANKING_COUNT_KEYS, RETRIEVAL_PREFIX, Selection

ABSENT = 1 << 62  # rank of a right item that eval.retrieval.items does not contain


class FullRanking:
    """Metrics of the ranking of all items for the rows of one evaluation.

    A row is a query if its label in the first task is positive, its weight in that task is not 0, and it has a right
    item. Call `compute_item_vectors`, then `store_queries` and `add` for each batch, then `figures`.

    Args:
        selection: Metrics of the run, whose settings name the columns to read.
        device: Device of the model.
        cells: Number of scores (queries × items) per block; default: the result of `choose_block_cells`.
    """

    def __init__(self, selection: Selection, device: torch.device, cells: int | None = None):
        self._selection, self._settings = selection, selection.settings.retrieval
        self._task = next(iter(selection.tasks.values()))
        self._peers, self._device, self._cells = Peers(device), device, cells or choose_block_cells(device)
        self._pending: deque[list[torch.Tensor]] = deque()
        self._items: Items | None = None
        self._sums = torch.zeros(len(selection.retrieval_metrics), dtype=torch.float64, device=device)
        self._rows, self._unknown = 0, torch.zeros((), dtype=torch.int64, device=device)
        self._seen, self._own_seen = 0, torch.zeros((), dtype=torch.int64, device=device)

    def compute_item_vectors(self, step: Any, items: Any) -> None:
        """Compute and store the vectors of this rank's part of the items.

        This is a collective operation: every rank must call it before `add`. `step` is the worker.step.Step of a
        retrieval model, and `items` is this rank's Stream of the dataset eval.retrieval.items.
        """
        keys: list[np.ndarray] = []

        def record_keys() -> Iterator[Batch]:
            for batch in items.batches():
                keys.append(compute_group_keys(to_plain_array(batch.reserved[self._settings.item])))
                yield batch

        rows = items.dataset.rows // self._peers.world + 1
        parts, ranking_device = [], None
        for outputs in step.evaluate(record_keys(), "item"):
            vectors = outputs.vectors[outputs.rows > 0]
            row_bytes = 3 * 4 * vectors.shape[1]  # the parts, all vectors, and the sorted vectors
            ranking_device = ranking_device or choose_ranking_device(rows, self._device, row_bytes)
            parts.append(vectors.to(ranking_device))
        all_vectors = torch.cat(parts)
        sorted_keys, order = torch.from_numpy(np.concatenate(keys)).to(all_vectors.device).sort()
        self._items = Items(sorted_keys, all_vectors[order])

    def store_queries(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the batches unchanged, and store their queries for later calls of `add`."""
        for batch in batches:
            self._pending.append(self._extract_queries(batch))
            yield batch

    def _extract_queries(self, batch: Batch) -> list[torch.Tensor]:
        """Return the queries of a batch in host memory.

        Returns:
            [rows, right, lengths, items, seen], all int64: the indices of the rows that are queries [Q], the numbers
            of right items and of seen items of each query [Q], and the keys of all right items [P] and of all seen
            items [S].
        """
        has_weight = batch.weights > 0
        weights = batch.weights if batch.task_weights is None else batch.task_weights[:, 0]
        counted = has_weight & (weights > 0) & (batch.labels[:, self._task.column] > RELEVANCE_THRESHOLD)
        is_query = counted[has_weight].numpy()
        reserved = batch.reserved.filter(is_query)
        right, items = compute_row_keys([reserved[self._settings.right_column]])
        query_of = np.repeat(np.arange(len(right)), right)
        order = np.lexsort((items, query_of))  # removes duplicate items
        query_of, items = query_of[order], items[order]
        is_first = np.append(True, (query_of[1:] != query_of[:-1]) | (items[1:] != items[:-1]))[: len(items)]
        right, items = np.bincount(query_of[is_first], minlength=len(right)), items[is_first]
        lengths, seen = compute_row_keys([reserved[column] for column in self._settings.seen], len(right))
        is_kept = np.repeat(right > 0, lengths)
        arrays = right[right > 0], lengths[right > 0], items, seen[is_kept]
        rows = counted.nonzero().squeeze(1)[torch.from_numpy(right > 0)]
        return [rows, *map(torch.from_numpy, arrays)]

    def add(self, vectors_BD: torch.Tensor) -> None:
        """Rank the right items of each query in the oldest stored batch, update the metrics, and discard the batch.

        This is a collective operation: every rank must call it, with a batch that may contain no query. `vectors_BD`
        contains the query vectors of all rows of the batch, including padding, float32 [B, D].
        """
        own_rows, *arrays = self._pending.popleft()
        query_vectors = vectors_BD[own_rows.to(vectors_BD.device)]
        sizes = self._peers.stack(torch.tensor([len(array) for array in arrays])).tolist()  # of each rank
        rows, _, items, seen = zip(*sizes, strict=True)
        if not sum(rows):
            return
        # On GPUs, the host waits for each exchange of host tensors, so all arrays are exchanged together.
        right, lengths, item_keys, seen_keys = self._peers.join(torch.cat(arrays), sizes)
        order = right.argsort(descending=True, stable=True)  # queries with the most right items come first
        slots = torch.empty_like(order)
        slots[order] = torch.arange(len(order))
        number = torch.arange(sum(items)) - (right.cumsum(0) - right).repeat_interleave(right)
        host_parts = (
            order,
            right[order],
            torch.stack([slots.repeat_interleave(right), number, item_keys]).flatten(),
            torch.stack([slots.repeat_interleave(lengths), seen_keys]).flatten(),
        )
        sizes = [len(part) for part in host_parts]
        order, right_Q, right_3P, seen_2S = torch.cat(host_parts).to(self._items.keys.device).split(sizes)
        active = (right.unsqueeze(1) > torch.arange(int(right.max()))).sum(0).tolist()
        queries_QD = self._peers.concatenate(query_vectors, rows)[order.to(query_vectors.device)]
        ranks_QR = self._compute_ranks(queries_QD, active, right_3P.view(3, -1), seen_2S.view(2, -1))
        right_Q = right_Q.to(ranks_QR.device)
        for number, metric in enumerate(self._selection.retrieval_metrics):
            self._sums[number] += metric.of_ranks(ranks_QR, right_Q).sum()
        self._rows, self._seen = self._rows + len(right), self._seen + sum(seen)
        self._unknown += right_Q.sum() - (ranks_QR < ABSENT).sum()

    def _compute_ranks(
        self, queries_QD: torch.Tensor, active: Sequence[int], right_3P: torch.Tensor, seen_2S: torch.Tensor
    ) -> torch.Tensor:
        """Return the ranks of each query's right items, int64 [Q, R], in ascending order; the best rank is 1.

        This is a collective operation: every rank must call it. Items without a vector and padding have rank ABSENT.
        Among equal scores, right items rank last.

        Args:
            queries_QD: Query vectors of all ranks, in descending order of their numbers of right items.
            active: For each column r, the number of queries with more than r right items, which come first.
            right_3P: Query, index within the query, and key of each right item, int64 [3, P].
            seen_2S: Query and key of each item to exclude, int64 [2, S].
        """
        (of_P, number_P, keys_P), (of_S, keys_S), device = right_3P, seen_2S, queries_QD.device
        position_P, position_S = self._items.find(keys_P), self._items.find(keys_S)
        self._own_seen += (position_S >= 0).sum().to(self._device)
        scores_P = self._items.scores(queries_QD[of_P.to(device)], position_P)
        is_own_P = (position_P >= 0).to(device)
        scores_P, owners_P = self._peers.sum(torch.stack([scores_P.double(), is_own_P.double()]))
        lowest = torch.finfo(torch.float32).min  # score of NaN, which ranks last
        scores_P = torch.where(scores_P.isnan(), lowest, scores_P.float()).masked_fill(owners_P == 0, -torch.inf)
        scores_QR = scores_P.new_full((len(queries_QD), len(active)), -torch.inf)
        scores_QR[of_P.to(device), number_P.to(device)] = scores_P
        scores_QR = scores_QR.sort(dim=1, descending=True).values
        left_out = torch.stack([torch.cat([of_S, of_P]), torch.cat([position_S, position_P])])
        above_QR = self._items.count_above(queries_QD, scores_QR, active, left_out, self._cells)
        offset_R = torch.arange(1, 1 + len(active), device=device)
        return (self._peers.sum(above_QR) + offset_R).masked_fill(scores_QR == -torch.inf, ABSENT)

    def figures(self) -> dict[str, float | None]:
        """Return key → value of each metric (None without queries) and of RANKING_COUNT_KEYS, equal on all ranks.

        This is a collective operation: every rank must call it.
        """
        values: dict[str, float | None] = {
            f"{RETRIEVAL_PREFIX}.{metric.name}": total / self._rows if self._rows else None
            for metric, total in zip(self._selection.retrieval_metrics, self._sums.tolist(), strict=True)
        }
        items, seen = self._peers.sum(torch.tensor([len(self._items.keys), int(self._own_seen)])).tolist()
        counts = self._rows, items, int(self._unknown), self._seen - seen
        return values | dict(zip(RANKING_COUNT_KEYS, counts, strict=True))


DEFAULT_BLOCK_CELLS = 1 << 22  # scores (queries × items) per block, which take 56 MiB while a block is processed
MAX_BLOCK_CELLS = 1 << 28  # maximum on a GPU with enough memory
FREE_BYTES_PER_CELL = 128  # free GPU memory required per cell: four times the actual use
# If float32 leaves more than 1 / UNDECIDED_DIVISOR of a block's comparisons undecided, all use float64.
UNDECIDED_DIVISOR = 8


@dataclass(frozen=True)
class Items:
    """Items whose vectors one rank stores, sorted by key.

    Attributes:
        keys: Item keys (data.ids.compute_group_keys), int64 [N], ascending.
        vectors: Item vectors in the same order, float32 [N, D].
    """

    keys: torch.Tensor
    vectors: torch.Tensor

    def find(self, keys_K: torch.Tensor) -> torch.Tensor:
        """Return the index of each key in `keys`, int64 [K]; -1 for items of other ranks and unknown items."""
        if not len(self.keys):
            return torch.full_like(keys_K, -1)
        places = torch.searchsorted(self.keys, keys_K).clamp(max=len(self.keys) - 1)
        return torch.where(self.keys[places] == keys_K, places, -1)

    def scores(self, queries_QD: torch.Tensor, places_Q: torch.Tensor) -> torch.Tensor:
        """Return the dot product of each query and the item at its index in `keys`, float32 [Q]; 0 for index -1."""
        if not len(self.keys):
            return torch.zeros(len(places_Q), device=queries_QD.device)
        items = self.vectors[places_Q.clamp(min=0)].to(queries_QD.device).double()
        is_own = (places_Q >= 0).to(queries_QD.device)
        return (queries_QD.double() * items).sum(1).float().where(is_own, 0)

    def count_above(
        self,
        queries_QD: torch.Tensor,
        scores_QR: torch.Tensor,
        active: Sequence[int],
        left_out: torch.Tensor,
        cells: int,
    ) -> torch.Tensor:
        """Return the number of this rank's items that score at least as high as each given score, int64 [Q, R].

        The score of an item for a query is their dot product. Items whose score is NaN are counted.

        Args:
            queries_QD: Query vectors.
            scores_QR: Scores of each query to compare with.
            active: Number of queries with a score in each column, which come first; all other results are 0.
            left_out: Query and index in `keys` of each item that is not counted, int64 [2, P]; -1: no item.
            cells: Number of scores (queries × items) per block.
        """
        device, block = queries_QD.device, max(1, cells // max(1, len(queries_QD)))
        left_out = left_out[:, left_out[1].argsort()]
        starts = torch.arange(0, len(self.keys) + block, block, device=left_out.device)
        bounds = torch.searchsorted(left_out[1].contiguous(), starts).tolist()
        above_QR = torch.zeros(scores_QR.shape, dtype=torch.int64, device=device)
        is_exact = torch.get_float32_matmul_precision() == "highest"
        compare = compare_fast if device.type == "cuda" and is_exact else compare_exact
        for number, start in enumerate(range(0, len(self.keys), block)):
            items = self.vectors[start : start + block].to(device)
            queries, positions = left_out[:, bounds[number] : bounds[number + 1]].to(device)
            counted = torch.ones(len(queries_QD), len(items), dtype=torch.bool, device=device)
            counted[queries, positions - start] = False
            above = compare(queries_QD, items, scores_QR, active)
            for column, of_column in enumerate(above):
                above_QR[: active[column], column] += (of_column & counted[: active[column]]).sum(1)
        return above_QR


def choose_block_cells(device: torch.device) -> int:
    """Return the number of scores (queries × items) per block, which depends on the free memory of a GPU."""
    if device.type != "cuda":
        return DEFAULT_BLOCK_CELLS
    return min(MAX_BLOCK_CELLS, max(DEFAULT_BLOCK_CELLS, torch.cuda.mem_get_info(device)[0] // FREE_BYTES_PER_CELL))


def compare_exact(
    queries_QD: torch.Tensor, items_ND: torch.Tensor, scores_QR: torch.Tensor, active: Sequence[int]
) -> Iterator[torch.Tensor]:
    """Yield, for each column of `scores_QR`, a mask of the items whose score is not below it, bool [active, N]."""
    products_QN = (queries_QD.double() @ items_ND.double().T).float()
    for scores_Q, count in zip(scores_QR.unbind(1), active, strict=True):
        yield ~(products_QN[:count] < scores_Q[:count].unsqueeze(1))


def compare_fast(
    queries_QD: torch.Tensor, items_ND: torch.Tensor, scores_QR: torch.Tensor, active: Sequence[int]
) -> Iterator[torch.Tensor]:
    """Yield the masks of `compare_exact`, computing in float64 only where float32 cannot decide.

    Most GPUs compute float64 at 1/32 or 1/64 of the speed of float32. A float32 dot product of D terms has an
    error of at most D · 2⁻²⁴ · ‖query‖ · ‖item‖ in any summation order (N. Higham, Accuracy and Stability of
    Numerical Algorithms, 2002, section 3.1). Rounding a score adds an error of at most 2⁻²⁴ of the score. The limits
    in this function are twice as wide.
    """
    unit = 2.0**-23
    lengths = torch.outer(*(part.double().norm(dim=1).float() for part in (queries_QD, items_ND)))
    lengths.mul_((queries_QD.shape[1] + 2) * unit)
    products_QN = queries_QD @ items_ND.T
    for column, count in enumerate(active):
        targets = scores_QR[:count, column].unsqueeze(1)
        limits, margins = lengths[:count] + (targets.abs() * unit + 1e-30), products_QN[:count] - targets
        above = margins > limits
        unsure = ~(above | (margins < -limits))  # includes NaN
        yield _decide_unsure(queries_QD[:count], items_ND, targets.squeeze(1), above, unsure)


def _decide_unsure(
    queries_QD: torch.Tensor, items_ND: torch.Tensor, scores_Q: torch.Tensor, above: torch.Tensor, unsure: torch.Tensor
) -> torch.Tensor:
    """Return `above` after replacing the entries marked in `unsure` with comparisons in float64, [Q, N]."""
    queries, positions = unsure.nonzero(as_tuple=True)
    if len(queries) * UNDECIDED_DIVISOR > unsure.numel():
        return next(compare_exact(queries_QD, items_ND, scores_Q.unsqueeze(1), [len(scores_Q)]))
    size = max(1, DEFAULT_BLOCK_CELLS // queries_QD.shape[1])
    for part in torch.arange(len(queries), device=queries.device).split(size):
        part_queries, part_positions = queries[part], positions[part]
        exact_scores = (queries_QD[part_queries].double() * items_ND[part_positions].double()).sum(1).float()
        above[part_queries, part_positions] = ~(exact_scores < scores_Q[part_queries])
    return above
