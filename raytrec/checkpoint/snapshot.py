"""Tables as they were when a save began, without copies. They are written while training changes them.

Which rows a step changes is known from the ids that it looks up. Before it does, their values are set aside;
the writing thread takes these in the place of the live ones. So a save takes the memory of the rows that
change while it is written, and no more than a share of the tables: where that is used up, training waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from threading import Condition
from typing import TYPE_CHECKING

import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from raytrec.checkpoint.blocks import blocks, is_plain, memory, pieces
from raytrec.common.memory import bring_in
from raytrec.compat.fbgemm import fbgemm_of
from raytrec.compat.torch_ import ShardedTensor
from raytrec.compat.torchrec_ import sharded_kernels, tables_of
from raytrec.embeddings.tables import Table

if TYPE_CHECKING:
    from torchrec.distributed.model_parallel import DistributedModelParallel

SHARE = 0.1  # of a table's bytes, for the places and values of rows that are set aside
LEAST_BYTES = 8 << 20  # for those of small tables
LOOK_S = 1.0  # while training waits, between two signs of life


class RowSnapshot:
    """The moment at which a save began, of all tables on a CPU that are updated in backward.

    Tables with other kernels change everywhere at each step, and those on GPUs must be copied to host memory
    anyway; it does not hold them.

    Args:
        model: its lookups are heard from now on.
        tables: LogicalState.tables.
        patient: called every second while training waits because no more rows can be set aside.
    """

    def __init__(
        self,
        model: DistributedModelParallel,
        tables: dict[str, Table],
        patient: Callable[[], None] = lambda: None,
    ):
        self._patient, self._changed, self._begun = patient, Condition(), False
        self._shards: dict[str, _Shard] = {}  # table → this rank's part of it
        for kernel in sharded_kernels(model):
            if fbgemm_of(kernel) is None:
                continue
            names = {table.name for table in tables_of(kernel)}
            for name in names:
                parts = [tables[name].weight, *tables[name].state.values()]
                live = [shard.values for part in parts for shard in part.local]
                if live and live[0].numel() and all(is_plain(values) for values in live):
                    self._shards[name] = _Shard(live)
            if names & self._shards.keys():
                kernel.register_forward_pre_hook(self._before_lookup)
        self._place = {
            values.data_ptr(): (shard, number)
            for shard in self._shards.values()
            for number, values in enumerate(shard.live)
        }

    def holds(self, value: torch.Tensor | ShardedTensor) -> bool:
        """Whether a tensor of LogicalState.tensors() needs no copy."""
        local = value.local_shards() if isinstance(value, ShardedTensor) else []
        return bool(local) and all(shard.tensor.data_ptr() in self._place for shard in local)

    def begin(self) -> None:
        """The moment is now."""
        with self._changed:
            for shard in self._shards.values():
                shard.begin()
            self._begun = True

    def end(self) -> None:
        """The save has ended."""
        with self._changed:
            self._begun = False
            for shard in self._shards.values():
                shard.end()
            self._changed.notify_all()

    def blocks(self, tensor: torch.Tensor, block_bytes: int) -> Iterator[memoryview]:
        """The bytes of a tensor at that moment, as `blocks.blocks` gives them."""
        if not self._begun or tensor.data_ptr() not in self._place:
            yield from blocks(tensor, block_bytes)
            return
        width = tensor[0].nbytes
        buffer = tensor.new_empty(min(len(tensor), block_bytes // width + 2), *tensor.shape[1:])
        for begin in range(0, tensor.nbytes, block_bytes):
            end = min(begin + block_bytes, tensor.nbytes)
            first, last = begin // width, -(-end // width)
            data = memory(self._read(tensor, first, last, buffer))
            yield data[begin - first * width : end - first * width]

    def pieces(self, tensor: torch.Tensor, block_bytes: int) -> Iterator[torch.Tensor]:
        """The values of a tensor at that moment, some rows at a time; each piece is there until the next one
        is asked for."""
        if not self._begun or tensor.data_ptr() not in self._place:
            yield from pieces(tensor, block_bytes)
            return
        count = max(1, block_bytes // tensor[0].nbytes)
        buffer = tensor.new_empty(min(len(tensor), count), *tensor.shape[1:])
        for first in range(0, len(tensor), count):
            yield self._read(tensor, first, min(first + count, len(tensor)), buffer)

    def set_aside(self, table: str, rows: torch.Tensor) -> None:
        """To be called before rows are written to other than by training: keeps their values, if a save has
        begun.

        Args:
            rows: int64, of this rank's shard, counted from its first.
        """
        shard = self._shards.get(table)
        if shard is None or not self._begun:
            return
        with self._changed:
            while self._begun and not shard.set_aside(rows):
                self._changed.wait(LOOK_S)
                self._patient()

    def _read(self, tensor: torch.Tensor, first: int, last: int, buffer: torch.Tensor) -> torch.Tensor:
        shard, number = self._place[tensor.data_ptr()]
        wanted = tensor[first:last]
        bring_in(wanted.data_ptr(), wanted.nbytes)
        # Rows that change while they are copied were set aside before, and are put back after.
        part = buffer[: last - first].copy_(wanted)
        with self._changed:
            shard.put_back(number, first, part)
        return part

    def _before_lookup(self, kernel: nn.Module, inputs: tuple) -> None:
        if not (self._begun and kernel.training and torch.is_grad_enabled()):
            return
        features: KeyedJaggedTensor = inputs[0]
        names = [table.name for table in tables_of(kernel) for _ in table.feature_names]
        offsets = features.offsets()
        ends = offsets[:: (len(offsets) - 1) // len(names)].tolist()
        for name in dict.fromkeys(names):
            ids = [features.values()[ends[k] : ends[k + 1]] for k, n in enumerate(names) if n == name]
            self.set_aside(name, torch.cat(ids).long())


class _Shard:
    """A rank's part of a table.

    Args:
        live: the weights [rows, columns], and state [rows, columns] or [rows], which training changes.
    """

    def __init__(self, live: list[torch.Tensor]):
        self.live = [values.detach() for values in live]
        self._slots = torch.empty(0, dtype=torch.int32)  # of each row its place among `_aside`, or -1
        self._aside: list[torch.Tensor] = []  # of each of `live`: room for rows that are set aside
        self._count = 0

    def begin(self) -> None:
        rows, size = len(self.live[0]), sum(values.nbytes for values in self.live)
        self._slots = torch.full((rows,), -1, dtype=torch.int32)
        room = max(LEAST_BYTES, int(SHARE * size) - self._slots.nbytes) // (size // rows)
        # Pages of it are used as they are written to.
        self._aside = [values.new_empty(min(rows, room), *values.shape[1:]) for values in self.live]
        self._count = 0

    def end(self) -> None:
        self._slots, self._aside = self._slots[:0].clone(), []

    def set_aside(self, rows: torch.Tensor) -> bool:
        """Keeps rows as they are, those that it has not kept yet; False where there is no room for them."""
        new = rows[self._slots[rows] < 0].unique()
        first, end = self._count, self._count + len(new)
        if end > len(self._aside[0]):
            return False
        for values, aside in zip(self.live, self._aside, strict=True):
            torch.index_select(values, 0, new, out=aside[first:end])
        self._slots[new] = torch.arange(first, end, dtype=torch.int32)
        self._count = end
        return True

    def put_back(self, number: int, first: int, part: torch.Tensor) -> None:
        """Puts rows that were set aside into a copy of rows from `first` on."""
        slots = self._slots[first : first + len(part)]
        kept = (slots >= 0).nonzero().squeeze(1)
        part[kept] = self._aside[number][slots[kept].long()]
