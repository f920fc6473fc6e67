"""A rank's side of the hub: a thread that sends heartbeats, and what all ranks agree on at each step."""

from __future__ import annotations

import faulthandler
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from threading import Event, Thread, main_thread
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from raytrec.common.errors import RunError
from raytrec.common.messages import BEAT_S, Command

if TYPE_CHECKING:
    from raytrec.worker.nonfinite import Known

T = TypeVar("T")
NEVER = 2**62  # the first bad step of a rank that knows of none
ANSWER_S = 10.0  # that the hub may take to answer
# A frame in one of these files means: waiting for other ranks.
WAITS = ("torch/distributed/", "torchrec/distributed/", "torch/autograd/graph.py")


class Pulse:
    """Tells the hub how this rank gets on; ends the process when the hub says so, or is out of reach.

    Args:
        lease_s: seconds without an answer after which this process ends itself. Who is cut off cannot be told
            that the group has been given up, and must not write to the run when the network is back.

    Attributes:
        command: what the hub wants.
        phase: what this rank is doing; see hub.PATIENT.
        device: asked, from another thread, for the step that this rank's GPU has not finished, and the phase
            of training ("" where that is not known); None where it has finished all, and on CPU.
    """

    def __init__(self, hub: Any, attempt: str, rank: int, lease_s: float):
        self._hub, self._attempt, self._rank, self._lease_s = hub, attempt, rank, lease_s
        self.command, self.phase, self._ticks, self._step = Command.GO, "start", 0, 0
        self._going = False  # the first step sets everything up, and may take long
        self.device: Callable[[], tuple[int, str] | None] = lambda: None
        # The thread that trains: Ray Train runs the worker's function in one that is not the main thread.
        self._watched = _this_thread()
        self._over = Event()
        self._thread = Thread(target=self._beat, name="pulse", daemon=True)
        self._thread.start()

    def tick(self, phase: str | None = None, step: int | None = None) -> None:
        """Notes progress, with another phase or step if given."""
        self._ticks += 1
        self.phase = phase or self.phase
        if step is not None:
            self._step, self._going = step, True

    def reading(self, batches: Iterator[T], after: str = "step") -> Iterator[T]:
        """The same iterator; waiting for it is the phase "data"."""
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
            RunError: it has been given up, or the hub does not answer.
        """
        import ray

        try:
            current = ray.get(self._hub.current.remote(self._attempt), timeout=ANSWER_S)
        except ray.exceptions.RayError as error:  # no answer in time included
            raise RunError("the driver does not answer, and may have given this group up") from error
        if not current:
            raise RunError("this group of workers has been given up")

    def close(self) -> None:
        """The rank has ended well."""
        self._over.set()
        self._thread.join(5)

    def _beat(self) -> None:
        import ray

        last, heard = -1, monotonic()
        while not self._over.wait(BEAT_S):
            ticks, where, waiting, unfinished = self._ticks, "", False, None
            if ticks == last:
                (where, waiting), unfinished = _place(self._watched), self.device()
            last = ticks
            try:
                beat = self._hub.beat.remote(
                    self._attempt, self._rank, ticks, self._step, self.phase, where, waiting, unfinished
                )
                command, heard = Command(ray.get(beat, timeout=ANSWER_S)), monotonic()
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
            ray.get(self._hub.leave.remote(self._attempt, self._rank), timeout=10)
        except Exception:
            return

    def _end(self, why: str) -> None:
        """Ends the process, unless the rank has ended well; where its threads are goes to Ray's log of it."""
        if not self._over.is_set():
            print(f"rank {self._rank}: {why}", file=sys.stderr)
            faulthandler.dump_traceback(sys.stderr)
            os._exit(70)


def _this_thread() -> int:
    from threading import get_ident

    return get_ident()


def _place(thread: int) -> tuple[str, bool]:
    """Where a thread is: function, file:line; and whether it waits there for other ranks."""
    frame = sys._current_frames().get(thread) or sys._current_frames().get(main_thread().ident)
    innermost, waiting = frame, False
    while frame is not None:
        if any(part in frame.f_code.co_filename for part in WAITS):
            waiting = True
            break
        if "/raytrec/" in frame.f_code.co_filename:
            break
        frame = frame.f_back
    if innermost is None:
        return "", False
    file = "/".join(innermost.f_code.co_filename.split("/")[-2:])
    return f"{innermost.f_code.co_name}, {file}:{innermost.f_lineno}", waiting


class Agreed(NamedTuple):
    """What the ranks have said at a step, taken together; the same on all ranks.

    Attributes:
        command: the highest Command.
        through: the step up to which every rank knew whether its losses were finite.
        bad: the first step whose loss, as far as any rank knew, was not; None: no such step was known. It is
            the run's first one if `through` has reached it.
        busy: whether a checkpoint is still being written.
    """

    command: Command
    through: int
    bad: int | None
    busy: bool


class Signals:
    """An exchange of a few bytes at each step, over gloo, that nobody waits for: it is read a step later.

    Making it is a collective; every rank calls `exchange` after each step.
    """

    def __init__(self) -> None:
        import torch.distributed as dist

        self._group = dist.new_group(backend="gloo")
        self._begun: deque = deque()

    def exchange(self, command: Command, known: Known, busy: bool) -> Agreed | None:
        """Says this step's, and returns what was agreed on at the step before (None at the first).

        Args:
            known: of this rank's losses; on a GPU that is less than all steps.
        """
        self._begin(command, known, busy)
        return self._finish() if len(self._begun) > 1 else None

    def settle(self) -> Agreed | None:
        """What was agreed on at this step; waits for it. None when it is known already."""
        return self._finish() if self._begun else None

    def agree(self, known: Known) -> Agreed:
        """What all ranks together know of the losses; waits for it."""
        self.settle()
        self._begin(Command.GO, known, False)
        return self._finish()

    def _begin(self, command: Command, known: Known, busy: bool) -> None:
        import torch
        import torch.distributed as dist

        first = NEVER if known.bad is None else known.bad
        values = torch.tensor([command, -known.through, -first, busy])  # the least of what has a minus
        work = dist.all_reduce(values, dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._begun.append((work, values))

    def _finish(self) -> Agreed:
        work, values = self._begun.popleft()
        work.wait()
        command, through, first, busy = values.tolist()
        return Agreed(Command(command), -through, None if first == -NEVER else -first, bool(busy))
