"""Simulated time that only tests advance, so that timing does not depend on the speed of the machine."""

from contextlib import AbstractContextManager
from time import perf_counter
from unittest.mock import patch


class SimulatedClock:
    """Replacement for time.perf_counter and time.sleep; each read advances the clock by 1 µs."""

    def __init__(self) -> None:
        self.now = perf_counter()

    def look(self) -> float:
        self.now += 1e-6
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def of(self, module: object, *names: str) -> AbstractContextManager:
        """Return a context that patches functions of a module (perf_counter, sleep) with this clock."""
        functions = {"perf_counter": self.look, "sleep": self.sleep}
        return patch.multiple(module, **{name: functions[name] for name in names})


def use_simulated_clock() -> AbstractContextManager:
    """Return a context in which the streams of the stand-in use simulated time."""
    from standin import device

    return SimulatedClock().of(device, "perf_counter", "sleep")
