"""Report a rank's progress to the coordinator and receive commands, in a background thread."""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from threading import Event, Thread, get_ident, main_thread
from time import monotonic
from typing import Any, TypeVar

from raytrec.common.errors import RunError
from raytrec.common.messages import HEARTBEAT_INTERVAL_S, Command

T = TypeVar("T")
REPLY_TIMEOUT_S = 10.0  # timeout for replies from the coordinator
PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"  # folder of the package raytrec; a checkout may have any name


class Heartbeat:
    """Background thread that reports progress, and ends the process on command or if the driver is unreachable.

    Args:
        coordinator: Actor that receives the reports.
        attempt: Identifier of this worker group.
        rank: Rank of this process.
        lease_s: Seconds without a response after which this process ends itself. A rank that is cut off is not
            informed that the group has been abandoned, and must not write when the network recovers.
        every_s: Seconds between two heartbeats (common.messages.compute_heartbeat_interval).

    Attributes:
        command: Last command received from the coordinator.
        phase: Current activity of this rank, "step" or one of driver.coordinator.SLOW_PHASES.
        find_unfinished: Function that returns the first step that this rank's GPU has not finished, and its phase
            ("" if unknown); None if all steps are finished, or on CPU. Reports include the result if the rank has made
            no progress.
        is_exchanging: Function that returns True while this rank's next batch is in an exchange of rows; reports then
            state that the rank waits for other ranks. Both functions are called from the heartbeat's thread.
    """

    def __init__(
        self, coordinator: Any, attempt: str, rank: int, lease_s: float, every_s: float = HEARTBEAT_INTERVAL_S
    ):
        self._coordinator, self._attempt, self._rank, self._lease_s = coordinator, attempt, rank, lease_s
        self._every_s = every_s
        self.command, self.phase, self._ticks, self._step = Command.GO, "start", 0, 0
        self._has_stepped = False  # False until the end of the first step, which may take long
        self.find_unfinished: Callable[[], tuple[int, str] | None] = lambda: None
        self.is_exchanging: Callable[[], bool] = lambda: False
        # Ray Train runs the worker function in this thread, which is not the main thread.
        self._watched = get_ident()
        self._over = Event()
        self._thread = Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def watch_compiler(self) -> None:
        """Report the phase "start" while torch compiles, because compilation may take as long as a start."""
        from raytrec.compat.torch_ import watch_compiler  # the module imports torch, which the driver does not load

        phases: list[str] = []

        def begin() -> None:
            phases.append(self.phase)
            self.tick("start")

        watch_compiler(begin, lambda: self.tick(phases.pop()))

    def tick(self, phase: str | None = None, step: int | None = None) -> None:
        """Record that the rank has made progress and, unless None, its new phase and number of completed steps."""
        self._ticks += 1
        self.phase = phase or self.phase
        if step is not None:
            self._step, self._has_stepped = step, True

    def count_batches(self, batches: Iterator[T], after: str = "step") -> Iterator[T]:
        """Yield the batches of an iterator, and record each batch as progress.

        Args:
            batches: Batches; the rank is in the phase "data" while it waits for a batch.
            after: Phase after each batch, once a training step has ended; until then, the phase is "start".
        """
        while True:
            self.tick("data")
            batch = next(batches, None)
            self.tick(after if self._has_stepped else "start")
            if batch is None:
                return
            yield batch

    def confirm(self) -> None:
        """Ask the coordinator whether this worker group still owns the run; call before a commit.

        Raises:
            RunError: The driver has abandoned the group, or the coordinator does not respond.
        """
        import ray

        try:
            current = ray.get(self._coordinator.current.remote(self._attempt), timeout=REPLY_TIMEOUT_S)
        except ray.exceptions.RayError as error:  # includes timeouts
            raise RunError(
                "the run's coordinator does not respond, and may have abandoned this worker group",
                where=f"rank {self._rank}",
            ) from error
        if not current:
            raise RunError("the driver has abandoned this worker group", where=f"rank {self._rank}")

    def close(self) -> None:
        """Stop the heartbeat, and tell the coordinator that this rank has finished its work; wait at most 5 s."""
        self._over.set()
        self._thread.join(5)

    def send(self, where: str = "", waiting: bool = False, unfinished: tuple[int, str] | None = None) -> Any:
        """Report this rank's progress, and return a Ray reference to the coordinator's command.

        The method is called directly when the rank fails, so that the coordinator knows the step of the
        failure.

        Args:
            where: Location of the training thread, "function, folder/file:line"; "" if the rank has made progress.
            waiting: True if the rank waits for other ranks at this location.
            unfinished: Result of `find_unfinished`; None if the rank has made progress.
        """
        return self._coordinator.beat.remote(
            self._attempt, self._rank, self._ticks, self._step, self.phase, where, waiting, unfinished
        )

    def _beat(self) -> None:
        import ray

        last_ticks, answered_at = -1, monotonic()
        while not self._over.wait(self._every_s):
            ticks, where, waiting, unfinished = self._ticks, "", False, None
            if ticks == last_ticks:
                (where, waiting), unfinished = _locate_thread(self._watched), self.find_unfinished()
                waiting |= self.phase == "data" and self.is_exchanging()
            last_ticks = ticks
            try:
                beat = self.send(where, waiting, unfinished)
                command, answered_at = Command(ray.get(beat, timeout=REPLY_TIMEOUT_S)), monotonic()
            except (ray.exceptions.GetTimeoutError, ray.exceptions.ActorUnavailableError):
                if monotonic() - answered_at > self._lease_s:
                    self._exit_process(f"the driver has not responded for {monotonic() - answered_at:.0f} s")
                continue
            except Exception:  # the driver has exited, and the rank's work is lost
                return
            if command == Command.ABORT:
                self._exit_process("the driver has abandoned this worker group")
            self.command = command
        try:
            ray.get(self._coordinator.leave.remote(self._attempt, self._rank), timeout=10)
        except Exception:
            return

    def _exit_process(self, reason: str) -> None:
        """End the process unless the rank has finished; the stacks of all threads are written to Ray's log."""
        if not self._over.is_set():
            print(f"rank {self._rank}: {reason}", file=sys.stderr)
            faulthandler.dump_traceback(sys.stderr)
            os._exit(70)


@cache
def _list_waiting_files() -> tuple[str, ...]:
    """Return files, and folders with a trailing separator; a thread with a frame in them waits for other ranks."""
    torch, torchrec = (Path(str(find_spec(name).origin)).parent for name in ("torch", "torchrec"))  # type: ignore
    return f"{torch}/distributed/", f"{torchrec}/distributed/", f"{torch}/autograd/graph.py"


def _locate_thread(thread: int) -> tuple[str, bool]:
    """Return the innermost frame of a thread, and True if the thread is waiting for other ranks.

    Args:
        thread: Identifier of the thread; the main thread is used if this thread has ended.

    Returns:
        "function, folder/file:line", or "" if no such thread exists; and True if the thread waits in a collective.
    """
    frame = sys._current_frames().get(thread) or sys._current_frames().get(main_thread().ident)
    innermost, waiting = frame, False
    while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE) and not waiting:
        waiting = frame.f_code.co_filename.startswith(_list_waiting_files())
        frame = frame.f_back
    if innermost is None:
        return "", False
    file = "/".join(innermost.f_code.co_filename.split("/")[-2:])
    return f"{innermost.f_code.co_name}, {file}:{innermost.f_lineno}", waiting
