"""Private names of FBGEMM (1.8.0): its lookups' caches, counters and buffers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import nn

from raytrec.compat.torchrec_ import sharded_kernels, tables_of
from raytrec.compat.versions import private

# Of a fused kernel with a cache: its hits are counted, and rows locked until their batch has been trained.
CACHED = {"gather_uvm_cache_stats": True, "prefetch_pipeline": True}


class InMemory(Protocol):
    """Rows of a table in a file that are in memory, too: see embeddings.mapped.HotRows."""

    def look_up(self, rows: torch.Tensor, *, trains: bool) -> torch.Tensor: ...
    def share_found(self) -> float | None: ...
    def flush(self) -> None: ...
    def purge(self) -> None: ...
    def read(self, values: torch.Tensor, rows: torch.Tensor) -> torch.Tensor: ...
    def write(self, values: torch.Tensor, rows: torch.Tensor, new: torch.Tensor) -> None: ...


def in_memory_of(kernel: nn.Module) -> InMemory | None:
    """The rows in memory of a kernel's only table, where that is in a file."""
    return getattr(fbgemm_of(kernel), "in_memory", None)


def fbgemm_of(kernel: nn.Module) -> SplitTableBatchedEmbeddingBagsCodegen | None:
    """FBGEMM's lookup of tables that are updated in backward; None for dense kernels."""
    lookup = private(kernel, "emb_module", "torchrec")
    return lookup if isinstance(lookup, SplitTableBatchedEmbeddingBagsCodegen) else None


def has_cache(kernel: nn.Module) -> bool:
    """Whether a kernel keeps on the device rows of host memory (fused_uvm_caching on a GPU)."""
    lookup = fbgemm_of(kernel)
    return lookup is not None and _of(lookup, "lxu_cache_weights").numel() > 0


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
        private(self.kernel, "flush", "torchrec")()

    def purge(self) -> None:
        """Forgets all cached rows of the kernel without writing them back."""
        private(self.kernel, "purge", "torchrec")()

    def write(self, values: torch.Tensor, rows: torch.Tensor, new: torch.Tensor) -> None:
        """Replaces the values of some rows.

        Args:
            values, rows: as in `read`. new: [n, columns], of the dtype of `values`.
        """
        self.flush()
        values.index_copy_(0, rows, new)
        self.purge()

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
        filling = _of(lookup, "prefetch_stream")  # brings the next batch's rows in; None: they are not
        if filling is not None:
            torch.cuda.current_stream().wait_stream(filling)
        # Of each row its place in lxu_cache_weights, or -1. lxu_cache_state is [sets, 32], the numbers of the
        # rows that are cached; of a cached row the first `columns` are used.
        cached, numbers = _of(lookup, "lxu_cache_weights"), _of(lookup, "lxu_cache_state")
        slots_N = torch.ops.fbgemm.lxu_cache_lookup((rows + self.first).long(), numbers).long()
        stored_NC = values.index_select(0, rows)
        cached_NC = cached[slots_N.clamp(min=0), : values.shape[1]]
        current_NC = torch.where((slots_N >= 0).unsqueeze(1), cached_NC.to(values.dtype), stored_NC)
        if filling is not None:
            filling.wait_stream(torch.cuda.current_stream())
        return current_NC


def caches(model: nn.Module) -> dict[str, Cache | InMemory]:
    """Table → the cache of this rank's shard of it, or its rows in memory, where its kernel has any."""
    found: dict[str, Cache | InMemory] = {}
    for kernel in sharded_kernels(model):
        if (rows := in_memory_of(kernel)) is not None:
            found[tables_of(kernel)[0].name] = rows
        if not has_cache(kernel):
            continue
        # A number for each feature, -1 for tables that are not cached, and the total.
        first_of_feature = _of(kernel.emb_module, "cache_hash_size_cumsum").tolist()
        features = 0
        for table in tables_of(kernel):
            if first_of_feature[features] >= 0:
                found[table.name] = Cache(kernel, first_of_feature[features])
            features += len(table.feature_names)
    return found


def cache_hits(kernel: nn.Module) -> float | None:
    """The share of distinct rows that were in a kernel's cache, since the last call; None without a cache, or
    where it does not count (gather_uvm_cache_stats), or when nothing was looked up. Of rows in memory of a
    table in a file: the share of lookups that they had."""
    lookup = fbgemm_of(kernel)
    if (rows := in_memory_of(kernel)) is not None:
        return rows.share_found()
    if lookup is None or not _of(lookup, "gather_uvm_cache_stats"):
        return None
    # Calls, ids, distinct ids, distinct misses, …
    _, _, distinct, misses, *_ = _of(lookup, "get_uvm_cache_stats")(use_local_cache=False).tolist()
    lookup.reset_uvm_cache_stats()
    return 1 - misses / distinct if distinct else None


def updates_made(kernel: nn.Module) -> int:
    """How many updates the kernel of fused Adam has counted (it counts every forward, evaluation's, too).

    Raises:
        RunError: the kernel's optimizer counts nothing, or is not fused.
    """
    return int(_of(kernel.emb_module, "iter").item())


def set_updates_made(kernel: nn.Module, count: int) -> None:
    """Lets the kernel of fused Adam continue from this count of updates."""
    _of(kernel.emb_module, "set_optimizer_step")(count)
    # FBGEMM computes with `iter_cpu`, and looks at `iter` only while that is 0.
    _of(kernel.emb_module, "iter_cpu").fill_(count)


@contextmanager
def updates_uncounted(model: nn.Module) -> Iterator[None]:
    """A block whose lookups do not train.

    FBGEMM counts every lookup of a fused kernel as an update, also without gradients. Its Adam corrects its
    bias by that count, which is saved, too: evaluating would change what is trained after.
    """
    fused = [lookup for kernel in sharded_kernels(model) if (lookup := fbgemm_of(kernel)) is not None]
    counters = [_of(lookup, name) for lookup in fused for name in ("iter", "iter_cpu")]
    before = [counter.clone() for counter in counters]
    try:
        yield
    finally:
        for counter, count in zip(counters, before, strict=True):
            counter.copy_(count)


def pad_empty_shards(model: nn.Module) -> None:
    """Lets kernels run on a rank where tables have no row (row-wise, fewer rows than ranks).

    FBGEMM on CPU takes a fused kernel without any weights for one on a GPU, and fails; and behind an empty
    last table its backward reads beyond hash_size_cumsum. Both go away with a last row that belongs to no
    table and that no id reaches.
    """
    for kernel in sharded_kernels(model):
        lookup = kernel.emb_module
        ends = _of(lookup, "hash_size_cumsum")
        if ends.device.type != "cpu":
            continue
        if ends[-1] == ends[-2]:
            ends[-1] += 1
        if fbgemm_of(kernel) is not None and not _of(lookup, "weights_host").numel():
            lookup.weights_host = torch.zeros(_of(lookup, "max_D"), dtype=lookup.weights_host.dtype)


def _of(lookup: Any, name: str) -> Any:
    """An attribute of FBGEMM's that it documents nowhere.

    Raises:
        RunError: it has no such attribute.
    """
    return private(lookup, name, "fbgemm-gpu")
