"""Waiting for something to happen, instead of for a time."""

from collections.abc import Callable
from time import monotonic, sleep
from typing import Any


def wait_for(condition: Callable[[], Any], what: str, timeout_s: float = 60) -> Any:
    """Calls `condition` until it is true; its value. Fails with `what` after `timeout_s`."""
    deadline = monotonic() + timeout_s
    while not (value := condition()):
        assert monotonic() < deadline, f"{what}: not within {timeout_s} s"
        sleep(0.02)
    return value
