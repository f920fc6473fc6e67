"""What all ranks decide together at each step: what to do next, and whether every loss was finite."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from raytrec.common.messages import Command

if TYPE_CHECKING:
    from raytrec.worker.nonfinite import Known

NEVER = 2**62  # the first bad step of a rank that knows of none


class Decision(NamedTuple):
    """What the ranks have decided together at a step; the same on all ranks.

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


class StepConsensus:
    """An exchange of a few bytes at each step, over gloo, that nobody waits for: it is read a step later.

    Making it is a collective; every rank calls `exchange` after each step.
    """

    def __init__(self) -> None:
        import torch.distributed as dist

        # One rank agrees with itself; a group of gloo's has threads that look around 100 times a second.
        self._group = dist.new_group(backend="gloo") if dist.get_world_size() > 1 else None
        self._begun: deque = deque()

    def exchange(self, command: Command, known: Known, busy: bool) -> Decision | None:
        """Begins this step's decision, and returns the one of the step before (None at the first).

        Args:
            known: of this rank's losses; on a GPU that is less than all steps.
        """
        self._begin(command, known, busy)
        return self._finish() if len(self._begun) > 1 else None

    def finish(self) -> Decision | None:
        """The decision of this step; waits for it. None when it has been returned already."""
        return self._finish() if self._begun else None

    def agree(self, known: Known) -> Decision:
        """What all ranks together know of the losses; waits for it."""
        self.finish()
        self._begin(Command.GO, known, False)
        return self._finish()

    def _begin(self, command: Command, known: Known, busy: bool) -> None:
        import torch
        import torch.distributed as dist

        first = NEVER if known.bad is None else known.bad
        values = torch.tensor([command, -known.through, -first, busy])  # the least of what has a minus
        work = None
        if self._group is not None:
            work = dist.all_reduce(values, dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._begun.append((work, values))

    def _finish(self) -> Decision:
        work, values = self._begun.popleft()
        if work is not None:
            work.wait()
        command, through, first, busy = values.tolist()
        return Decision(Command(command), -through, None if first == -NEVER else -first, bool(busy))
