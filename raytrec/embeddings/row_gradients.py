"""Gradients of touched table rows, from those of bags.

A row's gradient is Σ over the bags that hold it of w × the bag's gradient (w: 1 without weights); where a
lookup gave each id's vector, every id is such a bag. FBGEMM's kernels apply it in backward without ever
showing it. Here it is computed in plain torch: for given rows (`add_row_gradients`), or for all, as one norm
that no host waits for (`row_gradients_squared`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from raytrec.compat.torchrec_ import ShardedEmbeddingTable, gives_each_id, tables_of


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
