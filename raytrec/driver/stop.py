"""Ctrl-C and SIGTERM on the driver's side."""

from __future__ import annotations

import signal
from threading import Timer
from time import monotonic
from typing import Any

from raytrec.common.messages import Command

SAME_S = 1.0  # `timeout` and others send each signal twice: to the process, and to its group


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM ended a group.

    Attributes:
        signal: which one.
        step: at which its state was saved; None when it was not.
    """

    def __init__(self, signal: int, step: int | None):
        super().__init__(f"by signal {signal}")
        self.signal, self.step = signal, step


class Stop:
    """Ctrl-C and SIGTERM while a group runs: the first asks it to save and end, a second ends it at once.

    Ray Train 2.60 installs a handler of its own that ends the workers and then the process, without a word.

    Args:
        patience_s: seconds until it is ended although it has not saved; 0: at once.
    """

    def __init__(self, coordinator: Any, patience_s: float):
        self._coordinator, self._patience_s = coordinator, patience_s
        self.signal: int | None = None
        self._before: dict[int, Any] = {}
        self._asked_at = 0.0
        self._timer: Timer | None = None

    def install(self, controller: Any) -> None:
        """Called by the trainer, in the main thread, when it has a controller."""
        self._controller = controller
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _frame: Any) -> None:
        again = self.signal is not None
        if again and monotonic() - self._asked_at < SAME_S:
            return None
        self.signal, self._asked_at = number, monotonic()
        if again or not self._patience_s:
            return self.abort()
        self._coordinator.ask.remote(Command.STOP, signal.Signals(number).name)
        self._timer = Timer(self._patience_s, self.abort)
        self._timer.daemon = True
        self._timer.start()

    def abort(self) -> None:
        """Ends the group at once."""
        self._controller.abort.remote()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        if self._timer:
            self._timer.cancel()
        for number, handler in self._before.items():
            signal.signal(number, handler)
