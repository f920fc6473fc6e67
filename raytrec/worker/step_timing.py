"""Measure the phases of a rank's steps (common.messages.PHASES), its speed, and its floating-point operations."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import get_ident
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import flop_registry

from raytrec.common.collectives import Peers
from raytrec.common.messages import PHASES
from raytrec.compat.torch_ import EveryOperator, describe_operator
from raytrec.planning.machines import find_gpu

# torch's attention on CPU computes the same matrix products as on GPUs, but has no entry in flop_registry.
CPU_ATTENTION = {
    getattr(torch.ops.aten, f"_scaled_dot_product_flash_attention_for_cpu{end}"): getattr(
        torch.ops.aten, f"_scaled_dot_product_flash_attention{end}"
    )
    for end in ("", "_backward")
}
MAX_PENDING_INTERVALS = 500  # maximum number of CUDA intervals kept before finished ones are read


class PhaseTimer:
    """Timer of the exclusive time in each phase: entering a phase stops the clock of the enclosing phase.

    On CPU, phases are measured by the host's clock. On CUDA, a phase is the time between two events on the
    stream on which the model computes (the current stream in the constructor). In this time, the stream runs
    the work queued in the phase, or is idle while the host is in the phase. Events of one stream complete in
    order, regardless of the streams that the host uses in between. Therefore no phase is negative, and all
    phases add up to the time between the first and the last event. Waits of the host (for data or ids) take
    no time while the stream is still computing.

    Args:
        device: Device of the rank.

    Attributes:
        current: Current phase of the step.
    """

    def __init__(self, device: torch.device):
        self._cuda, self._thread = device.type == "cuda", get_ident()
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self.current, self._running = "other", False
        self._stream = torch.cuda.current_stream(device) if self._cuda else None
        self._mark: Any = None
        self._intervals: deque[tuple[str, Any, Any]] = deque()  # (phase, first event, last event)

    def resume(self) -> None:
        """Start or continue the clock for training."""
        self._mark, self.current, self._running = self._now(), "other", True

    def pause(self) -> None:
        """Stop the clock during an evaluation or at the end of training."""
        if self._running:
            self._switch("other")
        self._running = False

    def take(self) -> dict[str, float]:
        """Return the seconds spent in each phase since the last call; on CUDA, wait for the work queued in them."""
        if self._running:
            self._switch(self.current)
        self._add_intervals(wait=True)
        seconds, self._seconds = self._seconds, dict.fromkeys(PHASES, 0.0)
        return seconds

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Return a context manager that counts the time of its block as a phase."""
        outer = self.enter(name)
        try:
            yield
        finally:
            self.leave(outer)

    def enter(self, name: str) -> str | None:
        """Enter a phase, and return the enclosing phase, to be passed to `leave`; None while the clock is stopped."""
        if not self._running:
            return None
        outer = self.current
        self._switch(name)
        return outer

    def leave(self, outer: str | None) -> None:
        """Return to the enclosing phase, the result of `enter`; do nothing if it is None."""
        if outer is not None:
            self._switch(outer)

    def waits(self, wait: Callable) -> Callable:
        """Wrap a function that waits for other ranks, so that its time counts as the phase "collectives".

        Calls in the phase "input_exchange" or from other threads remain in the current phase.
        """

        def timed(*args: Any, **options: Any) -> Any:
            if get_ident() != self._thread or self.current == "input_exchange":
                return wait(*args, **options)
            with self.phase("collectives"):
                return wait(*args, **options)

        return timed

    @property
    def unfinished_phase(self) -> str | None:
        """Return the first phase that the GPU's stream has not finished; can be called from any thread.

        The result is None if all phases are finished or the device is a CPU.
        """
        unfinished = (phase for phase, _, last in list(self._intervals) if not last.query())
        if (phase := next(unfinished, None)) is not None or self._stream is None:
            return phase
        return None if self._stream.query() else self.current

    def _switch(self, to: str) -> None:
        now = self._now()
        if self._cuda:
            self._intervals.append((self.current, self._mark, now))
            if len(self._intervals) > MAX_PENDING_INTERVALS:
                self._add_intervals(wait=False)
        else:
            self._seconds[self.current] += now - self._mark
        self._mark, self.current = now, to

    def _now(self) -> Any:
        if not self._cuda:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def _add_intervals(self, wait: bool) -> None:
        """Add the duration of each interval whose CUDA events have completed to its phase.

        Args:
            wait: True to wait for all events.
        """
        if wait and self._intervals:
            self._intervals[-1][2].synchronize()
        while self._intervals and self._intervals[0][2].query():
            phase, first, last = self._intervals.popleft()
            self._seconds[phase] += first.elapsed_time(last) / 1e3


def time_lookups(kernels: Iterable[nn.Module], phases: PhaseTimer) -> None:
    """Register hooks that count the time of the kernels' lookups and of their backward pass as the phase "tables".

    Args:
        kernels: Modules that look up embeddings; see compat.torchrec_.iterate_sharded_kernels.
        phases: Timer to which the time is added.
    """
    for kernel in kernels:
        outer: list[str | None] = []

        def begin(*_: Any, outer: list = outer) -> None:
            outer.append(phases.enter("tables"))

        def end(*_: Any, outer: list = outer) -> None:
            phases.leave(outer.pop())

        def after(_: nn.Module, __: Any, pooled: torch.Tensor, begin=begin, end=end) -> None:
            end()
            if pooled.grad_fn is not None:
                pooled.grad_fn.register_prehook(begin)
                _find_last_node(pooled.grad_fn).register_hook(end)

        kernel.register_forward_pre_hook(begin)
        kernel.register_forward_hook(after)


def _find_last_node(node: torch.autograd.graph.Node) -> torch.autograd.graph.Node:
    """Return the last node in a kernel's backward graph, before the tables' AccumulateGrad if there is one."""
    while len(following := [n for n, _ in node.next_functions if n is not None]) == 1:
        if "AccumulateGrad" in following[0].name():
            break
        node = following[0]
    return node


def compute_flop_rates(
    flops: int | None, rows: int, rows_per_s: float | None, device: torch.device, precision: str
) -> dict[str, float]:
    """Return train.flops_per_s and, on known GPUs, train.mfu; {} if `flops` or `rows_per_s` is None.

    train.flops_per_s is the total of all ranks. train.mfu (model FLOP utilization) is the share of the GPUs' peak rate.

    This is a collective operation: every rank must call it.

    Args:
        flops: Operations of this rank in a step; None if they were not counted.
        rows: Number of rows in this step over all ranks.
        rows_per_s: Training speed of all ranks; None if unknown.
        device: Device of the rank.
        precision: Precision of matrix products (train.matmul).
    """
    if flops is None or rows_per_s is None:
        return {}
    peers = Peers(device)
    total = peers.sum(torch.tensor(float(flops), dtype=torch.float64)).item() / rows * rows_per_s
    rates = {"train.flops_per_s": total}
    gpu = find_gpu(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return rates | ({"train.mfu": total / peers.world / getattr(gpu, precision) / 1e12} if gpu else {})


class FlopCounter(EveryOperator):
    """Context manager that counts the floating-point operations of matrix products in its block.

    A multiplication and an addition are two operations. Products with padding, masked products and recomputed
    products are counted. Lookups, elementwise operations and compiled layers are not counted.

    Attributes:
        flops: Number of operations.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        _, operator, _ = describe_operator(func)
        if (count := flop_registry.get(CPU_ATTENTION.get(operator, operator))) is not None:
            self.flops += count(*args, **(kwargs or {}), out_val=out)
        return out


class Stopwatch:
    """Stopwatch for training that excludes pauses and the process's first step, which initializes everything.

    Attributes:
        seconds: Training time in seconds, over all restarts.
        rows: Number of rows processed during this time.
    """

    def __init__(self):
        self.seconds, self.rows, self._begun, self._last = 0.0, 0, False, 0.0

    def resume(self) -> None:
        """Continue after a pause."""
        self._last = perf_counter()

    def pause(self, device: Any) -> None:
        """Wait for a GPU's current stream, and add the time since the last step; do nothing on CPU or before a step."""
        if device.type == "cuda" and self._begun:
            torch.cuda.current_stream(device).synchronize()
            self.seconds += perf_counter() - self._last

    def step(self, rows: int) -> None:
        """Add the time and rows of a finished step; the first step of the process only starts the clock."""
        now = perf_counter()
        if self._begun:
            self.seconds += now - self._last
            self.rows += rows
        self._begun, self._last = True, now

    @property
    def rows_per_s(self) -> float | None:
        """Return the number of rows processed per second; None until a step has been timed."""
        return self.rows / self.seconds if self.seconds else None
