"""Preserve the state that a run has at the start of a save while training continues.

Tables on a CPU are not copied. The ids that a step looks up determine the rows that the step changes, and the
values of these rows are set aside first. The writing thread uses these values instead of the live ones. A save
needs memory for the rows that change during the save, up to MAX_ASIDE_SHARE of a large table. If this is not enough,
training waits for the end of the save. All other tensors are copied to host memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from math import prod
from mmap import MADV_HUGEPAGE, MAP_ANONYMOUS, MAP_PRIVATE, mmap
from threading import Condition

import torch
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel

from raytrec.checkpoint.blocks import blocks, is_host_contiguous, iterate_row_pieces, memory
from raytrec.checkpoint.state import State
from raytrec.common.memory import prefetch_pages
from raytrec.compat.fbgemm import find_fused_lookup
from raytrec.compat.torch_ import ShardedTensor, list_local_parts, replace_local_shards
from raytrec.compat.torchrec_ import iterate_sharded_kernels, list_kernel_tables
from raytrec.embeddings.tables import Table
from raytrec.embeddings.taps import collect_table_ids

MAX_ASIDE_SHARE = 0.1  # largest share of a table's bytes for the slots and values of rows set aside
MIN_ASIDE_BYTES = 8 << 20  # lower bound of that limit, for small tables
WAIT_INTERVAL_S = 1.0  # between two calls of `on_wait` while training waits
ALIGNMENT_BYTES = 64  # tensors start at multiples of this offset in the buffer
CUDA_HOST_REGISTER_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for all devices


class RowSnapshot:
    """Snapshot of the tables on a CPU that are updated in the backward pass, taken at the start of a save.

    Tables with other kernels are not included, because every step may change all of their rows. Tables on GPUs
    are not included, because they must be copied to host memory anyway.

    Args:
        model: Sharded model; forward hooks observe its lookups.
        tables: Live tables by name (LogicalState.tables).
        on_wait: Function called every WAIT_INTERVAL_S while training waits for space to set rows aside.
    """

    def __init__(
        self, model: DistributedModelParallel, tables: dict[str, Table], on_wait: Callable[[], None] = lambda: None
    ):
        self._on_wait, self._changed, self._begun = on_wait, Condition(), False
        self._shards: dict[str, _ShardSnapshot] = {}  # table → this rank's part
        for kernel in iterate_sharded_kernels(model):
            if find_fused_lookup(kernel) is None:
                continue
            names = {table.name for table in list_kernel_tables(kernel)}
            for name in names:
                parts = [tables[name].weight, *tables[name].state.values()]
                live = [shard.values for part in parts for shard in part.local]
                if live and live[0].numel() and all(is_host_contiguous(values) for values in live):
                    self._shards[name] = _ShardSnapshot(live)
            if names & self._shards.keys():
                kernel.register_forward_pre_hook(self._before_lookup)
        self._place = {
            values.data_ptr(): (shard, number)
            for shard in self._shards.values()
            for number, values in enumerate(shard.live)
        }

    def holds(self, value: torch.Tensor | ShardedTensor) -> bool:
        """Return True if the snapshot preserves a tensor of LogicalState.tensors(), so that a save needs no copy."""
        local = value.local_shards() if isinstance(value, ShardedTensor) else []
        return bool(local) and all(shard.tensor.data_ptr() in self._place for shard in local)

    def begin(self) -> None:
        """Start to preserve the current values of the tables."""
        with self._changed:
            for shard in self._shards.values():
                shard.begin()
            self._begun = True

    def end(self) -> None:
        """Release the preserved values after the save."""
        with self._changed:
            self._begun = False
            for shard in self._shards.values():
                shard.end()
            self._changed.notify_all()

    def blocks(self, tensor: torch.Tensor, block_bytes: int) -> Iterator[memoryview]:
        """Yield a tensor's bytes like `blocks.blocks`; for preserved tensors, the bytes at the start of the save."""
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
        """Yield a tensor's values, a few rows at a time; for preserved tensors, the values at the start of the save.

        Each piece is valid until the next one is requested.
        """
        if not self._begun or tensor.data_ptr() not in self._place:
            yield from iterate_row_pieces(tensor, block_bytes)
            return
        count = max(1, block_bytes // tensor[0].nbytes)
        buffer = tensor.new_empty(min(len(tensor), count), *tensor.shape[1:])
        for first in range(0, len(tensor), count):
            yield self._read(tensor, first, min(first + count, len(tensor)), buffer)

    def preserve_rows(self, table: str, rows: torch.Tensor) -> None:
        """Preserve the values of rows during a save; if there is no space left, wait until the save ends.

        This method must be called before code other than a training step changes the rows.

        Args:
            table: Name of the table.
            rows: Row indices in this rank's shard, int64 [n].
        """
        shard = self._shards.get(table)
        if shard is None or not self._begun:
            return
        with self._changed:
            while self._begun and not shard.preserve_rows(rows):
                self._changed.wait(WAIT_INTERVAL_S)
                self._on_wait()

    def _read(self, tensor: torch.Tensor, first: int, last: int, buffer: torch.Tensor) -> torch.Tensor:
        shard, number = self._place[tensor.data_ptr()]
        live_rows = tensor[first:last]
        prefetch_pages(live_rows.data_ptr(), live_rows.nbytes)
        # Rows that change during the copy were set aside first; the preserved values overwrite them.
        part = buffer[: last - first].copy_(live_rows)
        with self._changed:
            shard.restore_preserved(number, first, part)
        return part

    def _before_lookup(self, kernel: nn.Module, inputs: tuple) -> None:
        if not (self._begun and kernel.training and torch.is_grad_enabled()):
            return
        for name, ids in collect_table_ids(kernel, inputs[0]).items():
            self.preserve_rows(name, ids.long())


class _ShardSnapshot:
    """Snapshot of a rank's shard of a table.

    Args:
        live: Weights [rows, columns], and optimizer state [rows, columns] or [rows], which training changes.
    """

    def __init__(self, live: list[torch.Tensor]):
        self.live = [values.detach() for values in live]
        self._slots = torch.empty(0, dtype=torch.int32)  # row → index in `_aside`, or -1
        self._aside: list[torch.Tensor] = []  # buffers, one per tensor of `live`
        self._count = 0

    def begin(self) -> None:
        rows, size = len(self.live[0]), sum(values.nbytes for values in self.live)
        self._slots = torch.full((rows,), -1, dtype=torch.int32)
        capacity = max(MIN_ASIDE_BYTES, int(MAX_ASIDE_SHARE * size) - self._slots.nbytes) // (size // rows)
        # The system allocates a page of these buffers only when the page is first written.
        self._aside = [values.new_empty(min(rows, capacity), *values.shape[1:]) for values in self.live]
        self._count = 0

    def end(self) -> None:
        self._slots, self._aside = self._slots[:0].clone(), []

    def preserve_rows(self, rows: torch.Tensor) -> bool:
        """Preserve rows that are not yet preserved; return False if there is no space for them."""
        new = rows[self._slots[rows] < 0].unique()
        first, end = self._count, self._count + len(new)
        if end > len(self._aside[0]):
            return False
        for values, aside in zip(self.live, self._aside, strict=True):
            torch.index_select(values, 0, new, out=aside[first:end])
        self._slots[new] = torch.arange(first, end, dtype=torch.int32)
        self._count = end
        return True

    def restore_preserved(self, number: int, first: int, part: torch.Tensor) -> None:
        """Overwrite preserved rows in `part`, a copy of consecutive rows that starts with row `first`."""
        slots = self._slots[first : first + len(part)]
        preserved = (slots >= 0).nonzero().squeeze(1)
        part[preserved] = self._aside[number][slots[preserved].long()]


class HostStateBuffer:
    """Host memory for copies of the state, of the size of one copy; saves of tensors of the same shapes reuse it.

    Copies from a GPU run at full speed only into page-locked memory. By default, torch allocates pinned memory in
    powers of two, which could double the size, and keeps it for reuse.

    Attributes:
        note: Remark about the last copy for the user; None if there is none.
    """

    def __init__(self) -> None:
        self._unlock: weakref.finalize | None = None  # unlocks page-locked memory
        self._layout: list[tuple[torch.Size, torch.dtype, bool]] = []  # shape, dtype, True on a GPU
        self._places: list[torch.Tensor] = []
        self.note: str | None = None

    def copy(self, tensors: State) -> State:
        """Copy the tensors to host memory; the copies are valid until the next call or `close`.

        The method returns when the values have arrived, and waits only for the current stream of each device. If
        all tensors are in host memory, CUDA is not used.
        """
        self.note = None
        parts = {name: list_local_parts(value) for name, value in tensors.items()}
        flat_parts = [part for parts_of_value in parts.values() for part in parts_of_value]
        self._make_room([(part.shape, part.dtype, part.is_cuda) for part in flat_parts])
        copies: State = {}
        places = iter(self._places)
        for name, value in tensors.items():
            copied = [next(places).copy_(part.detach(), non_blocking=True) for part in parts[name]]
            copies[name] = replace_local_shards(value, copied) if isinstance(value, ShardedTensor) else copied[0]
        for device in {part.device for part in flat_parts if part.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return copies

    def close(self) -> None:
        """Release the memory; the last copy must no longer be used."""
        self._places, self._layout = [], []
        if self._unlock is not None:
            self._unlock()
        self._unlock = None

    def _make_room(self, layout: list[tuple[torch.Size, torch.dtype, bool]]) -> None:
        if layout == self._layout:
            return
        self.close()
        sizes = [prod(shape) * dtype.itemsize for shape, dtype, _ in layout]
        aligned_sizes = [-(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for size in sizes]
        memory = self._allocate(sum(aligned_sizes), locked=any(on_gpu for *_, on_gpu in layout))
        for (shape, dtype, _), size, block in zip(layout, sizes, memory.split(aligned_sizes), strict=True):
            self._places.append(block[:size].view(dtype).view(shape))
        self._layout = layout

    def _allocate(self, size: int, locked: bool) -> torch.Tensor:
        """Return host memory as a uint8 tensor [size], in dedicated pages that no other allocation shares.

        Args:
            size: Size in bytes.
            locked: True to page-lock the memory for fast copies from GPUs; after a failure, `note` is set.
        """
        pages = mmap(-1, max(1, size), flags=MAP_PRIVATE | MAP_ANONYMOUS)
        memory = torch.frombuffer(pages, dtype=torch.uint8)[:size]
        if not locked:
            return memory
        pages.madvise(MADV_HUGEPAGE)  # pages are locked one by one
        address, runtime = memory.data_ptr(), torch.cuda.cudart()
        if code := int(runtime.cudaHostRegister(address, len(pages), CUDA_HOST_REGISTER_PORTABLE)):
            self.note = (
                f"{size / 2**30:.1f} GiB for copies of checkpoints could not be page-locked "
                f"(cudaHostRegister failed with error {code}); steps wait longer for these copies"
            )
            return memory
        # Registered memory must be unregistered before it is unmapped; at exit, the CUDA driver unregisters it.
        self._unlock = weakref.finalize(self, runtime.cudaHostUnregister, address)
        self._unlock.atexit = False
        return memory
