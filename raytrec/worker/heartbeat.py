"""The thread that reports progress and receives commands."""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event, Thread, get_ident, main_thread
from time import monotonic
from typing import Any, TypeVar

from raytrec.common.errors import RunError
from raytrec.common.messages import BEAT_S, Command

T = TypeVar("T")
REPLY_S = 10.0  # that the coordinator may take to answer
PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"  # folder of raytrec; its checkout may have any name
# A thread with a frame in one of these files waits for other ranks.
WAITS = ("torch/distributed/", "torchrec/distributed/", "torch/autograd/graph.py")


class Heartbeat:
    """Reports this rank's progress; ends the process when the coordinator commands it, or is out of reach.

    Args:
        lease_s: seconds without an answer after which this process ends itself. A rank that is cut off does
            not hear that the group has been given up, and must not write when the network is back.
        every_s: seconds between two heartbeats (common.messages.beat_s).

    Attributes:
        command: what the coordinator wants.
        phase: what this rank is doing; see coordinator.SLOW_PHASES.
    """

    def __init__(self, coordinator: Any, attempt: str, rank: int, lease_s: float, every_s: float = BEAT_S):
        self._coordinator, self._attempt, self._rank, self._lease_s = coordinator, attempt, rank, lease_s
        self._every_s = every_s
        self.command, self.phase, self._ticks, self._step = Command.GO, "start", 0, 0
        self._going = False  # the first step sets everything up, and may take long
        self._unfinished: Callable[[], tuple[int, str] | None] = lambda: None
        # The thread that trains: Ray Train runs the worker's function in one that is not the main thread.
        self._watched = get_ident()
        self._over = Event()
        self._thread = Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def watch_device(self, unfinished: Callable[[], tuple[int, str] | None]) -> None:
        """From now on also reports how far the device is.

        Args:
            unfinished: asked, from another thread, for the step that this rank's GPU has not finished, and
                the phase of training ("" where that is not known); None: it has finished all, or is a CPU.
        """
        self._unfinished = unfinished

    def watch_compiler(self) -> None:
        """From now on also notes when torch compiles: that takes as long as the start, whenever it is."""
        from raytrec.compat.torch_ import watch_compiler  # which imports torch

        phases: list[str] = []

        def begin() -> None:
            phases.append(self.phase)
            self.tick("start")

        watch_compiler(begin, lambda: self.tick(phases.pop()))

    def tick(self, phase: str | None = None, step: int | None = None) -> None:
        """Notes progress, with another phase or step if given."""
        self._ticks += 1
        self.phase = phase or self.phase
        if step is not None:
            self._step, self._going = step, True

    def count_batches(self, batches: Iterator[T], after: str = "step") -> Iterator[T]:
        """The same iterator; each batch is progress, and waiting for it is the phase "data"."""
        while True:
            self.tick("data")
            batch = next(batches, None)
            self.tick(after if self._going else "start")
            if batch is None:
                return
            yield batch

    def confirm(self) -> None:
        """Asks whether this group is still the run's, before something is written that counts.

        Raises:
            RunError: it has been given up, or the coordinator does not answer.
        """
        import ray

        try:
            current = ray.get(self._coordinator.current.remote(self._attempt), timeout=REPLY_S)
        except ray.exceptions.RayError as error:  # no answer in time included
            raise RunError("the driver does not answer, and may have given this group up") from error
        if not current:
            raise RunError("this group of workers has been given up")

    def close(self) -> None:
        """The rank has ended well."""
        self._over.set()
        self._thread.join(5)

    def send(self, where: str = "", waiting: bool = False, unfinished: tuple[int, str] | None = None) -> Any:
        """Report this rank's progress and return the reference of the command.

        Called when the rank fails, so that the coordinator knows the step at which it did.
        """
        return self._coordinator.beat.remote(
            self._attempt, self._rank, self._ticks, self._step, self.phase, where, waiting, unfinished
        )

    def _beat(self) -> None:
        import ray

        last, heard = -1, monotonic()
        while not self._over.wait(self._every_s):
            ticks, where, waiting, unfinished = self._ticks, "", False, None
            if ticks == last:
                (where, waiting), unfinished = _place(self._watched), self._unfinished()
            last = ticks
            try:
                beat = self.send(where, waiting, unfinished)
                command, heard = Command(ray.get(beat, timeout=REPLY_S)), monotonic()
            except (ray.exceptions.GetTimeoutError, ray.exceptions.ActorUnavailableError):
                if monotonic() - heard > self._lease_s:
                    self._end(f"the driver has not answered for {monotonic() - heard:.0f} s")
                continue
            except Exception:  # the driver has gone, and with it this rank's work
                return
            if command == Command.ABORT:
                self._end("this group of workers has been given up")
            self.command = command
        try:
            ray.get(self._coordinator.leave.remote(self._attempt, self._rank), timeout=10)
        except Exception:
            return

    def _end(self, why: str) -> None:
        """Ends the process, unless the rank has ended well; where its threads are goes to Ray's log of it."""
        if not self._over.is_set():
            print(f"rank {self._rank}: {why}", file=sys.stderr)
            faulthandler.dump_traceback(sys.stderr)
            os._exit(70)


def _place(thread: int) -> tuple[str, bool]:
    """Return the innermost frame of a thread, and True if raytrec's innermost frame waits for other ranks.

    Args:
        thread: identifier of a thread; the main thread is used if it has ended.

    Returns:
        "function, folder/file:line", or "" if there is no frame; whether the thread is in a collective.
    """
    frame = sys._current_frames().get(thread) or sys._current_frames().get(main_thread().ident)
    innermost, waiting = frame, False
    while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE) and not waiting:
        waiting = any(part in frame.f_code.co_filename for part in WAITS)
        frame = frame.f_back
    if innermost is None:
        return "", False
    file = "/".join(innermost.f_code.co_filename.split("/")[-2:])
    return f"{innermost.f_code.co_name}, {file}:{innermost.f_lineno}", waiting
