"""Checks of the order of streams, by the analysis of torch's CUDA sanitizer (torch/cuda/_sanitizer.py).

The sanitizer receives the stand-in's kernel launches, copies, events and waits, and reports accesses to the same
memory on two streams without an order. As in CUDA's caching allocator, a freed block belongs to the stream on
which it was allocated. The next allocation on that stream overwrites all its freed blocks, which is the worst case
of reuse, except accesses by streams that `record_stream` has named.

Not seen: NCCL's internal streams, writes that a schema does not declare (FBGEMM's updates in backward), and the
order of host threads: a wait of one thread counts for all of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from threading import RLock
from typing import Any
from unittest.mock import patch

import torch
from torch.cuda._sanitizer import FACTORY_FUNCTION_REGEX, ArgumentHandler, EventHandler

from standin.device import StandInGpu, StandInStream
from standin.dispatch import Place, find_storage


class _Block:
    """Memory of a storage, attached to it; it is freed with the storage."""

    def __init__(self, number: int, stream: int, freed: deque[_Block]):
        self.number, self.stream, self.freed = number, stream, freed
        self.recorded: set[int] = set()  # streams of record_stream

    def __del__(self) -> None:
        self.freed.append(self)


class _Arguments(ArgumentHandler):
    """Memory that an operator reads and writes: device storages and pinned host storages."""

    def __init__(self, order: StreamOrder):
        super().__init__()
        self.order = order

    def _handle_argument(self, value: Any, is_write: bool, metadata_only: bool, name: Any = None, is_output=False):
        if isinstance(value, torch.Tensor) and (number := self.order.find_block(value)) is not None:
            if is_write:
                self.dataptrs_written.add(number)
            elif not metadata_only:
                self.dataptrs_read.add(number)
            self.tensor_aliases.setdefault(number, []).extend([name] if name else [])


class StreamOrder:
    """Analysis of the accesses of one GPU.

    Attributes:
        errors: descriptions of accesses without an order, once per pair of operators and streams.
    """

    def __init__(self, gpu: StandInGpu):
        self.gpu, self.errors, self._lock = gpu, [], RLock()
        self._handler, self._numbers, self._freed = EventHandler(), count(1), deque()
        self._pools: dict[int, list[_Block]] = {}

    def find_block(self, tensor: torch.Tensor) -> int | None:
        """Return the number of a tensor's memory, which is allocated on the current stream if it is new."""
        storage = find_storage(tensor)
        if storage is None or not storage.nbytes():
            return None
        if not hasattr(storage, "block"):
            pinned = getattr(storage, "place", Place.HOST) is Place.HOST and self.gpu.is_pinned(storage.data_ptr())
            if not pinned and getattr(storage, "place", None) is not Place.DEVICE:
                return None
            storage.block = _Block(next(self._numbers), self._allocate(pinned), self._freed)
        return storage.block.number

    def _allocate(self, pinned: bool) -> int:
        """Overwrite the freed blocks of the current stream, and return the stream."""
        stream = self.gpu.stream.cuda_stream
        while self._freed:
            block = self._freed.popleft()
            self._pools.setdefault(block.stream, []).append(block)
            info = self._handler.tensors_accessed.accesses.get(block.number)
            if info is not None:
                info.reads = [access for access in info.reads if access.stream not in block.recorded]
                info.write = None if info.write and info.write.stream in block.recorded else info.write
        if pinned:  # torch's allocator of pinned memory records events of its copies
            return -1
        blocks = {block.number: ["freed"] for block in self._pools.pop(stream, [])}
        if blocks:
            self._launch(set(), set(blocks), "allocation", blocks)
            for number in blocks:
                self._handler.tensors_accessed.delete_tensor(number)
        return stream

    def run(self, func: Any, args: tuple, kwargs: dict, out: Any) -> None:
        """Record the accesses of an operator that has run on the current stream."""
        with self._lock:
            arguments, is_factory = _Arguments(self), bool(FACTORY_FUNCTION_REGEX.match(func._schema.name))
            arguments.parse_inputs(func._schema, args, kwargs, is_factory=is_factory)
            arguments.parse_outputs(func._schema, out, is_factory=is_factory)
            written = arguments.dataptrs_written
            if written or arguments.dataptrs_read:
                name = func._schema.name
                self._launch(arguments.dataptrs_read - written, written, name, arguments.tensor_aliases)

    def add_tensor(self, tensor: torch.Tensor) -> None:
        """Record a copy into a device tensor on the current stream, if the tensor is new."""
        with self._lock:
            if hasattr(find_storage(tensor), "block") or (number := self.find_block(tensor)) is None:
                return
            self._launch(set(), {number}, "copy to the device", {number: ["new"]})

    def _launch(self, read: set[int], written: set[int], name: str, aliases: dict[int, list[str]]) -> None:
        stream = self.gpu.stream.cuda_stream
        for error in self._handler._handle_kernel_launch(stream, read, written, set(), name, aliases):
            now, before = error.current_access, error.previous_access
            self._report(f"{now.operator} on stream {now.stream}{_find_caller(now)}", before)

    def _report(self, text: str, before: Any) -> None:
        text += f" is not ordered after {before.operator} on stream {before.stream}{_find_caller(before)}"
        if text not in self.errors:
            self.errors.append(text)

    def access_on_host(self, tensor: torch.Tensor, writes: bool = False) -> None:
        """Check that the GPU has finished its accesses to pinned memory that the host reads or writes."""
        with self._lock:
            storage = find_storage(tensor)
            block = getattr(storage, "block", None)
            info = block and self._handler.tensors_accessed.accesses.get(block.number)
            if not info or getattr(storage, "place", None) is Place.DEVICE:
                return
            for access in [*([info.write] if info.write else []), *(info.reads if writes else [])]:
                if access.seq_num > self._handler.syncs.host_sync_state.get(access.stream, 0):
                    self._report("the host", access)

    def record_stream(self, tensor: torch.Tensor, stream: StandInStream) -> None:
        with self._lock:
            if self.find_block(tensor) is not None:
                find_storage(tensor).block.recorded.add(stream.cuda_stream)

    def handle(self, kind: str, *numbers: int) -> None:
        """Pass an event of a stream to the sanitizer: the name of a method of StreamSynchronizations."""
        with self._lock:
            getattr(self._handler.syncs, kind)(*numbers)


def _find_caller(access: Any) -> str:
    """Return the innermost caller of an access outside the stand-in and torch, as " (FILE:LINE)"."""
    for frame in reversed(access.stack_trace):
        if not any(part in frame.filename for part in ("/standin/", "/torch/", "contextlib")):
            return f" ({'/'.join(frame.filename.split('/')[-2:])}:{frame.lineno})"
    return ""


@contextmanager
def check_stream_order() -> Iterator[StreamOrder]:
    """Analyze the order of streams of the active stand-in inside the block."""
    gpu = StandInGpu.active
    with patch.object(gpu, "order", StreamOrder(gpu)):
        yield gpu.order
