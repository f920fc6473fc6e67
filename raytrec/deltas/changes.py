"""Track the table rows and managed ids that have changed on this rank since the previous delta."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from raytrec.common.collectives import Peers
from raytrec.compat.fbgemm import find_fused_lookup
from raytrec.compat.torchrec_ import get_shard_origin, iterate_sharded_kernels, list_kernel_tables
from raytrec.data.batch import NewRows
from raytrec.embeddings.hashing import unhash_bits
from raytrec.embeddings.managed.row_map import RowMap
from raytrec.embeddings.tables import Shard, Table
from raytrec.embeddings.taps import offset_ids

PIECE_VALUES = 1 << 21  # maximum number of values in a piece; 8 MiB of float32


@dataclass(frozen=True)
class RowPiece:
    """New values of some rows of a table, or of a range of their columns.

    Attributes:
        table: Name of the table.
        rows: Rows of the table, int64 [n], in host memory.
        column: First column of the values.
        values: Values, float32 [n, columns], in host memory.
    """

    table: str
    rows: torch.Tensor
    column: int
    values: torch.Tensor


class LookedUpRows:
    """Tracker of changed rows in a shard whose rows change only if they are looked up or reassigned to other ids.

    Args:
        table: Name of the table.
        shard: Shard of this rank.
        flags: One flag per row of the shard, uint8 [rows]; lookups in training steps set the flags of their rows to 1.
    """

    def __init__(self, table: str, shard: Shard, flags: torch.Tensor):
        self.table, self.shard, self._flags = table, shard, flags

    def mark(self, rows: torch.Tensor) -> None:
        """Mark rows as changed: int64 [n], relative to the shard's first row, on the shard's device."""
        self._flags.index_fill_(0, rows, 1)

    def take(self) -> torch.Tensor:
        """Return the changed rows, int64 [n] as in `mark`, and clear all marks."""
        rows = self._flags.nonzero().squeeze(1)
        self._flags.zero_()
        return rows


class ComparedRows:
    """Tracker of changed rows in a shard in which a step may change any row. At first, all rows count as changed.

    If the shard has only some of the table's columns, all rows always count as changed, because a delta must contain
    complete rows.

    Args:
        table: Name of the table.
        shard: Shard of this rank. The published values are stored in a tensor of the same size.
        dim: Number of columns of the table.
    """

    def __init__(self, table: str, shard: Shard, dim: int):
        self.table, self.shard, self._is_part = table, shard, len(shard.columns) < dim
        self._published = torch.full_like(shard.values, torch.nan)  # NaN differs from every value

    def mark(self, rows: torch.Tensor) -> None:
        """Mark rows as changed; see LookedUpRows.mark."""
        self._published.index_fill_(0, rows, torch.nan)

    def take(self) -> torch.Tensor:
        """Return the changed rows, int64 [n] as in `mark`, and store their present values as published."""
        differs = (self.shard.values != self._published).any(1)
        rows = (differs | self._is_part).nonzero().squeeze(1)
        self._published.index_copy_(0, rows, self.shard.read(rows))
        return rows


TakenRows = list[tuple[LookedUpRows | ComparedRows, torch.Tensor]]  # tracker of each shard, and its changed rows


class RowChanges:
    """Tracker of changed rows in all shards of this rank. Only rank 0 tracks data-parallel tables.

    torch.distributed must be initialized.

    Args:
        model: Sharded model; the constructor registers hooks that observe its lookups.
        tables: Live tables by name.
    """

    def __init__(self, model: nn.Module, tables: Mapping[str, Table]):
        self._parts: list[LookedUpRows | ComparedRows] = []
        for kernel in iterate_sharded_kernels(model):
            self._parts += _watch_kernel(kernel, tables)
        if dist.get_rank() == 0:
            replicated = [(name, table.weight) for name, table in tables.items() if table.weight.replicated]
            self._parts += [ComparedRows(name, weight.local[0], weight.shape[1]) for name, weight in replicated]

    def mark_local(self, table: str, rows: torch.Tensor) -> None:
        """Mark rows, int64 [n] relative to the first row of this rank's shards of a table, as changed."""
        for part in self._parts:
            if part.table == table:
                part.mark(rows)

    def mark(self, table: str, rows: torch.Tensor) -> None:
        """Mark rows of a table, int64 [n] in host memory, as changed. Rows of other ranks are ignored."""
        for part in self._parts:
            if part.table == table:
                shard = part.shard
                local = rows[(rows >= shard.rows.start) & (rows < shard.rows.stop)] - shard.rows.start
                part.mark(local.to(shard.values.device))

    def mark_all(self) -> None:
        """Mark all rows as changed."""
        for part in self._parts:
            part.mark(torch.arange(len(part.shard.rows), device=part.shard.values.device))

    @torch.no_grad()
    def take(self) -> TakenRows:
        """Return the changed rows of each shard, and clear all marks."""
        return [(part, part.take()) for part in self._parts]


def count_bytes(taken: TakenRows) -> int:
    """Return the size in bytes of the values of changed rows in float32."""
    return sum(4 * len(rows) * len(part.shard.columns) for part, rows in taken)


@torch.no_grad()
def iterate_pieces(taken: TakenRows) -> Iterator[RowPiece]:
    """Yield the current values of changed rows in pieces of at most PIECE_VALUES values."""
    for part, rows in taken:
        shard = part.shard
        for some in rows.split(max(1, PIECE_VALUES // max(1, len(shard.columns)))) if len(rows) else ():
            values = shard.read(some).float().cpu()
            yield RowPiece(part.table, some.cpu() + shard.rows.start, shard.columns.start, values)


def _watch_kernel(kernel: nn.Module, tables: Mapping[str, Table]) -> list[LookedUpRows | ComparedRows]:
    """Return trackers of the shards that a kernel holds. A hook observes the lookups of a fused kernel."""
    names = [each.name for each in list_kernel_tables(kernel)]
    shards = [_find_shard(tables[each.name], get_shard_origin(each)) for each in list_kernel_tables(kernel)]
    if find_fused_lookup(kernel) is None:
        dims = [tables[name].shape[1] for name in names]
        return [ComparedRows(*each) for each in zip(names, shards, dims, strict=True)]
    flags = torch.zeros(sum(len(shard.rows) for shard in shards), dtype=torch.uint8, device=shards[0].values.device)
    kernel.register_forward_pre_hook(partial(_flag_lookup, flags))
    parts = flags.split([len(shard.rows) for shard in shards])
    return [LookedUpRows(*each) for each in zip(names, shards, parts, strict=True)]


def _find_shard(table: Table, origin: tuple[int, int]) -> Shard:
    return next(shard for shard in table.weight.local if (shard.rows.start, shard.columns.start) == origin)


def _flag_lookup(flags: torch.Tensor, kernel: nn.Module, inputs: tuple[KeyedJaggedTensor, ...]) -> None:
    """Set the flags of the rows that a training step looks up; the host does not wait for a GPU."""
    if kernel.training and torch.is_grad_enabled():
        flags.index_fill_(0, offset_ids(kernel, inputs[0]).long(), 1)


class IdRowChanges(NamedTuple):
    """Rows of a table and their current ids.

    Attributes:
        rows: Distinct rows, int64 [n], in host memory.
        ids: Id of each row, int64 [n]; undefined for rows without an id.
        has_id: True for rows with an id, bool [n].
    """

    rows: torch.Tensor
    ids: torch.Tensor
    has_id: torch.Tensor


class IdChanges:
    """Tracker of rows whose managed ids have changed. Rank r of W publishes the rows ≡ r mod W.

    Every rank receives all assignments of rows to ids (IdExchange.train). Every rank also knows the rows that have
    lost their id, because they have become free (FreeRows.left).

    Args:
        maps: This rank's part of the map of each table with managed ids.
    """

    def __init__(self, maps: Mapping[str, RowMap]):
        self._maps, self._peers = maps, Peers()
        self._pending: dict[str, list[IdRowChanges]] = {name: [] for name in maps}
        self._free = {name: part.free.left for name, part in maps.items()}  # as of the previous delta

    def add_assigned(self, new: Mapping[str, NewRows]) -> None:
        """Mark the rows in `new` (table → rows assigned to ids) as changed; the host does not wait for a GPU."""
        for name, (rows, ids, _) in new.items():
            if len(rows):
                self._pending[name].append(IdRowChanges(rows, ids, torch.ones_like(rows, dtype=torch.bool)))

    def mark(self, table: str, rows: torch.Tensor) -> None:
        """Mark rows, distinct int64 [n] in host memory and the same on all ranks, as changed.

        This is a collective operation: every rank must call it.
        """
        peers, entries = self._peers, self._maps[table].state().rows
        entry_rows = entries.fields["row"].long()
        chosen = torch.isin(entry_rows, rows.to(entry_rows.device))
        pairs = [entry_rows[chosen], unhash_bits(entries.keys[chosen])]
        owned_rows, ids = (each.cpu() for each in peers.send(pairs, pairs[0] % peers.world))
        free_rows = rows[rows % peers.world == peers.rank]
        free_rows = free_rows[~torch.isin(free_rows, owned_rows)]
        has_id = torch.arange(len(owned_rows) + len(free_rows)) < len(owned_rows)
        all_rows = torch.cat([owned_rows, free_rows])
        self._pending[table].append(IdRowChanges(all_rows, torch.cat([ids, free_rows]), has_id))

    def mark_all(self) -> None:
        """Mark the ids of all rows as changed.

        This is a collective operation: every rank must call it.
        """
        for name, part in self._maps.items():
            self.mark(name, torch.arange(part.capacity))

    def take(self) -> dict[str, IdRowChanges]:
        """Return table → rows with changed ids that this rank publishes, and clear all marks.

        The maps must not contain assignments for later steps, which a pipeline makes ahead.
        """
        taken = {}
        for name, part in self._maps.items():
            taken[name] = self._collect(self._pending[name], part.free.left.cpu(), self._free[name].cpu())
            self._pending[name], self._free[name] = [], part.free.left
        return taken

    def put_back(self, taken: Mapping[str, IdRowChanges]) -> None:
        """Mark the rows of an earlier `take` as changed again, because they were not published."""
        for name, changes in taken.items():
            self._pending[name].insert(0, changes)

    def _collect(self, pending: list[IdRowChanges], free: torch.Tensor, previous: torch.Tensor) -> IdRowChanges:
        """Return the changed rows that this rank publishes, with their current ids.

        Args:
            pending: Changes, oldest first.
            free: Rows without an id.
            previous: Rows without an id at the time of the previous delta.
        """
        freed = free[~torch.isin(free, previous)]
        no_ids = IdRowChanges(freed, freed, torch.zeros_like(freed, dtype=torch.bool))
        columns = zip(*pending, no_ids, strict=True)
        rows, ids, has_id = (torch.cat([part.cpu() for part in parts]) for parts in columns)
        mine = (rows % self._peers.world == self._peers.rank).nonzero().squeeze(1)
        order = mine[rows[mine].argsort(stable=True)]  # of equal rows, the newest is last
        is_newest = torch.ones_like(order, dtype=torch.bool)
        is_newest[:-1] = rows[order][1:] != rows[order][:-1]
        newest = order[is_newest]
        return IdRowChanges(rows[newest], ids[newest], has_id[newest] & ~torch.isin(rows[newest], free))
