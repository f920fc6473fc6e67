"""Time that passes only where a test advances it: what depends on time is then the same on a slow machine."""

from contextlib import AbstractContextManager
from time import perf_counter
from unittest.mock import patch


class Time:
    """Stands in for time.perf_counter and time.sleep; each look at it takes a microsecond."""

    def __init__(self) -> None:
        self.now = perf_counter()

    def look(self) -> float:
        self.now += 1e-6
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def of(self, module: object, *names: str) -> AbstractContextManager:
        """A context in which a module's functions `names` (perf_counter, sleep) are this one's."""
        functions = {"perf_counter": self.look, "sleep": self.sleep}
        return patch.multiple(module, **{name: functions[name] for name in names})


def simulated() -> AbstractContextManager:
    """A context in which the stand-in's streams work and wait in such time."""
    from standin import device

    return Time().of(device, "perf_counter", "sleep")
