"""Count the ids of lookups, record the values of probed steps, and compute the gradients of table rows.

At every training step, each rank counts the ids in the batches that it reads (`Taps.sent`) and the ids that it looks
up (`Lookup.received`). A step is probed if `Taps.is_probing` is set before it. At a probed step, ids, pooled
embeddings, and the gradients of lookups and dense inputs are also kept, until `Taps.forget` is called.

A bag is the list of ids of one feature in one row of a batch; in a lookup that returns one vector per id, every id
is a bag. The gradient of a table row is Σ over the bags that contain the row of w × the bag's gradient (w = 1 if
unweighted). FBGEMM's kernels apply this gradient in backward without exposing it. This module computes it in plain
torch: for given rows (`add_row_gradients`), or as the sum of squares over all rows (`sum_squared_row_gradients`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from raytrec.common.collectives import to_device_tensor
from raytrec.compat.torchrec_ import (
    ShardedEmbeddingTable,
    iterate_replicated_kernels,
    iterate_sharded_kernels,
    list_kernel_tables,
    returns_per_id_vectors,
    watch_distinct_ids,
)


@dataclass(frozen=True)
class KeyLookups:
    """Ids, weights and bags of one key of a KeyedJaggedTensor.

    Attributes:
        ids: Ids, int64 [N].
        bag: Index of the bag that contains each id, int64 [N].
        weights: Weights of the ids, float32 [N]; 1 if unweighted.
        lengths: Lengths of the bags, int64 [B].
    """

    ids: torch.Tensor
    bag: torch.Tensor
    weights: torch.Tensor
    lengths: torch.Tensor


Part = tuple[ShardedEmbeddingTable, KeyLookups, torch.Tensor]  # element of the result of `Lookup.gradients`


def iterate_keys(features: KeyedJaggedTensor, count: int) -> Iterator[KeyLookups]:
    """Yield the ids and bags of each key of a KeyedJaggedTensor with `count` keys, whose names may repeat.

    For tensors on a GPU, the host waits for the lengths.
    """
    lengths_KB = features.lengths().view(count, -1).long()
    sizes = lengths_KB.sum(1).tolist()
    weights = features.weights_or_none()
    if weights is None:
        weights = torch.ones_like(features.values(), dtype=torch.float32)
    bags = torch.arange(lengths_KB.shape[1], device=lengths_KB.device)
    for lengths, ids, id_weights in zip(lengths_KB, features.values().split(sizes), weights.split(sizes), strict=True):
        yield KeyLookups(ids, bags.repeat_interleave(lengths, output_size=len(ids)), id_weights, lengths)


def collect_table_ids(kernel: nn.Module, features: KeyedJaggedTensor) -> dict[str, torch.Tensor]:
    """Return table → ids in the input of a kernel, int [n], which are rows of this rank's shards."""
    names = [table.name for table in list_kernel_tables(kernel) for _ in table.feature_names]
    ids: dict[str, list[torch.Tensor]] = {name: [] for name in names}
    for name, part in zip(names, features.values().split(features.length_per_key()), strict=True):
        ids[name].append(part)
    return {name: torch.cat(parts) for name, parts in ids.items()}


def add_row_gradients(out_RD: torch.Tensor, rows_R: torch.Tensor, key: KeyLookups, grad_BD: torch.Tensor) -> None:
    """Add the contributions of a key's bags to the gradients of rows.

    Args:
        out_RD: Gradients of the rows, float32 [R, D], changed in place.
        rows_R: Row numbers, int64 [R], sorted and distinct.
        key: Key that was looked up, whose ids are row numbers.
        grad_BD: Gradient of each of the key's bags, [B, D].
    """
    if len(rows_R):
        hits, places = match_ids(rows_R, key.ids)
        out_RD.index_add_(0, places, grad_BD[key.bag[hits]].float() * key.weights[hits].unsqueeze(1))


def split_bags(key: KeyLookups) -> KeyLookups:
    """Return a copy of a key in which each id is a separate bag with weight 1."""
    ones = torch.ones_like(key.ids)
    return KeyLookups(key.ids, torch.arange(len(key.ids), device=key.ids.device), ones.float(), ones)


def sum_squared_row_gradients(kernel: nn.Module, features: KeyedJaggedTensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return the sum of squared gradients over all table rows that a kernel looked up, a float64 scalar.

    Args:
        kernel: A module of `iterate_sharded_kernels`.
        features: Looked-up ids, as rows of this rank's shards.
        gradient: Gradient of the lookup's output, as in `Lookup`.
    """
    if returns_per_id_vectors(kernel):
        return _sum_squared_gradients(offset_ids(kernel, features), gradient)
    total = torch.zeros((), dtype=torch.float64, device=gradient.device)
    grads = dict(zip(features.keys(), gradient.split(kernel.config.embedding_dims(), dim=1), strict=True))
    for table in list_kernel_tables(kernel):
        ids, per_id = [], []
        for name in table.feature_names:
            feature = features[name]
            grad_ND = grads[name].repeat_interleave(feature.lengths(), dim=0, output_size=len(feature.values()))
            weights = feature.weights_or_none()
            per_id.append(grad_ND if weights is None else grad_ND * weights.unsqueeze(1))
            ids.append(feature.values())
        total += _sum_squared_gradients(torch.cat(ids), torch.cat(per_id))
    return total


def offset_ids(kernel: nn.Module, features: KeyedJaggedTensor) -> torch.Tensor:
    """Return the ids that a kernel looked up, numbered consecutively over the local rows of all its tables, [N]."""
    ids_N, rows = features.values(), [table.local_rows for table in list_kernel_tables(kernel)]
    if len(rows) == 1:
        return ids_N
    firsts = [sum(rows[:i]) for i, table in enumerate(list_kernel_tables(kernel)) for _ in table.feature_names]
    lengths_KB = features.lengths().view(len(firsts), -1)
    first_K = to_device_tensor(firsts, ids_N.device)
    return ids_N + first_K.repeat_interleave(lengths_KB.sum(1), output_size=len(ids_N))


def _sum_squared_gradients(ids_N: torch.Tensor, grads_ND: torch.Tensor) -> torch.Tensor:
    """Return the sum over distinct ids of ‖sum of the id's gradients‖², a float64 scalar."""
    sums_ND = torch.zeros_like(grads_ND).index_add_(0, rank_distinct_ids(ids_N), grads_ND)
    return sums_ND.double().square().sum()


def rank_distinct_ids(ids_N: torch.Tensor) -> torch.Tensor:
    """Return, for each id, the number of distinct smaller ids, int64 [N].

    The result equals the inverse indices of torch.unique, but the host does not wait for the device to report
    the number of distinct ids.
    """
    ordered_N, order_N = ids_N.sort()
    first_N = torch.ones_like(ordered_N)
    first_N[1:] = ordered_N[1:] != ordered_N[:-1]
    return torch.empty_like(order_N).scatter_(0, order_N, first_N.cumsum(0) - 1)


def match_ids(rows: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the index into `ids` and the index into `rows` (sorted, not empty) of each id that is in `rows`."""
    places = torch.searchsorted(rows, ids).clamp(max=len(rows) - 1)
    hits = (rows[places] == ids).nonzero().squeeze(1)
    return hits, places[hits]


@dataclass
class Lookup:
    """Kernel with which FBGEMM looks up this rank's shards of some tables.

    Attributes:
        kernel: Module of the lookup.
        features: Feature of each key, in order; a feature that reads several shards of the kernel is repeated.
        tables: Table of each key.
        replicated: True if the tables are data-parallel.
        received: Number of ids looked up for each key in training since the start, int64 [keys].
        ids: Ids looked up in the probed step, as rows of this rank's shards; None without a probed step.
        gradient: Gradient of the output in the probed step, before clipping: float [B, Σ columns], or [N,
            columns] if the lookup returns one vector per id; None without a probed step.
    """

    kernel: nn.Module
    features: list[str]
    tables: list[str]
    replicated: bool
    received: torch.Tensor
    ids: KeyedJaggedTensor | None = None
    gradient: torch.Tensor | None = None

    def gradients(self) -> list[Part]:
        """Return (shard, ids, gradient of each bag [bags, columns]) for each key; [] until backward of a probed step.

        If the lookup returns one vector per id, every id is a bag.
        """
        if self.gradient is None or self.ids is None:
            return []
        shards = [table for table in list_kernel_tables(self.kernel) for _ in table.feature_names]
        keys = list(iterate_keys(self.ids, len(shards)))
        if returns_per_id_vectors(self.kernel):
            keys = [split_bags(key) for key in keys]
            parts = self.gradient.split([len(key.ids) for key in keys])
        else:
            parts = self.gradient.split([shard.local_cols for shard in shards], dim=1)
        return list(zip(shards, keys, parts, strict=True))


@dataclass
class Input:
    """Inputs of this rank's dense layers in the probed step.

    Attributes:
        pooled: Embeddings by feature, as in PooledEmbeddings.forward.
        gradient: Gradients of this rank's loss (tasks/objective.py) with respect to `pooled`, before clipping.
        batch: Batch of the probed step (data.batch.Batch).
    """

    pooled: dict[str, torch.Tensor]
    gradient: dict[str, torch.Tensor]
    batch: Any


class Taps:
    """Hooks on the lookups and on the dense layers of a sharded model.

    Args:
        model: DistributedModelParallel.
        head: Dense layers: a module called with (pooled, batch); see worker.step.Head.
        features: Sparse features in the schema's order.

    Attributes:
        lookups: Lookups of this rank.
        sent: Number of ids of each feature in this rank's training batches since the start, int64 [features]. If each
            distinct id of a table is sent once, only distinct ids are counted, each under one of the table's features.
        rows: Number of rows in these batches, without padding and skipped rows, int64 scalar.
        is_probing: Set to True before a step to keep that step's values.
        input: Inputs of the dense layers in the probed step; None without a probed step.
    """

    def __init__(self, model: DistributedModelParallel, head: nn.Module, features: list[str]):
        device = model.device  # some heads, such as that of mf, have no parameters
        self.features, self.is_probing = features, False
        self.input: Input | None = None
        self._distinct: dict[tuple[str, ...], tuple[torch.Tensor, torch.Tensor]] = {}
        self.sent = torch.zeros(len(features), dtype=torch.int64, device=device)
        self.rows = torch.zeros((), dtype=torch.int64, device=device)
        self.lookups = [self._hook_lookup(kernel, False, device) for kernel in iterate_sharded_kernels(model)]
        self.lookups += [self._hook_lookup(kernel, True, device) for kernel in iterate_replicated_kernels(model)]
        watch_distinct_ids(model, self._count_distinct)
        head.register_forward_pre_hook(self._before_head)

    def forget(self) -> None:
        """Discard the values of the probed step, and stop probing; the counts are kept."""
        self.is_probing, self.input = False, None
        for lookup in self.lookups:
            lookup.ids = lookup.gradient = None

    def _hook_lookup(self, kernel: nn.Module, replicated: bool, device: torch.device) -> Lookup:
        keys = [(feature, table.name) for table in list_kernel_tables(kernel) for feature in table.feature_names]
        features, tables = map(list, zip(*keys, strict=True))
        received = torch.zeros(len(keys), dtype=torch.int64, device=device)
        lookup = Lookup(kernel, features, tables, replicated, received)

        def record(_: nn.Module, inputs: tuple, output: torch.Tensor) -> None:
            if not (kernel.training and torch.is_grad_enabled()):
                return
            offsets = inputs[0].offsets()  # already computed by the lookup
            lookup.received += offsets[:: (len(offsets) - 1) // len(keys)].diff()
            if self.is_probing:
                lookup.ids, lookup.gradient = inputs[0], None
                output.register_hook(lambda gradient: setattr(lookup, "gradient", gradient))

        kernel.register_forward_hook(record)
        return lookup

    def _before_head(self, head: nn.Module, inputs: tuple) -> None:
        pooled, batch = inputs
        if not head.training:
            return
        # TorchRec's offsets limit a batch to fewer than 2³¹ ids. Sums in int64 take four times as long.
        sent = batch.sparse.lengths().view(len(self.features), -1).sum(1, dtype=torch.int32)
        for places, distinct in self._distinct.values():
            sent.index_copy_(0, places, distinct)
        self.sent += sent
        self.rows += torch.count_nonzero(batch.weights)
        if self.is_probing:
            self.input = Input({name: values.detach() for name, values in pooled.items()}, {}, batch)
            for name, values in pooled.items():
                values.register_hook(lambda gradient, name=name: self.input.gradient.update({name: gradient}))

    def _count_distinct(self, ids: KeyedJaggedTensor) -> None:
        keys, lengths = tuple(ids.keys()), ids.lengths()
        places, _ = self._distinct.get(keys, (None, None))
        if places is None:
            places = torch.tensor([self.features.index(key) for key in keys], device=lengths.device)
        self._distinct[keys] = places, lengths.view(len(keys), -1).sum(1, dtype=torch.int32)
