"""A copy of a run's state in host memory. Training continues while it is written."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from math import prod
from mmap import MADV_HUGEPAGE, MAP_ANONYMOUS, MAP_PRIVATE, mmap

import torch

from raytrec.checkpoint.state import State
from raytrec.compat.torch_ import ShardedTensor, local_parts, with_local_shards

ALIGNMENT = 64  # bytes: where a tensor may begin
PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every device


class HostCopy:
    """Room for one copy of the state, as large as that and no larger, which every save uses again.

    Copies from a GPU run at full speed into page-locked memory only. torch's pinned memory would be up to
    twice as much, as it comes in powers of two, and would never be given back.

    Attributes:
        note: about the last copy, for people; None: nothing.
    """

    def __init__(self) -> None:
        self._memory: _Memory | None = None
        self._layout: list[tuple[str, torch.Size, torch.dtype, bool]] = []
        self._places: dict[str, torch.Tensor] = {}
        self.note: str | None = None

    def copy(self, tensors: State) -> State:
        """The same names and values in host memory, until the next copy or `close`.

        It returns when the values have arrived, and waits for nothing but the streams that bring them: in a
        process whose tensors are all in host memory it does not touch CUDA.
        """
        self.note = None
        self._make_room(tensors)
        copies: State = {}
        for name, value in tensors.items():
            parts = [self._take(f"{name}/{i}", part) for i, part in enumerate(local_parts(value))]
            copies[name] = with_local_shards(value, parts) if isinstance(value, ShardedTensor) else parts[0]
        for device in {value.device for _, value in _plain(tensors) if value.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return copies

    def close(self) -> None:
        """Gives the memory back; the last copy must not be used any more."""
        self._places, self._layout = {}, []
        if self._memory is not None:
            self._memory.release()
        self._memory = None

    def _take(self, name: str, value: torch.Tensor) -> torch.Tensor:
        return self._places[name].copy_(value.detach(), non_blocking=True)

    def _make_room(self, tensors: State) -> None:
        layout = [(name, value.shape, value.dtype, value.is_cuda) for name, value in _plain(tensors)]
        if layout == self._layout:
            return
        self.close()
        starts, total = [], 0
        for _, shape, dtype, _ in layout:
            starts.append(total)
            total += -(-prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        self._memory = _Memory(total, locked=any(on_gpu for *_, on_gpu in layout))
        if self._memory.error:
            self.note = (
                f"{total / 2**30:.1f} GiB for the copies of checkpoints could not be page-locked "
                f"({self._memory.error}); steps wait longer for them"
            )
        for (name, shape, dtype, _), start in zip(layout, starts, strict=True):
            values = self._memory.bytes[start : start + prod(shape) * dtype.itemsize]
            self._places[name] = values.view(dtype).view(shape)
        self._layout = layout


class _Memory:
    """Host memory in separate pages.

    Attributes:
        bytes: uint8 [size].
        error: why it is not page-locked, though it was to be; None: it is.
    """

    def __init__(self, size: int, locked: bool):
        pages = mmap(-1, max(1, size), flags=MAP_PRIVATE | MAP_ANONYMOUS)
        if locked:
            pages.madvise(MADV_HUGEPAGE)  # locking goes page by page
        self.bytes = torch.frombuffer(pages, dtype=torch.uint8)[:size]
        self.error: str | None = None
        self._unlock: weakref.finalize | None = None
        if locked:
            self._lock(len(pages))

    def _lock(self, size: int) -> None:
        address, runtime = self.bytes.data_ptr(), torch.cuda.cudart()
        if code := int(runtime.cudaHostRegister(address, size, PORTABLE)):
            self.error = f"cudaHostRegister: error {code}"
            return
        # What is registered must not be unmapped before; at the process's end the driver sees to it.
        self._unlock = weakref.finalize(self, runtime.cudaHostUnregister, address)
        self._unlock.atexit = False

    def release(self) -> None:
        """Unlocks it; the pages go with the last tensor that uses them."""
        if self._unlock is not None:
            self._unlock()


def _plain(tensors: State) -> Iterator[tuple[str, torch.Tensor]]:
    """This rank's tensors, shards among them."""
    for name, value in tensors.items():
        yield from ((f"{name}/{i}", part) for i, part in enumerate(local_parts(value)))
