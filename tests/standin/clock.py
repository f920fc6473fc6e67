"""Time that passes only where a test says so: what depends on time is then the same on a slow machine."""

from unittest.mock import patch


class Time:
    """Stands in for time.perf_counter and time.sleep; each look at it takes a microsecond."""

    def __init__(self) -> None:
        self.now = 0.0

    def look(self) -> float:
        self.now += 1e-6
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def of(self, module: object, *names: str):
        """A context in which a module's functions `names` (perf_counter, sleep) are this one's."""
        functions = {"perf_counter": self.look, "sleep": self.sleep}
        return patch.multiple(module, **{name: functions[name] for name in names})
