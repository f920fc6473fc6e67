"""Private names of FBGEMM (1.8.0): caches, counters and buffers of lookups."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import nn

from raytrec.compat.torchrec_ import iterate_sharded_kernels, list_kernel_tables
from raytrec.compat.versions import private

# Settings of a fused kernel with a cache: count hits, and lock a batch's rows in the cache until its step ends.
CACHE_SETTINGS = {"gather_uvm_cache_stats": True, "prefetch_pipeline": True}


def find_resident_rows(kernel: nn.Module) -> Any:
    """Return the embeddings.mapped.HotRowCache that keeps rows of a kernel's table in memory, or None.

    Only kernels of tables in files can have such a cache.
    """
    return getattr(find_fused_lookup(kernel), "resident_rows", None)


def find_fused_lookup(kernel: nn.Module) -> SplitTableBatchedEmbeddingBagsCodegen | None:
    """Return a kernel's FBGEMM lookup that updates its tables in backward; None for dense kernels."""
    lookup = private(kernel, "emb_module", "torchrec")
    return lookup if isinstance(lookup, SplitTableBatchedEmbeddingBagsCodegen) else None


def has_cache(kernel: nn.Module) -> bool:
    """Return True if a kernel caches rows of host memory on the device (fused_uvm_caching on a GPU)."""
    lookup = find_fused_lookup(kernel)
    return lookup is not None and _get_undocumented(lookup, "lxu_cache_weights").numel() > 0


@dataclass(frozen=True)
class Cache:
    """Cache of a table shard's rows on the device; cached rows can be newer than the rows in host memory.

    The cache has no dirty bits. Writing back would copy the whole cache, a share of the table's size, over PCIe.
    A few rows are therefore read through the cache instead.

    Attributes:
        kernel: TorchRec's kernel, which may also cache other tables.
        first: Index of the shard's first row among all cacheable rows of the kernel.
    """

    kernel: nn.Module
    first: int

    def flush(self) -> None:
        """Write all cached rows of the kernel back to host memory; the rows stay cached."""
        private(self.kernel, "flush", "torchrec")()

    def purge(self) -> None:
        """Discard all cached rows of the kernel without writing them back."""
        private(self.kernel, "purge", "torchrec")()

    def write(self, values: torch.Tensor, rows: torch.Tensor, new: torch.Tensor) -> None:
        """Replace the values of some rows in host memory; the cached rows are first written back, and then discarded.

        Args:
            values: Table shard, as in `read`; changed in place.
            rows: Row indices, int64 [n].
            new: New values, [n, columns], of the dtype of `values`.
        """
        self.flush()
        values.index_copy_(0, rows, new)
        self.purge()

    def read(self, values: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return the current values of some rows, from the cache or host memory; the host does not wait for the GPU.

        Args:
            values: Table shard, [rows, columns], in host memory that the device can read.
            rows: Row indices, int64 [n].

        Returns:
            Current values, [n, columns], of the dtype of `values`.
        """
        if not len(rows):
            return values[:0].clone()
        lookup = self.kernel.emb_module
        # Stream that prefetches rows; None without prefetching.
        prefetch_stream = _get_undocumented(lookup, "prefetch_stream")
        if prefetch_stream is not None:
            torch.cuda.current_stream().wait_stream(prefetch_stream)
        # slots_N contains the position of each row in lxu_cache_weights, or -1. lxu_cache_state, [sets, 32],
        # contains the indices of cached rows. Only the first `columns` values of a cached row are used.
        cache_weights = _get_undocumented(lookup, "lxu_cache_weights")
        cache_state = _get_undocumented(lookup, "lxu_cache_state")
        slots_N = torch.ops.fbgemm.lxu_cache_lookup((rows + self.first).long(), cache_state).long()
        stored_NC = values.index_select(0, rows)
        cached_NC = cache_weights[slots_N.clamp(min=0), : values.shape[1]]
        current_NC = torch.where((slots_N >= 0).unsqueeze(1), cached_NC.to(values.dtype), stored_NC)
        if prefetch_stream is not None:
            prefetch_stream.wait_stream(torch.cuda.current_stream())
        return current_NC


def find_row_caches(model: nn.Module) -> dict[str, Any]:
    """Return table → Cache or HotRowCache of this rank's shard, for the tables that have either."""
    caches_by_table: dict[str, Any] = {}
    for kernel in iterate_sharded_kernels(model):
        if (rows := find_resident_rows(kernel)) is not None:
            caches_by_table[list_kernel_tables(kernel)[0].name] = rows
        if not has_cache(kernel):
            continue
        # The list contains one number per feature (-1 for tables that are not cached), then the total.
        first_of_feature = _get_undocumented(kernel.emb_module, "cache_hash_size_cumsum").tolist()
        feature = 0
        for table in list_kernel_tables(kernel):
            if first_of_feature[feature] >= 0:
                caches_by_table[table.name] = Cache(kernel, first_of_feature[feature])
            feature += len(table.feature_names)
    return caches_by_table


def measure_cache_hits(kernel: nn.Module) -> float | None:
    """Return the share (0 to 1) of distinct rows found in a kernel's cache since the last call; reset the counts.

    The result is None without a cache, without counting (gather_uvm_cache_stats), or without lookups. For a
    table in a file, the result is the share of training lookups that found their row in memory. If the kernel is
    on a GPU, the host waits for it.
    """
    lookup = find_fused_lookup(kernel)
    if (rows := find_resident_rows(kernel)) is not None:
        return rows.take_hit_share()
    if lookup is None or not _get_undocumented(lookup, "gather_uvm_cache_stats"):
        return None
    # Calls, ids, distinct ids, distinct misses, …
    _, _, distinct, misses, *_ = _get_undocumented(lookup, "get_uvm_cache_stats")(use_local_cache=False).tolist()
    lookup.reset_uvm_cache_stats()
    return 1 - misses / distinct if distinct else None


def get_update_count(kernel: nn.Module) -> int:
    """Return the number of updates counted by a fused Adam kernel; 0 if the optimizer does not count updates.

    Lookups in evaluation also count, except within `exclude_from_update_counts`.

    Raises:
        RunError: The kernel is not fused.
    """
    return int(_get_undocumented(kernel.emb_module, "iter").item())


def set_update_count(kernel: nn.Module, count: int) -> None:
    """Set the number of updates counted by a fused Adam kernel; raise RunError as `get_update_count` does."""
    _get_undocumented(kernel.emb_module, "set_optimizer_step")(count)
    # FBGEMM computes with `iter_cpu`, and reads `iter` only while `iter_cpu` is 0.
    _get_undocumented(kernel.emb_module, "iter_cpu").fill_(count)


@contextmanager
def exclude_from_update_counts(model: nn.Module) -> Iterator[None]:
    """Exclude lookups in the block from the update counts of fused kernels.

    With Adam and other optimizers that count updates, FBGEMM counts every lookup of a fused kernel as an update,
    even without gradients. Adam uses this count for bias correction, and the count is saved. Without this block,
    evaluation would change later training.
    """
    fused = [lookup for kernel in iterate_sharded_kernels(model) if (lookup := find_fused_lookup(kernel)) is not None]
    counters = [_get_undocumented(lookup, name) for lookup in fused for name in ("iter", "iter_cpu")]
    saved_counts = [counter.clone() for counter in counters]
    try:
        yield
    finally:
        for counter, count in zip(counters, saved_counts, strict=True):
            counter.copy_(count)


def pad_empty_shards(model: nn.Module) -> None:
    """Pad CPU kernels whose last table has no rows on this rank, as can happen if a small table is sharded row-wise.

    FBGEMM on a CPU treats a fused kernel without weights as a GPU kernel, and fails. If a kernel's last table is
    empty, backward reads beyond hash_size_cumsum. An additional last row, which belongs to no table and is never
    looked up, prevents both errors.
    """
    for kernel in iterate_sharded_kernels(model):
        lookup = kernel.emb_module
        ends = _get_undocumented(lookup, "hash_size_cumsum")
        if ends.device.type != "cpu":
            continue
        if ends[-1] == ends[-2]:
            ends[-1] += 1
        if find_fused_lookup(kernel) is not None and not _get_undocumented(lookup, "weights_host").numel():
            lookup.weights_host = torch.zeros(_get_undocumented(lookup, "max_D"), dtype=lookup.weights_host.dtype)


def _get_undocumented(lookup: Any, name: str) -> Any:
    """Return an undocumented attribute of FBGEMM, or raise a RunError if it is missing."""
    return private(lookup, name, "fbgemm-gpu")
