"""Counts and probes of what passes through lookups. Ids are counted at every step, the rest is kept where
asked for.

Ids are counted where batches come in (sent) and where tables are (received). At a probed step the ids
themselves, the pooled embeddings and both their gradients are kept, too, until the next one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from raytrec.compat.torchrec_ import replicated_kernels, sharded_kernels, tables_of, watch_distinct_ids
from raytrec.embeddings.row_gradients import Part, split_lookup


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
