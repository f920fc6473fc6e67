"""Provide a uniform view of sharded tables, independent of sharding type and kernel.

for table in tables(model, optimizer).values():
    values = table.weight.dense(first_only=True)    # rank 0: float [rows, dim]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn
from torchrec.optim.keyed import KeyedOptimizer

from raytrec.common.collectives import get_collective_device
from raytrec.compat.fbgemm import Cache, find_row_caches
from raytrec.compat.torch_ import ShardedTensor, list_local_parts
from raytrec.compat.torchrec_ import iterate_sharded_collections, unwrap_optimizer
from raytrec.embeddings.hashing import VALUES_PER_BLOCK, compute_initial_values
from raytrec.embeddings.mapped import HotRowCache
from raytrec.embeddings.optimizers import TableOptimizer, find_optimizer
from raytrec.embeddings.pooling import find_table_name, find_weight_name


@dataclass(frozen=True)
class Shard:
    """Rectangular part of a table's weights or optimizer state.

    Attributes:
        rank: Rank that holds the shard; for data-parallel tables, which every rank holds whole, this rank.
        rows: Range of table rows.
        columns: Range of table columns.
        values: Live weights or state on the rank that holds the shard; writing to them changes the model.
            Weights are [rows, columns]; state with one value per row is [rows]. None on other ranks, and
            for state that does not exist because the shard is empty.
        cache: Cache of a kernel that keeps some rows on the GPU (fused_uvm_caching) or in memory
            (fused_mmap), or None. The current values of cached rows are in the cache: `read` returns them,
            whereas `values` contains them only after a flush.
    """

    rank: int
    rows: range
    columns: range
    values: torch.Tensor | None
    cache: Cache | HotRowCache | None = None

    def read(self, rows: torch.Tensor | slice) -> torch.Tensor:
        """Return the current values of `rows`, int64 [n] or a slice, relative to the shard's first row.

        `read` and `write` require `values`, i.e. are called on the rank that holds the shard.
        """
        if self.cache is not None:
            if isinstance(rows, slice):
                rows = torch.arange(*rows.indices(len(self.values)), device=self.values.device)
            return self.cache.read(self.values, rows)
        return self.values[rows] if isinstance(rows, slice) else self.values.index_select(0, rows)

    def write(self, rows: torch.Tensor, new: torch.Tensor) -> None:
        """Set the values of `rows`, int64 [n] as in `read`, to `new`, [n, columns] or [n] of any dtype."""
        if self.cache is not None:
            self.cache.write(self.values, rows, new.to(self.values.dtype))
        else:
            self.values.index_copy_(0, rows, new.to(self.values.dtype))


@dataclass(frozen=True)
class ShardedValues:
    """Shards, on all ranks, of a table's weights or of one kind of its optimizer state.

    Attributes:
        shape: Global shape: (rows, dim), or (rows,) for state with one value per row.
        dtype: Dtype of the values.
        shards: All shards in the order of the plan.
        replicated: True if every rank holds the whole table.
        device: Device of this rank's shards; if the rank has no shard, the device of its collectives.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    shards: list[Shard]
    replicated: bool
    device: torch.device

    @property
    def local(self) -> list[Shard]:
        """Shards that this rank holds."""
        return [shard for shard in self.shards if shard.values is not None]

    def dense(self, *, first_only: bool = False) -> torch.Tensor | None:
        """Flush the caches, and return all rows as one new contiguous tensor on `device`.

        This is a collective operation: every rank must call it. Of replicated values, each rank returns its own copy.

        Args:
            first_only: True to return the tensor only on rank 0, and None on the other ranks.
        """
        receives = dist.get_rank() == 0 or not first_only
        for shard in self.local:
            if shard.cache is not None:
                shard.cache.flush()
        out = torch.empty(self.shape, dtype=self.dtype, device=self.device) if receives else None
        for shard in (each for each in self.shards if each.rows):
            piece = self._exchange(shard, first_only)
            if receives:
                part = out[shard.rows.start : shard.rows.stop]
                if part.dim() > 1:
                    part = part[:, shard.columns.start : shard.columns.stop]
                part.copy_(piece)
        return out

    def _exchange(self, shard: Shard, first_only: bool) -> torch.Tensor | None:
        """Send a shard from its rank to all ranks or only to rank 0; return its values on the ranks that have them."""
        rank, piece = dist.get_rank(), None
        if shard.values is not None:
            piece = shard.values.detach().contiguous()
        elif rank == 0 or not first_only:
            size = (len(shard.rows), len(shard.columns))[: len(self.shape)]
            piece = torch.empty(size, dtype=self.dtype, device=self.device)
        if self.replicated:
            return piece
        if not first_only:
            dist.broadcast(piece, src=shard.rank)
        elif shard.rank != 0 and rank == shard.rank:
            dist.send(piece, dst=0)
        elif shard.rank != 0 and rank == 0:
            dist.recv(piece, src=shard.rank)
        return piece


@dataclass(frozen=True)
class Table:
    """Table of a sharded model.

    Attributes:
        name: Name of the table in the schema.
        shape: Global shape, (rows, dim).
        dtype: Dtype of the weights, fixed when the model is sharded.
        sharding: Sharding type (config.tables.Sharding).
        kernel: Compute kernel: fused, dense, fused_uvm, fused_uvm_caching or fused_mmap.
        weight: Shards of the weights.
        optimizer: Optimizer class of the table, or None if `tables` was called without an optimizer.
        state: Kind of optimizer state (TableOptimizer.state) → shards; kinds that torch has not yet created are
            missing. Empty if `tables` was called without an optimizer.
        parameter: TorchRec's weight on this rank, a slice of a larger tensor; None if this rank has no shard.
    """

    name: str
    shape: tuple[int, int]
    dtype: torch.dtype
    sharding: str
    kernel: str
    weight: ShardedValues
    optimizer: type[TableOptimizer] | None
    state: dict[str, ShardedValues]
    parameter: torch.Tensor | None


def tables(model: nn.Module, optimizer: KeyedOptimizer | None = None) -> dict[str, Table]:
    """Return table name → Table for every table of a sharded model.

    Args:
        model: DistributedModelParallel, or any module that contains a sharded collection.
        optimizer: Optimizer from `optim.combine_optimizers`; required for the tables' optimizer state.
    """
    optimizers, live_state, collected = {}, {}, {}
    if optimizer is not None:
        optimizers = {table: find_optimizer(name) for table, name in unwrap_optimizer(optimizer).names.items()}
        live_state = _collect_live_state(optimizer, optimizers)
    for module in iterate_sharded_collections(model):
        live, parameters = module.state_dict(), dict(module.named_parameters())
        cached = find_row_caches(module)
        for name, spec in module.module_sharding_plan.items():
            key = find_weight_name(module, name)
            weight = _collect_weight(live[key], cached.get(name))
            collected[name] = Table(
                name,
                (weight.shape[0], weight.shape[1]),
                weight.dtype,
                spec.sharding_type,
                spec.compute_kernel,
                weight,
                optimizers.get(name),
                _collect_state(weight, optimizers.get(name), live_state.get(name, {})),
                parameters.get(key),
            )
    return collected


def _collect_weight(value: torch.Tensor | ShardedTensor, cache: Cache | HotRowCache | None) -> ShardedValues:
    if not isinstance(value, ShardedTensor):
        value = value.detach().as_subclass(torch.Tensor)
        whole = Shard(dist.get_rank(), range(value.shape[0]), range(value.shape[1]), value)
        return ShardedValues(tuple(value.shape), value.dtype, [whole], True, value.device)
    live = {tuple(s.metadata.shard_offsets): s.tensor.detach() for s in value.local_shards()}
    shards = []
    for part in value.metadata().shards_metadata:
        rank = part.placement.rank()
        values = live.get(tuple(part.shard_offsets)) if rank == dist.get_rank() else None
        (row, column), (rows, columns) = part.shard_offsets, part.shard_sizes
        local = cache if values is not None else None
        shards.append(Shard(rank, range(row, row + rows), range(column, column + columns), values, local))
    device = next((values.device for values in live.values()), None) or get_collective_device()
    return ShardedValues(tuple(value.shape), value.dtype, shards, False, device)


def _collect_state(
    weight: ShardedValues, optimizer: type[TableOptimizer] | None, live: Mapping[str, list[torch.Tensor]]
) -> dict[str, ShardedValues]:
    """Return kind → shards of the optimizer state, divided like the weights; kinds not yet created are omitted."""
    states, has_values = {}, any(shard.values.numel() for shard in weight.local)
    for state_kind in optimizer.state if optimizer else ():
        if has_values and state_kind.kind not in live:
            continue
        values, shards = iter(live.get(state_kind.kind, [])), []
        for shard in weight.shards:
            local_values = next(values, None) if shard.values is not None else None
            cache = None if isinstance(shard.cache, Cache) else shard.cache  # on GPUs, state is not cached
            shards.append(replace(shard, values=local_values, cache=cache))
        shape = weight.shape[:1] if state_kind.value_granularity == "row" else weight.shape
        states[state_kind.kind] = replace(weight, shape=shape, dtype=torch.float32, shards=shards)
    return states


def _collect_live_state(
    optimizer: KeyedOptimizer, optimizers: Mapping[str, type[TableOptimizer]]
) -> dict[str, dict[str, list[torch.Tensor]]]:
    """Return this rank's optimizer state as table → kind → tensors, one per shard in the order of the plan."""
    live: dict[str, dict[str, list[torch.Tensor]]] = {}
    for fqn, states in optimizer.state_dict()["state"].items():
        if (table := find_table_name(fqn)) is None:
            continue
        kinds_of = {name: each.kind for each in optimizers[table].state for name in (each.kind, each.buffer)}
        for name, value in states.items():
            if kind := kinds_of.get(name.rpartition(".")[2]):  # a name used by torch.optim or by FBGEMM
                parts = [part.detach() for part in list_local_parts(value)]
                # TorchRec's row-wise Adagrad stores one value per row as [rows, 1].
                live.setdefault(table, {})[kind] = [
                    part.squeeze(1) if part.shape[1:] == (1,) else part for part in parts
                ]
    return live


def fill_tables(model: nn.Module, seed: int) -> None:
    """Write the initial values of `compute_initial_values` for a seed (run.seed) into this rank's shards of all tables.

    Caches must be empty, because they are not changed.
    """
    for table in tables(model).values():
        for shard in table.weight.local:
            block = max(1, VALUES_PER_BLOCK // max(1, len(shard.columns)))
            for first in range(shard.rows.start, shard.rows.stop, block):
                ids = torch.arange(first, min(first + block, shard.rows.stop), device=shard.values.device)
                offset = first - shard.rows.start
                values = compute_initial_values(seed, table.name, ids, shard.columns, table.shape[0])
                shard.values[offset : offset + len(ids)].copy_(values)
