"""The kernels that look sharded tables up, inside a DistributedModelParallel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embedding_types import ShardedEmbeddingTable
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection


def sharded_kernels(model: nn.Module) -> Iterator[nn.Module]:
    """TorchRec's lookups of this rank's shards, one for each group of tables that FBGEMM looks up at once
    (data-parallel tables are behind a DDP of their own, and not among them)."""
    for module in model.modules():
        if isinstance(module, ShardedEmbeddingBagCollection):
            for lookup in module._lookups:  # torchrec 1.8.0: one for each way of sharding
                if not isinstance(lookup, DistributedDataParallel):
                    yield from lookup._emb_modules


def replicated_kernels(model: nn.Module) -> Iterator[nn.Module]:
    """The lookups of data-parallel tables, which every rank holds whole."""
    for module in model.modules():
        if isinstance(module, ShardedEmbeddingBagCollection):
            for lookup in module._lookups:
                if isinstance(lookup, DistributedDataParallel):
                    yield from lookup.module._emb_modules


def fbgemm_of(kernel: nn.Module) -> SplitTableBatchedEmbeddingBagsCodegen | None:
    """FBGEMM's lookup of tables that are updated in backward; None for dense kernels."""
    lookup = kernel.emb_module
    return lookup if isinstance(lookup, SplitTableBatchedEmbeddingBagsCodegen) else None


def has_cache(kernel: nn.Module) -> bool:
    """Whether a kernel keeps rows on the device that lie in host memory (fused_uvm_caching on a GPU)."""
    lookup = fbgemm_of(kernel)
    return lookup is not None and lookup.lxu_cache_weights.numel() > 0  # fbgemm-gpu 1.8.0


@dataclass(frozen=True)
class Cache:
    """The rows of a table's shard that a kernel keeps on the device: newer than those in host memory.

    The cache has no dirty bits: writing it back copies all of it, a part of the table's size, over PCIe. A
    few rows are therefore read through it instead.

    Attributes:
        kernel: TorchRec's, which also caches other tables.
        first: number of the shard's first row among all rows of the kernel that may be cached.
    """

    kernel: nn.Module
    first: int

    def flush(self) -> None:
        """Writes all cached rows of the kernel back to host memory; they stay cached."""
        self.kernel.flush()

    def purge(self) -> None:
        """Forgets all cached rows of the kernel without writing them back."""
        self.kernel.purge()

    def read(self, values: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The current values of some rows; no synchronization with the host.

        Args:
            values: [rows of the shard, columns], in host memory that the device can read.
            rows: int64 [n].

        Returns:
            [n, columns], of the dtype of `values`.
        """
        if not len(rows):
            return values[:0].clone()
        lookup = self.kernel.emb_module
        filling = (
            lookup.prefetch_stream
        )  # fbgemm-gpu 1.8.0: brings the next batch's rows in; None: nobody does
        if filling is not None:
            torch.cuda.current_stream().wait_stream(filling)
        # fbgemm-gpu 1.8.0: of each row its place in lxu_cache_weights, or -1. lxu_cache_state is
        # [sets, 32], the numbers of the rows that are cached; of a cached row the first `columns` are used.
        slots_N = torch.ops.fbgemm.lxu_cache_lookup((rows + self.first).long(), lookup.lxu_cache_state).long()
        stored_NC = values.index_select(0, rows)
        cached_NC = lookup.lxu_cache_weights[slots_N.clamp(min=0), : values.shape[1]]
        current_NC = torch.where((slots_N >= 0).unsqueeze(1), cached_NC.to(values.dtype), stored_NC)
        if filling is not None:
            filling.wait_stream(torch.cuda.current_stream())
        return current_NC


def caches(model: nn.Module) -> dict[str, Cache]:
    """Table → the cache of this rank's shard of it, where its kernel has one."""
    found = {}
    for kernel in sharded_kernels(model):
        if not has_cache(kernel):
            continue
        # fbgemm-gpu 1.8.0: a number for each feature, -1 for tables that are not cached, and the total.
        first_of_feature = kernel.emb_module.cache_hash_size_cumsum.tolist()
        features = 0
        for table in kernel.config.embedding_tables:
            if first_of_feature[features] >= 0:
                found[table.name] = Cache(kernel, first_of_feature[features])
            features += len(table.feature_names)
    return found


def cache_hits(kernel: nn.Module) -> float | None:
    """The share of distinct rows that were in a kernel's cache, since the last call; None without a cache, or
    where it does not count (gather_uvm_cache_stats), or when nothing was looked up."""
    lookup = fbgemm_of(kernel)
    if lookup is None or not lookup.gather_uvm_cache_stats:
        return None
    # fbgemm-gpu 1.8.0: calls, ids, distinct ids, distinct misses, …
    _, _, distinct, misses, *_ = lookup.get_uvm_cache_stats(use_local_cache=False).tolist()
    lookup.reset_uvm_cache_stats()
    return 1 - misses / distinct if distinct else None


def updates_made(kernel: nn.Module) -> int:
    """How many updates the kernel of fused Adam has counted (it counts every forward, evaluation's, too).

    Raises:
        AttributeError: the kernel's optimizer counts nothing, or is not fused.
    """
    return int(kernel.emb_module.iter.item())


def set_updates_made(kernel: nn.Module, count: int) -> None:
    """Lets the kernel of fused Adam go on from this count of updates."""
    kernel.emb_module.set_optimizer_step(count)
    # fbgemm-gpu 1.8.0 computes with `iter_cpu`, and looks at `iter` only while that is 0.
    kernel.emb_module.iter_cpu.fill_(count)


def shard_origin(table: ShardedEmbeddingTable) -> tuple[int, int]:
    """The first row and column of a rank's shard in the table: (0, 0) for a data-parallel table."""
    return tuple(table.local_metadata.shard_offsets) if table.local_metadata else (0, 0)


def pad_empty_shards(model: nn.Module) -> None:
    """Lets kernels run on a rank where tables have no row (row-wise, fewer rows than ranks).

    FBGEMM (1.8.0) on CPU takes a fused kernel without any weights for one on a GPU, and fails; and behind an
    empty last table its backward reads beyond hash_size_cumsum. Both go away with a last row that belongs to
    no table and that no id reaches.
    """
    for kernel in sharded_kernels(model):
        lookup = kernel.emb_module
        if lookup.hash_size_cumsum.device.type != "cpu":
            continue
        if lookup.hash_size_cumsum[-1] == lookup.hash_size_cumsum[-2]:
            lookup.hash_size_cumsum[-1] += 1
        if fbgemm_of(kernel) is not None and not lookup.weights_host.numel():
            lookup.weights_host = torch.zeros(lookup.max_D, dtype=lookup.weights_host.dtype)
