"""Where a rank's time goes: every moment of training belongs to one phase."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from time import perf_counter
from typing import Any

import torch

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

    def resume(self) -> None:
        """Training starts or continues."""
        self._mark, self._current, self._running = self._now(), "other", True

    def pause(self) -> None:
        """What follows is no training."""
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
        if not self._running:
            yield
            return
        outer = self._current
        self._switch(name)
        try:
            yield
        finally:
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
