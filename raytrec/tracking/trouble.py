"""A store that does not answer: when to try again, and what to say, once."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from time import monotonic

FIRST_S, LONGEST_S = 1.0, 30.0


class Trouble:
    """Keeps, for each way to the store, whether it works and when to try it again.

    Args:
        say: called with a sentence when the first way fails, and with another when all work again.
    """

    def __init__(self, say: Callable[[str], None]):
        self._say, self._lock = say, Lock()
        self._pauses: dict[str, float] = {}  # way → seconds between the last two tries
        self._next: dict[str, float] = {}
        self._longest_s = LONGEST_S

    def __contains__(self, way: str) -> bool:
        return way in self._pauses

    def wait_s(self, way: str) -> float:
        """Seconds until the way is to be tried; 0 where it works."""
        return max(0.0, self._next.get(way, 0.0) - monotonic())

    def hurry(self) -> None:
        """All ways are to be tried now, and then every second."""
        with self._lock:
            self._longest_s = FIRST_S
            self._next.clear()

    def failed(self, way: str, sentence: str) -> None:
        """The way does not work: to be tried again after 1 s, 2 s, … 30 s."""
        with self._lock:
            new = not self._pauses
            self._pauses[way] = min(2 * self._pauses.get(way, FIRST_S / 2), self._longest_s)
            self._next[way] = monotonic() + self._pauses[way]
        if new:
            self._say(sentence)

    def worked(self, way: str, sentence: str) -> None:
        """The way works; said when none is left that does not."""
        if way not in self._pauses:
            return
        with self._lock:
            del self._pauses[way]
            self._next.pop(way, None)
            over = not self._pauses
        if over:
            self._say(sentence)
