"""Tables in files on a node's disk (compute_kernel fused_mmap).

The same kernel updates them that updates tables in memory, through pages of the file that the system brings
in, and writes back when it wants their memory for something else.

The rows that training looks up most are in memory, too (HotRows).
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
from raytrec.common.memory import bring_in, is_here, unmap_file
from raytrec.compat.fbgemm_lookups import map_table
from raytrec.config.run_config import RunConfig
from raytrec.config.tables import EmbeddingOptim
from raytrec.embeddings.constraints import MMAP_KERNEL, make_room, memory_filesystem, mmap_folder
from raytrec.embeddings.optimizers import optimizer_of
from raytrec.embeddings.pooling import Collection, tables_in

SIGHTINGS = 3  # fewer make rows that are looked up seldom take the places of others; more fill them later
WINDOW = 4096  # places that the hand looks at, at least
PAGES_LOOKED_AT = 32  # pages, or up to twice as many
BLOCK_ROWS = 65_536  # that are written back at once
# What a place takes in addition to its row, and what each row of the table takes.
PLACE_BYTES, ROW_BYTES = 10, 4


class MappedFiles:
    """Makes the files of this rank's tables.

    They have no names, and are gone when the process ends, however it ends: checkpoints are what is kept.

    Args:
        config: has the folder (plan.mmap_dir).
        share: of their rows, how many are in memory, too (HotRows).
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


class HotRows:
    """Rows of a table's shard that have a place in memory. Their place in the file is out of date then.

    Which rows they are follows from the lookups of the run itself. A row that has been looked up in SIGHTINGS
    steps gets a place in memory; if none is left, that of a row which was not looked up since a hand last
    came by (the CLOCK of page caches). Of rows spread over a file a page cache keeps 4 KiB for each; this
    keeps the row alone, and writes nothing back while the row is used.

    Args:
        whole: the lookup's weights [rows + places, columns], and its optimizer state, likewise or [rows +
            places]. Those of the file come first; those of places are in memory.
        rows: of the shard.
    """

    def __init__(self, whole: list[torch.Tensor], rows: int):
        self._whole, self._rows, self._count = whole, rows, len(whole[0]) - rows
        self._of = {values.data_ptr(): values for values in whole}
        # Of each row its place, or below 0: −1 − steps in which it was looked up.
        self._places = torch.full((rows,), -1, dtype=torch.int32)
        # Of each place:
        self._row = torch.zeros(self._count, dtype=torch.int64)
        self._used = torch.zeros(self._count, dtype=torch.bool)  # since the hand last came by
        self._changed = torch.zeros(self._count, dtype=torch.bool)  # since it was last written back
        self._filled, self._hand = 0, 0
        self._looked_up, self._found = 0, 0

    @torch.no_grad()
    def look_up(self, rows: torch.Tensor, *, trains: bool) -> torch.Tensor:
        """Where rows are that are looked up next: int [n], places in `whole`.

        The pages of those in the file are asked for all at once. Places do not change before the next call
        with `trains`.

        Args:
            rows: int [n], of the shard.
            trains: whether they are going to be updated; rows get places then.
        """
        places = self._places[rows]
        cold = rows[places < 0].long().unique()
        if trains:
            hot = places[places >= 0].long()
            self._used[hot] = self._changed[hot] = True
            self._found += len(hot)
            self._looked_up += len(rows)
            self._bring_in(cold)
            if self._admit(cold):
                places = self._places[rows]
        else:
            self._bring_in(cold)
        return torch.where(places >= 0, places.to(rows.dtype) + self._rows, rows)

    def share_found(self) -> float | None:
        """The share of lookups in training that were of rows in memory since the last call; None: there were
        none."""
        share = self._found / self._looked_up if self._looked_up else None
        self._looked_up = self._found = 0
        return share

    @torch.no_grad()
    def flush(self) -> None:
        """Writes all rows in memory back to the file; they stay in memory."""
        places = self._changed[: self._filled].nonzero().squeeze(1)
        for some in places[self._row[places].argsort()].split(BLOCK_ROWS):
            self._write_back(some)

    def purge(self) -> None:
        """Forgets all rows in memory without writing them back."""
        self._places.fill_(-1)
        self._changed.zero_()
        self._filled = self._hand = 0

    def read(self, values: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The current values of some rows.

        Args:
            values: those of `whole`, without the places.
            rows: int64 [n].
        """
        return self._of[values.data_ptr()].index_select(0, self._at(rows))

    def write(self, values: torch.Tensor, rows: torch.Tensor, new: torch.Tensor) -> None:
        """Replaces the values of some rows.

        Args:
            values, rows: as in `read`. new: of these rows, of the dtype of `values`.
        """
        at = self._at(rows)
        self._of[values.data_ptr()].index_copy_(0, at, new)
        self._changed[at[at >= self._rows] - self._rows] = True

    def _at(self, rows: torch.Tensor) -> torch.Tensor:
        places = self._places[rows].long()
        return torch.where(places >= 0, places + self._rows, rows)

    def _admit(self, cold: torch.Tensor) -> bool:
        """Gives places to rows that have now been looked up often enough; whether any got one.

        Args:
            cold: int64 [n], distinct, without a place.
        """
        sightings = self._places[cold] - 1
        self._places[cold] = sightings
        wanted = cold[sightings < -SIGHTINGS]
        if not len(wanted):
            return False
        filled = min(self._count, self._filled + len(wanted))
        places = torch.arange(self._filled, filled)
        self._filled = filled
        self._used[places] = True  # the hand passes over them
        idle = self._idle(len(wanted) - len(places))
        self._bring_in(self._row[idle])
        self._write_back(idle[self._changed[idle]])
        self._places[self._row[idle]] = -1
        places = torch.cat([places, idle])
        wanted = wanted[: len(places)]
        for values in self._whole:
            values.index_copy_(0, places + self._rows, values.index_select(0, wanted))
        self._places[wanted] = places.int()
        self._row[places] = wanted
        self._used[places] = self._changed[places] = True
        return len(places) > 0

    def _idle(self, count: int) -> torch.Tensor:
        """Up to so many places whose rows have not been used since the hand last came by, which turns once at
        most."""
        found, left = [torch.zeros(0, dtype=torch.int64)], self._count
        while count and left:
            end = min(self._hand + max(4 * count, WINDOW), self._hand + left, self._count)
            idle = self._used[self._hand : end].logical_not().nonzero().squeeze(1)[:count] + self._hand
            if len(idle) == count:
                end = int(idle[-1]) + 1
            self._used[self._hand : end] = False
            left, count = left - (end - self._hand), count - len(idle)
            self._hand = end % self._count
            found.append(idle)
        return torch.cat(found)

    def _write_back(self, places: torch.Tensor) -> None:
        """To be called for rows that have changed since the last `flush`: a save that began with it has set
        these aside (checkpoint/snapshot.py)."""
        if not len(places):
            return
        rows = self._row[places]
        self._bring_in(rows)
        for values in self._whole:
            values.index_copy_(0, rows, values.index_select(0, places + self._rows))
        self._changed[places] = False

    def _bring_in(self, rows: torch.Tensor) -> None:
        for values in self._whole:
            _bring_in_each(values, rows)


def _bring_in_each(values: torch.Tensor, rows: torch.Tensor) -> None:
    """Asks the system for the pages of some rows at once, where not all of a sample of them are in memory: as
    they are touched, it would wait for each."""
    begins, width = values.data_ptr() + rows * values[0].nbytes, values[0].nbytes
    pages = (torch.cat([begins, begins + (width - 1)]) // mmap.PAGESIZE).unique()
    sample = pages[:: max(1, len(pages) // PAGES_LOOKED_AT)].tolist()
    if all(is_here(page * mmap.PAGESIZE) for page in sample):
        return
    is_first = torch.ones(len(pages) + 1, dtype=torch.bool)
    is_first[1:-1] = pages.diff() > 1
    at = is_first.nonzero().squeeze(1)
    for page, count in zip(pages[at[:-1]].tolist(), at.diff().tolist(), strict=True):
        bring_in(page * mmap.PAGESIZE, count * mmap.PAGESIZE)
