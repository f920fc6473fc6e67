"""Counts, probes and row gradients of what passes through lookups.

Ids are counted at every step where batches come in (sent) and where tables are (received). At a probed step
the ids themselves, the pooled embeddings and both their gradients are kept, too, until the next one.

A row's gradient is Σ over the bags that hold it of w × the bag's gradient (w: 1 without weights); where a
lookup gave each id's vector, every id is such a bag. FBGEMM's kernels apply it in backward without ever
showing it. Here it is computed in plain torch: for given rows (`add_row_gradients`), or for all, as one norm
that no host waits for (`row_gradients_squared`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from raytrec.compat.torchrec_ import (
    ShardedEmbeddingTable,
    gives_each_id,
    replicated_kernels,
    sharded_kernels,
    tables_of,
    watch_distinct_ids,
)


@dataclass(frozen=True)
class Key:
    """One key of a KeyedJaggedTensor.

    Attributes:
        ids: int64 [N]. bag: int64 [N], the bag of each. weights: float32 [N], 1 where there are none.
        lengths: int64 [B].
    """

    ids: torch.Tensor
    bag: torch.Tensor
    weights: torch.Tensor
    lengths: torch.Tensor


Part = tuple[ShardedEmbeddingTable, Key, torch.Tensor]  # a key of a lookup; see `split_lookup`


def each_key(features: KeyedJaggedTensor, count: int) -> Iterator[Key]:
    """Its `count` keys in order, even where a name comes twice."""
    lengths_KB = features.lengths().view(count, -1).long()
    sizes = lengths_KB.sum(1).tolist()
    weights = features.weights_or_none()
    if weights is None:
        weights = torch.ones_like(features.values(), dtype=torch.float32)
    bags = torch.arange(lengths_KB.shape[1], device=lengths_KB.device)
    for lengths, ids, of_ids in zip(
        lengths_KB, features.values().split(sizes), weights.split(sizes), strict=True
    ):
        yield Key(ids, bags.repeat_interleave(lengths, output_size=len(ids)), of_ids, lengths)


def add_row_gradients(out_RD: torch.Tensor, rows_R: torch.Tensor, key: Key, grad_BD: torch.Tensor) -> None:
    """Adds to the gradients of rows what the bags of a key give to them.

    Args:
        out_RD: float32, changed in place.
        rows_R: int64, sorted, each once.
        key: what was looked up; its ids are rows.
        grad_BD: of its bags.
    """
    if len(rows_R):
        hits, at = found(rows_R, key.ids)
        out_RD.index_add_(0, at, grad_BD[key.bag[hits]].float() * key.weights[hits].unsqueeze(1))


def split_lookup(kernel: nn.Module, features: KeyedJaggedTensor, given: torch.Tensor) -> Iterator[Part]:
    """Each key of a lookup: the shard that it looks up, its ids, and its part of what the lookup gave.

    Args:
        kernel: one of `sharded_kernels` or `replicated_kernels`.
        features: the ids that it looked up, for the rows of this rank's shards.
        given: float, what it gave, or the gradient of that: sums of bags [B, Σ columns], or each id's vector
            [N, columns]. Then every id is a bag.
    """
    shards = [table for table in tables_of(kernel) for _ in table.feature_names]
    keys = list(each_key(features, len(shards)))
    if gives_each_id(kernel):
        keys = [each_id(key) for key in keys]
        parts = given.split([len(key.ids) for key in keys])
    else:
        parts = given.split([shard.local_cols for shard in shards], dim=1)
    yield from zip(shards, keys, parts, strict=True)


def each_id(key: Key) -> Key:
    """Bags of one id each, without weights."""
    ones = torch.ones_like(key.ids)
    return Key(key.ids, torch.arange(len(key.ids), device=key.ids.device), ones.float(), ones)


def row_gradients_squared(
    kernel: nn.Module, features: KeyedJaggedTensor, gradient: torch.Tensor
) -> torch.Tensor:
    """Σ of the squared gradient of each table row that a lookup touched: float64 scalar.

    Args:
        kernel, features: as in `split_lookup`. gradient: of what the lookup gave.
    """
    if gives_each_id(kernel):
        return _squared(_apart(kernel, features), gradient)
    total = torch.zeros((), dtype=torch.float64, device=gradient.device)
    grads = dict(zip(features.keys(), gradient.split(kernel.config.embedding_dims(), dim=1), strict=True))
    for table in tables_of(kernel):
        ids, per_id = [], []
        for name in table.feature_names:
            feature = features[name]
            grad_ND = grads[name].repeat_interleave(
                feature.lengths(), dim=0, output_size=len(feature.values())
            )
            weights = feature.weights_or_none()
            per_id.append(grad_ND if weights is None else grad_ND * weights.unsqueeze(1))
            ids.append(feature.values())
        total += _squared(torch.cat(ids), torch.cat(per_id))
    return total


def _apart(kernel: nn.Module, features: KeyedJaggedTensor) -> torch.Tensor:
    """Ids looked up, with those of each table behind those of the tables before it: int64 [N]."""
    ids_N, rows = features.values(), [table.local_rows for table in tables_of(kernel)]
    if len(rows) == 1:
        return ids_N
    firsts = [sum(rows[:i]) for i, table in enumerate(tables_of(kernel)) for _ in table.feature_names]
    lengths_KB = features.lengths().view(len(firsts), -1)
    first_K = torch.tensor(firsts).to(ids_N.device, non_blocking=True)
    return ids_N + first_K.repeat_interleave(lengths_KB.sum(1), output_size=len(ids_N))


def _squared(ids_N: torch.Tensor, grads_ND: torch.Tensor) -> torch.Tensor:
    """Σ over distinct ids of the squared sum of their gradients: float64 scalar."""
    sums_ND = torch.zeros_like(grads_ND).index_add_(0, places_of(ids_N), grads_ND)
    return sums_ND.double().square().sum()


def places_of(ids_N: torch.Tensor) -> torch.Tensor:
    """Of each id, how many smaller ones there are, each counted once: int64 [N].

    The inverse of torch.unique, which makes the host wait for the device to learn how many there are.
    """
    ordered_N, order_N = ids_N.sort()
    first_N = torch.ones_like(ordered_N)
    first_N[1:] = ordered_N[1:] != ordered_N[:-1]
    return torch.empty_like(order_N).scatter_(0, order_N, first_N.cumsum(0) - 1)


def found(rows: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The places of ids that are among (sorted, not empty) rows, and where among them they are."""
    at = torch.searchsorted(rows, ids).clamp(max=len(rows) - 1)
    hits = (rows[at] == ids).nonzero().squeeze(1)
    return hits, at[hits]


@dataclass
class Lookup:
    """One kernel of this rank: FBGEMM's lookup of the shards of some tables.

    Attributes:
        features: its keys' names, in order; a feature that several of its tables' shards read comes again.
        tables: of each key, the table.
        replicated: whether the tables are data-parallel.
        received: int64 [keys], ids looked up in training, since the start.
        ids: of the probed step: the ids that were looked up, as rows of this rank's shards.
        gradient: float [B, Σ columns], of what the lookup gave in the probed step; before clipping. Of one
            that gives each id's vector: [N, columns].
    """

    kernel: nn.Module
    features: list[str]
    tables: list[str]
    replicated: bool
    received: torch.Tensor
    ids: KeyedJaggedTensor | None = None
    gradient: torch.Tensor | None = None

    def gradients(self) -> list[Part]:
        """Of each key in the probed step: the shard that it looked up, its ids, the gradients of its bags."""
        if self.gradient is None or self.ids is None:
            return []
        return list(split_lookup(self.kernel, self.ids, self.gradient))


@dataclass
class Input:
    """What this rank's dense layers were given in the probed step.

    Attributes:
        pooled: feature → float32 [B, dim]; of a sequence that is read id by id [B, L, dim].
        gradient: the same of this rank's loss (tasks/objective.py); before clipping.
        batch: a data.batch.Batch.
    """

    pooled: dict[str, torch.Tensor]
    gradient: dict[str, torch.Tensor]
    batch: Any


class Taps:
    """Hooks on the lookups and on the dense layers of a sharded model.

    Args:
        model: the DistributedModelParallel.
        head: the module that takes (pooled, batch); see worker.step.Head.
        features: the schema's sparse features, in its order.

    Attributes:
        lookups: of this rank.
        sent: int64 [features], ids in this rank's part of the batches, since the start. Where each distinct
            id of a table is sent once, these, under any of the table's features.
        rows: int64 scalar, rows in it that are not padding.
        probing: set it before a step to keep what passes at that step.
        input: of the probed step.
    """

    def __init__(self, model: DistributedModelParallel, head: nn.Module, features: list[str]):
        device = model.device  # the head of mf, for example, has no parameters
        self.features, self.probing = features, False
        self.input: Input | None = None
        self._distinct: dict[tuple[str, ...], tuple[torch.Tensor, torch.Tensor]] = {}
        self.sent = torch.zeros(len(features), dtype=torch.int64, device=device)
        self.rows = torch.zeros((), dtype=torch.int64, device=device)
        self.lookups = [self._tap(kernel, False, device) for kernel in sharded_kernels(model)]
        self.lookups += [self._tap(kernel, True, device) for kernel in replicated_kernels(model)]
        watch_distinct_ids(model, self._count_distinct)
        head.register_forward_pre_hook(self._before_head)

    def forget(self) -> None:
        """Lets go of what the probed step has left."""
        self.probing, self.input = False, None
        for lookup in self.lookups:
            lookup.ids = lookup.gradient = None

    def _tap(self, kernel: nn.Module, replicated: bool, device: torch.device) -> Lookup:
        keys = [(feature, table.name) for table in tables_of(kernel) for feature in table.feature_names]
        features, tables = map(list, zip(*keys, strict=True))
        received = torch.zeros(len(keys), dtype=torch.int64, device=device)
        lookup = Lookup(kernel, features, tables, replicated, received)

        def after(_: nn.Module, inputs: tuple, output: torch.Tensor) -> None:
            if not (kernel.training and torch.is_grad_enabled()):
                return
            offsets = inputs[0].offsets()  # which the lookup has computed
            lookup.received += offsets[:: (len(offsets) - 1) // len(keys)].diff()
            if self.probing:
                lookup.ids, lookup.gradient = inputs[0], None
                output.register_hook(lambda gradient: setattr(lookup, "gradient", gradient))

        kernel.register_forward_hook(after)
        return lookup

    def _before_head(self, head: nn.Module, inputs: tuple) -> None:
        pooled, batch = inputs
        if not head.training:
            return
        # A batch has fewer than 2³¹ ids, as TorchRec's offsets need; sums in int64 take four times as long.
        sent = batch.sparse.lengths().view(len(self.features), -1).sum(1, dtype=torch.int32)
        for places, distinct in self._distinct.values():
            sent.index_copy_(0, places, distinct)
        self.sent += sent
        self.rows += torch.count_nonzero(batch.weights)
        if self.probing:
            self.input = Input({name: values.detach() for name, values in pooled.items()}, {}, batch)
            for name, values in pooled.items():
                values.register_hook(lambda gradient, name=name: self.input.gradient.update({name: gradient}))

    def _count_distinct(self, ids: KeyedJaggedTensor) -> None:
        keys, lengths = tuple(ids.keys()), ids.lengths()
        if keys not in self._distinct:
            places = torch.tensor([self.features.index(key) for key in keys], device=lengths.device)
            self._distinct[keys] = places, places
        distinct = lengths.view(len(keys), -1).sum(1, dtype=torch.int32)
        self._distinct[keys] = self._distinct[keys][0], distinct
