"""The kernels that look sharded tables up, inside a DistributedModelParallel."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import nn
from torch.nn.parallel import DistributedDataParallel
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


def has_cache(kernel: nn.Module) -> bool:
    """Whether a kernel keeps rows on the device that lie in host memory (fused_uvm_caching on a GPU)."""
    cache = getattr(kernel.emb_module, "lxu_cache_weights", None)
    return cache is not None and cache.numel() > 0


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
        fused = isinstance(lookup, SplitTableBatchedEmbeddingBagsCodegen)
        if fused and not lookup.weights_host.numel():
            lookup.weights_host = torch.zeros(lookup.max_D, dtype=lookup.weights_host.dtype)
