"""Calls to a store that may not answer: when to try again, and what to say of it, once."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from time import monotonic

from raytrec.tracking.failures import may_pass, reason

FIRST_S, LONGEST_S = 1.0, 30.0
RECORDS, FILES = "records", "files"  # the two ways to a store: artifacts may be stored elsewhere
KEPT = "what there is to record is kept in the run folder, and written when it is back"
BACK = "MLflow is back; what waited is being written"


class Calls:
    """Makes calls, and keeps for each way to the store whether it works and when to try it again.

    Args:
        say: called with a sentence when the first way fails, and with another when all work again.

    Attributes:
        why: the last failure.
        dropped: calls that the store will never do.
    """

    def __init__(self, say: Callable[[str], None]):
        self._say, self._lock = say, Lock()
        self._pauses: dict[str, float] = {}  # way → seconds between the last two tries, where it fails
        self._next: dict[str, float] = {}
        self._longest_s: float | None = None
        self.why, self.dropped = "", 0

    def make(
        self,
        way: str,
        call: Callable[[], None],
        refused: Callable[[], None] | None = None,
        done: Callable[[], None] = lambda: None,
    ) -> bool:
        """Makes a call; False if it has to be made again later.

        Args:
            refused: called when the store will never do it; then there is nothing to be done later, either.
            done: called when the store has done it.
        """
        try:
            call()
        except Exception as error:
            if may_pass(error):
                self.failed(way, error)
                return False
            self.why = reason(error)
            (refused or self._drop)()
            return True
        done()
        self.worked(way)
        return True

    def failing(self, way: str) -> bool:
        """Whether the last call failed."""
        return way in self._pauses

    def wait_s(self, way: str) -> float:
        """Seconds until the way is to be tried; 0 where it works."""
        return max(0.0, self._next.get(way, 0.0) - monotonic())

    def hurry(self) -> None:
        """All ways are to be tried now, and then every second."""
        with self._lock:
            self._longest_s = FIRST_S
            self._next.clear()

    def failed(self, way: str, error: Exception) -> None:
        """The way does not work: to be tried again after 1 s, 2 s, … 30 s."""
        with self._lock:
            self.why, new = reason(error), not self._pauses
            self._pauses[way] = min(2 * self._pauses.get(way, FIRST_S / 2), self._longest_s or LONGEST_S)
            self._next[way] = monotonic() + self._pauses[way]
        if new:
            does_not = "does not answer" if way == RECORDS else "does not take files"
            self._say(f"MLflow {does_not} ({self.why}): {KEPT}")

    def worked(self, way: str) -> None:
        """The way works; said when none is left that does not."""
        with self._lock:
            self._next.pop(way, None)
            over = self._pauses.pop(way, None) is not None and not self._pauses
        if over:
            self._say(BACK)

    def _drop(self) -> None:
        self.dropped += 1
