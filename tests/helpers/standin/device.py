"""Device, streams and events of the stand-in, and the context that patches torch.cuda."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from time import perf_counter, sleep
from unittest.mock import patch

import torch

from standin.host_waits import HostWait, find_callers

CLOCK_HZ = 1.755e9  # clock rate of the streaming multiprocessors
# Explicit synchronizations, for which torch does not warn.
EXPLICIT_SYNCS = ("torch.cuda.synchronize", "Stream.synchronize", "Event.synchronize")


_numbers = count(1)  # of streams and events; 0 is the sanitizer's own default stream


def _note(kind: str, *numbers: int) -> None:
    """Pass an event to the checks of stream order, if they are active."""
    if StandInGpu.active is not None and StandInGpu.active.order is not None:
        StandInGpu.active.order.handle(kind, *numbers)


class StandInStream:
    """Simulated CUDA stream."""

    def __init__(self, device: object = None, priority: int = 0, **_: object):
        self.done_at, self.cuda_stream = 0.0, next(_numbers)
        self.device = StandInGpu.active.device if device is None else torch.device(device)  # read by TorchRec

    def work(self, seconds: float) -> None:
        """Add work to this stream."""
        self.done_at = max(perf_counter(), self.done_at) + seconds

    def wait_stream(self, other: StandInStream) -> None:
        self.wait_event(other.record_event())

    def wait_event(self, event: StandInEvent) -> None:
        self.done_at = max(self.done_at, event.time or 0.0)
        _note("stream_wait_for_event", self.cuda_stream, event.number)

    def record_event(self, event: StandInEvent | None = None) -> StandInEvent:
        event = event or StandInEvent()
        event.record(self)
        return event

    def query(self) -> bool:
        return perf_counter() >= self.done_at

    def is_capturing(self) -> bool:
        return False

    def synchronize(self) -> None:
        StandInGpu.active.wait("Stream.synchronize", self)


class StandInEvent:
    """Simulated CUDA event."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False):
        self.timed, self.time, self.stream, self.number = enable_timing, None, None, next(_numbers)

    def record(self, stream: StandInStream | None = None) -> None:
        self.stream = stream or StandInGpu.active.stream
        self.time = max(perf_counter(), self.stream.done_at)
        _note("record_state", self.number, self.stream.cuda_stream)

    def wait(self, stream: StandInStream | None = None) -> None:
        (stream or StandInGpu.active.stream).wait_event(self)

    def query(self) -> bool:
        finished = self.time is None or perf_counter() >= self.time
        if finished:
            _note("all_streams_wait_for_event", self.number)
        return finished

    def synchronize(self) -> None:
        if self.time is not None:
            StandInGpu.active.wait("Event.synchronize", until=self.time)
            _note("all_streams_wait_for_event", self.number)

    def elapsed_time(self, end: StandInEvent) -> float:
        if not (self.timed and end.timed):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self.time is None or end.time is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        if not (self.query() and end.query()):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return (end.time - self.time) * 1e3


@dataclass(frozen=True)
class DeviceProperties:
    """Result of torch.cuda.get_device_properties: the properties of an H100."""

    name: str = "stand-in for an NVIDIA H100"
    major: int = 9
    minor: int = 0
    total_memory: int = 80 << 30
    multi_processor_count: int = 132
    L2_cache_size: int = 50 << 20


class StandInGpu:
    """Simulated GPUs visible to this process, which uses one of them.

    Attributes:
        index: index of the GPU in use.
        count: number of visible GPUs.
        waits: all waits of the host for the device, in order.
        warns: if True, a wait also emits a warning (torch.cuda.set_sync_debug_mode).
        order: checks of the order of streams (stream_order.check_stream_order), or None.
    """

    active: StandInGpu | None = None

    def __init__(self, index: int = 0, count: int = 1):
        self.index, self.count = index, count
        self.waits: list[HostWait] = []
        self.warns = False
        self.order = None
        self.default_stream = StandInStream(self.device)
        self._current = threading.local()
        self._pinned: dict[int, tuple[int, object]] = {}  # address → bytes, what keeps it

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.index)

    @property
    def stream(self) -> StandInStream:
        """The current stream of this thread."""
        return getattr(self._current, "stream", None) or self.default_stream

    @contextmanager
    def on_stream(self, stream: StandInStream | None) -> Iterator[None]:
        before = self.stream
        self._current.stream = stream or before
        try:
            yield
        finally:
            self._current.stream = before

    def work(self, seconds: float) -> None:
        """Add work to the current stream."""
        self.stream.work(seconds)

    def wait(self, what: str, stream: StandInStream | None = None, until: float | None = None) -> None:
        """Make the host wait for a stream (default: the current stream)."""
        if until is None:
            until = (stream or self.stream).done_at
            _note("all_streams_wait_for_stream", (stream or self.stream).cuda_stream)
        drains = perf_counter() < self.default_stream.done_at <= until
        outside, ours = find_callers()
        self.waits.append(HostWait(what, outside, ours[0] if ours else "", ours, drains))
        if self.warns and what not in EXPLICIT_SYNCS:
            warnings.warn("called a synchronizing CUDA operation", stacklevel=2)
        if (rest := until - perf_counter()) > 0:
            sleep(rest)

    def synchronize(self) -> None:
        _note("sync_all_streams")
        self.wait("torch.cuda.synchronize", until=max(s.done_at for s in (self.stream, self.default_stream)))

    # Pinned host memory

    def pin(self, address: int, size: int, keep: object = None) -> None:
        self._pinned[address] = (size, keep)

    def unpin(self, address: int) -> None:
        del self._pinned[address]

    def is_pinned(self, address: int) -> bool:
        pinned = self._pinned.copy()  # other threads pin meanwhile
        return any(start <= address < start + max(1, size) for start, (size, _) in pinned.items())

    @property
    def pinned_bytes(self) -> int:
        """Pinned bytes. torch rounds its allocations up to powers of two; registered memory is exact."""
        return sum(
            size if keep is None else 1 << (size - 1).bit_length() for size, keep in self._pinned.copy().values()
        )


class _Runtime:
    """Subset of torch.cuda.cudart() that raytrec uses."""

    class cudaError:
        success = 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        StandInGpu.active.pin(address, size)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        StandInGpu.active.unpin(address)
        return 0


@contextmanager
def use_stand_in_gpu(index: int = 0, count: int = 1) -> Iterator[StandInGpu]:
    """Give this process simulated GPUs inside the block.

    Args:
        index: index of the GPU in use.
        count: number of visible GPUs.
    """
    from standin.group import use_stand_in_nccl
    from standin.kernels import use_cpu_kernels
    from standin.tensor import create_tensors_on_device

    gpu = StandInGpu(index, count)
    with ExitStack() as stack:
        stack.enter_context(patch.object(StandInGpu, "active", gpu))
        for name, value in _torch_cuda(gpu).items():
            stack.enter_context(patch.object(torch.cuda, name, value))
        for name, value in _torch_accelerator(gpu).items():
            stack.enter_context(patch.object(torch.accelerator, name, value))
        # torch reads the NCCL version when it logs an error.
        stack.enter_context(patch.object(torch.cuda.nccl, "version", lambda: (2, 29, 7)))
        for context in (create_tensors_on_device(gpu), use_stand_in_nccl(), use_cpu_kernels()):
            stack.enter_context(context)
        yield gpu


def _torch_accelerator(gpu: StandInGpu) -> dict[str, object]:
    return {
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "is_available": lambda: True,
        "device_count": lambda: gpu.count,
        "current_device_index": lambda: gpu.index,
        "current_stream": lambda device=None: gpu.stream,
        "synchronize": lambda device=None: gpu.synchronize(),
    }


def _torch_cuda(gpu: StandInGpu) -> dict[str, object]:
    def set_device(device: object) -> None:
        gpu.index = torch.device(device).index or 0 if not isinstance(device, int) else device

    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "device_count": lambda: gpu.count,
        "current_device": lambda: gpu.index,
        "set_device": set_device,
        "get_device_properties": lambda device=None: DeviceProperties(),
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_name": lambda device=None: DeviceProperties.name,
        "mem_get_info": lambda device=None: (60 << 30, DeviceProperties.total_memory),
        "memory_allocated": lambda device=None: 1 << 30,
        "memory_reserved": lambda device=None: 2 << 30,
        "max_memory_allocated": lambda device=None: 1 << 30,
        "max_memory_reserved": lambda device=None: 2 << 30,
        "reset_peak_memory_stats": lambda device=None: None,
        "memory_stats": lambda device=None: {},
        "empty_cache": lambda: None,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "Stream": StandInStream,
        "Event": StandInEvent,
        "stream": gpu.on_stream,
        "current_stream": lambda device=None: gpu.stream,
        "default_stream": lambda device=None: gpu.default_stream,
        "synchronize": lambda device=None: gpu.synchronize(),
        "cudart": _Runtime,
        "_sleep": lambda cycles: gpu.work(cycles / CLOCK_HZ),
        "set_sync_debug_mode": lambda mode: setattr(gpu, "warns", mode not in (0, "default")),
    }
