"""Store tables in files on a node's disk (compute_kernel fused_mmap).

The kernel that updates tables in memory also updates tables in files, through memory-mapped pages. The operating
system reads the pages on demand, and writes them back when it needs their memory.

If memory is left, rows that training looks up frequently are also kept in memory (HotRowCache).
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from collections.abc import Iterable, Mapping

import torch
from torchrec.distributed.types import ShardingPlan

from raytrec.common.errors import RunError
from raytrec.common.formatting import format_bytes
from raytrec.common.memory import prefetch_rows, unmap_file
from raytrec.compat.torchrec_ import map_table
from raytrec.config.run_config import RunConfig
from raytrec.config.tables import EmbeddingOptim
from raytrec.embeddings.constraints import MMAP_KERNEL, advise_disk_space, find_memory_filesystem, find_mmap_folder
from raytrec.embeddings.optimizers import find_optimizer
from raytrec.embeddings.pooling import Collection, find_table_modules

ADMISSION_SIGHTINGS = 3  # if lower, rarely used rows displace others; if higher, the slots fill more slowly
MIN_CLOCK_WINDOW = 4096  # minimum number of slots that the clock hand of a HotRowCache inspects at once
SAMPLED_ROWS = 32  # number of rows sampled to decide whether pages are prefetched (prefetch_rows)
BLOCK_ROWS = 65_536  # rows written back at once
# Bytes of bookkeeping per slot of a HotRowCache, in addition to the cached row, and per row of the shard.
BYTES_PER_PLACE, ROW_BYTES = 10, 4


class MappedFileFactory:
    """Factory for the files that store this rank's tables with compute_kernel fused_mmap.

    The files are unnamed and disappear when the process ends for any reason. Only checkpoints are kept.

    Args:
        config: Configuration of the run, which determines the folder of the files (`find_mmap_folder`).
        share: Number of slots for rows in memory (HotRowCache), as a fraction of a shard's rows; 0: no cache.
    """

    def __init__(self, config: RunConfig, share: float = 0.0):
        self._config, self._folder, self.share = config, find_mmap_folder(config), share

    def make_hot_rows(self, whole: list[torch.Tensor], rows: int) -> HotRowCache:
        """Return a new HotRowCache of a shard; see HotRowCache for the arguments."""
        return HotRowCache(whole, rows)

    def allocate_zeros(self, tables: list[str], count: int, dtype: torch.dtype, more: int = 0) -> torch.Tensor:
        """Return a tensor of zeros, [count + more], whose first `count` values are mapped to a new file.

        Disk space is reserved at once: on a full disk, writing a page back would otherwise kill the process.

        Args:
            tables: Names of the tables whose weights or optimizer state the tensor will hold, for error messages.
            count: Number of values in the file.
            dtype: Dtype of the values.
            more: Number of additional values, at the end, that exist only in memory.

        Raises:
            RunError: The file cannot be created or filled, or the folder is on a file system in memory.
        """
        size, folder = count * dtype.itemsize, self._folder
        try:
            if kind := find_memory_filesystem(folder):
                raise self._make_error(tables, size, f"the folder is on {kind}, which keeps files in memory", False)
            with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
                os.posix_fallocate(file.fileno(), 0, size)
                file.truncate(size + more * dtype.itemsize)
                pages = mmap.mmap(file.fileno(), size + more * dtype.itemsize)
            pages.madvise(mmap.MADV_RANDOM)  # read only the page of a row, not the megabytes around it
            values = torch.frombuffer(pages, dtype=dtype)
            if more:
                begin = size - size % mmap.PAGESIZE
                unmap_file(values.data_ptr() + begin, values.nbytes - begin)
        except OSError as error:
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            raise self._make_error(tables, size, error.strerror or str(error), is_full) from None
        return values

    def _make_error(self, tables: list[str], size: int, why: str, is_full: bool) -> RunError:
        return RunError(
            f"cannot create a file of {format_bytes(size)} for rows or optimizer state of {', '.join(tables)}: {why}",
            where=f"{'plan.mmap_dir, ' if self._config.plan.mmap_dir else ''}{self._folder}",
            expected="a folder on a local disk with enough space for the node's tables and their optimizer state",
            do=advise_disk_space(self._config, is_full),
        )


def mark_mapped(
    collections: Iterable[Collection], plan: ShardingPlan, optimizers: Mapping[str, EmbeddingOptim], hot: bool = False
) -> None:
    """Mark the tables to which a plan assigns fused_mmap, so that their lookups read files. Call before sharding.

    Args:
        collections: Collections of PooledEmbeddings, marked by optim.mark_fused.
        plan: Sharding plan.
        optimizers: Optimizer of every table (constraints.resolve_optimizers).
        hot: True if any rank caches rows of these tables in memory (HotRowCache); the same on all ranks.
    """
    kernels = {table: spec.compute_kernel for module in plan.plan.values() for table, spec in module.items()}
    for collection in collections:
        for table, module in find_table_modules(collection).items():
            if kernels[table] == MMAP_KERNEL:
                state = find_optimizer(optimizers[table].name).state
                map_table(module.weight, {kind.buffer: kind.value_granularity for kind in state}, table if hot else "")


class HotRowCache:
    """In-memory cache of the frequently used rows of a shard that is stored in a file (compute_kernel fused_mmap).

    Training updates a cached row only in memory. The row is written back to the file when another row replaces it
    or when the cache is flushed.

    A row that has been looked up in ADMISSION_SIGHTINGS training steps gets a slot in memory. If all slots are
    taken, the row replaces a row without lookups since the clock hand last passed (CLOCK, the replacement policy of
    page caches). If there is no such row, nothing is replaced. A page cache would keep a page of 4 KiB for each row.

    Args:
        whole: Weights of the lookup, [rows + slots, columns], and its optimizer state, of the same shape or
            [rows + slots]. The rows in the file come first, followed by the slots in memory.
        rows: Number of rows of the shard.
    """

    def __init__(self, whole: list[torch.Tensor], rows: int):
        self._tensors, self._rows, self._count = whole, rows, len(whole[0]) - rows
        self._tensor_at = {values.data_ptr(): values for values in whole}
        # Slot of each row. A row without a slot has −1 − n, where n is the number of steps that looked up the row.
        self._slots = torch.full((rows,), -1, dtype=torch.int32)
        # Row in each slot, True if it was used since the hand last passed, and True if it must be written back.
        self._row = torch.zeros(self._count, dtype=torch.int64)
        self._used = torch.zeros(self._count, dtype=torch.bool)
        self._changed = torch.zeros(self._count, dtype=torch.bool)
        self._filled, self._hand = 0, 0
        self._lookups, self._hits = 0, 0

    @torch.no_grad()
    def look_up(self, rows: torch.Tensor, *, trains: bool) -> torch.Tensor:
        """Return the index into the tensors of `whole` of each row that is about to be looked up, int [n].

        The pages of rows that are not cached are prefetched together. The indices are valid until the next call
        with `trains=True` or the next `purge`.

        Args:
            rows: Rows of the shard, int [n].
            trains: True if the rows will be updated. Only such calls count as lookups and give slots to rows.
        """
        slots = self._slots[rows]
        cold = rows[slots < 0].long().unique()
        self._prefetch_pages(cold)
        if trains:
            hot = slots[slots >= 0].long()
            self._used[hot] = self._changed[hot] = True
            self._hits += len(hot)
            self._lookups += len(rows)
            if self._admit(cold):
                slots = self._slots[rows]
        return torch.where(slots >= 0, slots.to(rows.dtype) + self._rows, rows)

    def take_hit_share(self) -> float | None:
        """Return the fraction of training lookups since the last call that found a cached row; None without lookups.

        The call resets the counts.
        """
        share = self._hits / self._lookups if self._lookups else None
        self._lookups = self._hits = 0
        return share

    @torch.no_grad()
    def flush(self) -> None:
        """Write all changed rows in memory back to the file; the rows stay in memory."""
        slots = self._changed[: self._filled].nonzero().squeeze(1)
        for block in slots[self._row[slots].argsort()].split(BLOCK_ROWS):
            self._write_back(block)

    def purge(self) -> None:
        """Discard all rows in memory without writing them back, and the number of lookups of all other rows."""
        self._slots.fill_(-1)
        self._changed.zero_()
        self._filled = self._hand = 0

    def read(self, values: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return the current values of rows, [n, columns] or [n].

        Args:
            values: Part of a tensor in `whole` that is in the file; the tensor is identified by its address.
            rows: Rows of the shard, int64 [n].
        """
        return self._tensor_at[values.data_ptr()].index_select(0, self._find_slots(rows))

    def write(self, values: torch.Tensor, rows: torch.Tensor, new: torch.Tensor) -> None:
        """Replace the values of rows; values of cached rows change only in memory.

        Args:
            values: Part of a tensor in `whole`, as in `read`.
            rows: Rows of the shard, int64 [n].
            new: New values of these rows, of the dtype of `values`.
        """
        positions = self._find_slots(rows)
        self._tensor_at[values.data_ptr()].index_copy_(0, positions, new)
        self._changed[positions[positions >= self._rows] - self._rows] = True

    def _find_slots(self, rows: torch.Tensor) -> torch.Tensor:
        slots = self._slots[rows].long()
        return torch.where(slots >= 0, slots + self._rows, rows)

    def _admit(self, cold: torch.Tensor) -> bool:
        """Count a lookup of each row, and give slots to rows with enough lookups; return True if any row gets one.

        Args:
            cold: Distinct rows without a slot, int64 [n].
        """
        sightings = self._slots[cold] - 1
        self._slots[cold] = sightings
        admitted = cold[sightings < -ADMISSION_SIGHTINGS]
        if not len(admitted):
            return False
        filled = min(self._count, self._filled + len(admitted))
        slots = torch.arange(self._filled, filled)
        self._filled = filled
        self._used[slots] = True  # so that the hand skips them
        idle = self._find_idle_slots(len(admitted) - len(slots))
        self._prefetch_pages(self._row[idle])
        self._write_back(idle[self._changed[idle]])
        self._slots[self._row[idle]] = -1
        slots = torch.cat([slots, idle])
        admitted = admitted[: len(slots)]
        for values in self._tensors:
            values.index_copy_(0, slots + self._rows, values.index_select(0, admitted))
        self._slots[admitted] = slots.int()
        self._row[slots] = admitted
        self._used[slots] = self._changed[slots] = True
        return len(slots) > 0

    def _find_idle_slots(self, count: int) -> torch.Tensor:
        """Advance the clock hand, by one turn at most, and return up to `count` slots not used since its last pass."""
        parts, remaining = [torch.zeros(0, dtype=torch.int64)], self._count
        while count and remaining:
            end = min(self._hand + max(4 * count, MIN_CLOCK_WINDOW), self._hand + remaining, self._count)
            idle = self._used[self._hand : end].logical_not().nonzero().squeeze(1)[:count] + self._hand
            if len(idle) == count:
                end = int(idle[-1]) + 1
            self._used[self._hand : end] = False
            remaining, count = remaining - (end - self._hand), count - len(idle)
            self._hand = end % self._count
            parts.append(idle)
        return torch.cat(parts)

    def _write_back(self, slots: torch.Tensor) -> None:
        """Write the rows in these slots back to the file.

        The rows must have changed since the last `flush`: a save that began with this flush reads the other rows
        from the file, and has already copied the previous values of these rows (checkpoint/snapshot.py).
        """
        if not len(slots):
            return
        rows = self._row[slots]
        self._prefetch_pages(rows)
        for values in self._tensors:
            values.index_copy_(0, rows, values.index_select(0, slots + self._rows))
        self._changed[slots] = False

    def _prefetch_pages(self, rows: torch.Tensor) -> None:
        for values in self._tensors:
            prefetch_rows(values, rows, SAMPLED_ROWS)
