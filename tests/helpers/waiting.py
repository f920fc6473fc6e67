"""Polling for a condition instead of sleeping."""

from collections.abc import Callable
from time import monotonic, sleep
from typing import Any


def wait_for(condition: Callable[[], Any], what: str, timeout_s: float = 60) -> Any:
    """Call `condition` until its value is true and return the value. Fail with `what` after `timeout_s`."""
    deadline = monotonic() + timeout_s
    while not (value := condition()):
        assert monotonic() < deadline, f"{what}: not within {timeout_s} s"
        sleep(0.02)
    return value
