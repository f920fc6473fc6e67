"""Where a rank's time goes, by phases."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import get_ident
from time import perf_counter
from typing import Any

import torch
from torch import nn

from raytrec.common.messages import PHASES

SETTLE = 500  # intervals between CUDA events that are kept before those that have passed are read


class Phases:
    """Seconds of each phase, exclusive: a phase inside another stops the other's clock.

    On CPU they are those of this thread. On CUDA they are the time between two events on the stream on which
    the model computes (the one that was current when this was made): how long it computed what it was given
    in a phase, or stood idle because the host was in it. Events of one stream pass in their order, whichever
    stream the host uses in between; so no phase is negative, and all add up to the time between the first
    event and the last. What the host waits for (data, ids) while that stream still computes costs no time.

    Args:
        device: of the rank.
    """

    def __init__(self, device: torch.device):
        self._cuda, self._thread = device.type == "cuda", get_ident()
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._current, self._running = "other", False
        self._stream = torch.cuda.current_stream(device) if self._cuda else None
        self._mark: Any = None
        self._passed: deque[tuple[str, Any, Any]] = deque()  # phase, its first event, its last

    @property
    def current(self) -> str:
        """The phase that the step is in."""
        return self._current

    def resume(self) -> None:
        """Training starts or continues."""
        self._mark, self._current, self._running = self._now(), "other", True

    def pause(self) -> None:
        """Training pauses, for an evaluation or at its end."""
        if self._running:
            self._switch("other")
        self._running = False

    def take(self) -> dict[str, float]:
        """Seconds of each phase since the last call."""
        if self._running:
            self._switch(self._current)
        self._settle(wait=True)
        taken, self._seconds = self._seconds, dict.fromkeys(PHASES, 0.0)
        return taken

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A block that belongs to a phase."""
        outer = self.enter(name)
        try:
            yield
        finally:
            self.leave(outer)

    def enter(self, name: str) -> str | None:
        """Begins a phase; returns the argument of `leave` at its end."""
        if not self._running:
            return None
        outer = self._current
        self._switch(name)
        return outer

    def leave(self, outer: str | None) -> None:
        """Goes back to the phase around one that has ended."""
        if outer is not None:
            self._switch(outer)

    def waits(self, wait: Callable) -> Callable:
        """A wait for other ranks that belongs to "collectives", unless what it is for has a phase."""

        def timed(*args: Any, **options: Any) -> Any:
            if get_ident() != self._thread or self._current == "input_exchange":
                return wait(*args, **options)
            with self.phase("collectives"):
                return wait(*args, **options)

        return timed

    @property
    def standing(self) -> str | None:
        """The phase that a GPU's stream has not finished; None: it has, or on CPU. From any thread."""
        unfinished = (phase for phase, _, last in list(self._passed) if not last.query())
        if (phase := next(unfinished, None)) is not None or self._stream is None:
            return phase
        return None if self._stream.query() else self._current

    def _switch(self, to: str) -> None:
        now = self._now()
        if self._cuda:
            self._passed.append((self._current, self._mark, now))
            if len(self._passed) > SETTLE:
                self._settle(wait=False)
        else:
            self._seconds[self._current] += now - self._mark
        self._mark, self._current = now, to

    def _now(self) -> Any:
        if not self._cuda:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def _settle(self, wait: bool) -> None:
        """Reads the CUDA events that have passed.

        Args:
            wait: for all of them.
        """
        if wait and self._passed:
            self._passed[-1][2].synchronize()
        while self._passed and self._passed[0][2].query():
            phase, first, last = self._passed.popleft()
            self._seconds[phase] += first.elapsed_time(last) / 1e3


def time_tables(kernels: Iterable[nn.Module], phases: Phases) -> None:
    """Counts the work of kernels as "tables": their lookups, and their part of backward.

    Args:
        kernels: features → pooled embeddings; see compat.torchrec_.sharded_kernels.
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
                _last(pooled.grad_fn).register_hook(end)

        kernel.register_forward_pre_hook(begin)
        kernel.register_forward_hook(after)


def _last(node: torch.autograd.graph.Node) -> torch.autograd.graph.Node:
    """The last node of a kernel's backward: the one before the tables' AccumulateGrad, if they have one."""
    while len(following := [n for n, _ in node.next_functions if n is not None]) == 1:
        if "AccumulateGrad" in following[0].name():
            break
        node = following[0]
    return node
