"""Private names of TorchRec (1.8.0): lookups and optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.fx import Proxy
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.batched_embedding_kernel import BaseBatchedEmbedding
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embedding_types import ShardedEmbeddingTable
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.train_pipeline.runtime_forwards import BaseForward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper, OptimizerWrapper
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from raytrec.compat.versions import private


def iterate_sharded_kernels(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the kernels of this rank's shards, one per group of tables that FBGEMM looks up at once.

    Data-parallel tables, which are in a separate DDP module, are not included.
    """
    for lookup in _iterate_lookups(model):
        if not isinstance(lookup, DistributedDataParallel):
            yield from private(lookup, "_emb_modules", "torchrec")


def iterate_replicated_kernels(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the kernels of data-parallel tables, of which every rank holds a complete copy."""
    for lookup in _iterate_lookups(model):
        if isinstance(lookup, DistributedDataParallel):
            yield from private(lookup.module, "_emb_modules", "torchrec")


def _iterate_lookups(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the lookups of each collection, one per sharding type."""
    for module in iterate_sharded_collections(model):
        yield from private(module, "_lookups", "torchrec")


def iterate_sharded_collections(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the sharded collections of tables, with pooled or per-id output."""
    for module in model.modules():
        if isinstance(module, ShardedEmbeddingBagCollection | ShardedEmbeddingCollection):
            yield module


def watch_distinct_ids(model: nn.Module, on_lookup: Callable[[KeyedJaggedTensor], object]) -> None:
    """Call a function at each lookup of a collection that sends only distinct ids (use_index_dedup).

    The function is called once per sharding type, with the ids sent for this type. Ids of a table can be listed under
    any feature that reads the table. A feature is repeated for each column shard.
    """
    for module in iterate_sharded_collections(model):
        if not getattr(module, "_use_index_dedup", False):
            continue

        def look_up(ctx: Any, ids: Any, original: Callable = module.compute_and_output_dist) -> Any:
            for context in ctx.sharding_contexts:
                on_lookup(context.features_before_input_dist)
            return original(ctx, ids)

        module.compute_and_output_dist = look_up


def returns_per_id_vectors(kernel: nn.Module) -> bool:
    """Return True if a kernel returns each id's vector, [N, columns], not sums of bags, [B, Σ columns]."""
    return isinstance(kernel, BaseBatchedEmbedding)


def list_kernel_tables(kernel: nn.Module) -> list[ShardedEmbeddingTable]:
    """Return the table shards that a kernel looks up, in key order; see .name, .feature_names, .local_cols."""
    return private(kernel, "config", "torchrec").embedding_tables


def get_shard_origin(table: ShardedEmbeddingTable) -> tuple[int, int]:
    """Return (first row, first column) of a rank's shard in its table; (0, 0) for a data-parallel table."""
    if not table.local_metadata:
        return 0, 0
    row, column = table.local_metadata.shard_offsets
    return row, column


def is_pipelined(collection: nn.Module, sparse: Any) -> bool:
    """Return True if TorchRec's pipeline is tracing a lookup, or has replaced it to send ids early."""
    return isinstance(sparse, Proxy) or isinstance(collection.forward, BaseForward)


def iterate_wrappers(optimizer: KeyedOptimizer) -> Iterator[KeyedOptimizer]:
    """Yield an optimizer's wrappers (such as GlobalNormClip) from the outermost, then the inner optimizer."""
    yield optimizer
    while isinstance(optimizer, OptimizerWrapper):
        optimizer = private(optimizer, "_optimizer", "torchrec")
        yield optimizer


def unwrap_optimizer(optimizer: KeyedOptimizer) -> KeyedOptimizer:
    """Return the optimizer inside all wrappers."""
    *_, innermost = iterate_wrappers(optimizer)
    return innermost


def iterate_torch_optimizers(optimizer: KeyedOptimizer) -> Iterator[torch.optim.Optimizer]:
    """Yield the torch optimizers of parameters that are not updated in backward."""
    if isinstance(optimizer, CombinedOptimizer):
        for _, part in optimizer.optimizers:
            yield from iterate_torch_optimizers(part)
    elif isinstance(optimizer, KeyedOptimizerWrapper):
        yield private(optimizer, "_optimizer", "torchrec")
