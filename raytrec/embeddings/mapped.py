"""Tables in files on a node's disk (compute_kernel fused_mmap).

The same kernel updates them that updates tables in memory, through pages of the file that the system brings
in, and writes back when it wants their memory for something else.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterable, Mapping

import torch
from torchrec.distributed.types import ShardingPlan

from raytrec.common.errors import RunError
from raytrec.common.formatting import bytes_text
from raytrec.common.memory import unmap_file
from raytrec.compat.fbgemm_lookups import map_table
from raytrec.config.run_config import RunConfig
from raytrec.config.tables import EmbeddingOptim
from raytrec.embeddings.bags import Collection, tables_in
from raytrec.embeddings.constraints import MMAP_KERNEL, make_room, memory_filesystem, mmap_folder
from raytrec.embeddings.hot_rows import HotRows
from raytrec.embeddings.optimizers import optimizer_of


class MappedFiles:
    """Makes the files of this rank's tables.

    They have no names, and are gone when the process ends, however it ends: checkpoints are what is kept.

    Args:
        config: has the folder (plan.mmap_dir).
        share: of their rows, how many are in memory, too (hot_rows.py).
    """

    def __init__(self, config: RunConfig, share: float = 0.0):
        self._config, self._folder, self.share = config, mmap_folder(config), share

    def in_memory(self, whole: list[torch.Tensor], rows: int) -> HotRows:
        """See HotRows."""
        return HotRows(whole, rows)

    def zeros(self, tables: list[str], count: int, dtype: torch.dtype, more: int = 0) -> torch.Tensor:
        """Values in a new file, all 0: [count + more], shared with the file but for the last ones.

        Its place on the disk is reserved at once: a disk that is full would end the process when a page is
        written back.

        Args:
            tables: which they are of, for people.
            more: values behind them that are in memory alone.

        Raises:
            RunError: the folder cannot be written to, has no room, or is itself in memory.
        """
        size, folder = count * dtype.itemsize, self._folder
        try:
            if kind := memory_filesystem(folder):
                raise self._refused(tables, size, f"the folder is on {kind}, which is itself memory")
            with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
                os.posix_fallocate(file.fileno(), 0, size)
                file.truncate(size + more * dtype.itemsize)
                pages = mmap.mmap(file.fileno(), size + more * dtype.itemsize)
            pages.madvise(mmap.MADV_RANDOM)  # a row brings in its page, not the megabytes around it
            values = torch.frombuffer(pages, dtype=dtype)
            if more:
                begin = size - size % mmap.PAGESIZE
                unmap_file(values.data_ptr() + begin, values.nbytes - begin)
        except OSError as error:
            raise self._refused(tables, size, (error.strerror or str(error)).lower()) from None
        return values

    def _refused(self, tables: list[str], size: int, why: str) -> RunError:
        return RunError(
            f"no file of {bytes_text(size)} for {', '.join(tables)}: {why}",
            where=f"plan.mmap_dir, {self._folder}",
            expected="a folder on a disk of the node with room for its tables and their optimizer state",
            do=make_room(self._config),
        )


def mark_mapped(
    collections: Iterable[Collection],
    plan: ShardingPlan,
    optimizers: Mapping[str, EmbeddingOptim],
    hot: bool = False,
) -> None:
    """Marks the tables that a plan gives to fused_mmap, before they are sharded.

    Args:
        collections: PooledEmbeddings.collections, marked by optim.fuse.
        optimizers: of every table (constraints.table_optimizers).
        hot: whether any rank has rows of theirs in memory, too; the same on all ranks.
    """
    kernels = {table: spec.compute_kernel for module in plan.plan.values() for table, spec in module.items()}
    for collection in collections:
        for table, module in tables_in(collection).items():
            if kernels[table] == MMAP_KERNEL:
                state = optimizer_of(optimizers[table].name).state
                map_table(module.weight, {each.buffer: each.per for each in state}, table if hot else "")
