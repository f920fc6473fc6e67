"""What all ranks decide together at each step."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import isqrt
from typing import NamedTuple

import torch
import torch.distributed as dist

from raytrec.common.messages import Command
from raytrec.worker.nonfinite import Known

NEVER = 2**62  # the first bad step of a rank that knows of none
RING = 64  # ranks; 126 hops of 25 µs are shorter than a step


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
    """An exchange of a few bytes at each step, over gloo, which no step waits for: read `lag` steps later.

    gloo's all-reduce goes round a ring, 2 (W - 1) hops. Many ranks therefore stand in rows and columns: they
    agree along the rows, and along the columns while the next step is trained; then all know what each knew.
    With 1,024 ranks that is 62 hops a step instead of 2,046.

    Making it is a collective; every rank calls `exchange` after each step.

    Args:
        ring: how many ranks are one ring.

    Attributes:
        lag: steps after which a decision is known.
    """

    def __init__(self, ring: int = RING):
        self._rings = _rings(ring)
        self.lag = max(1, len(self._rings))
        self._begun: deque[_Begun] = deque()

    def exchange(self, command: Command, known: Known, busy: bool) -> Decision | None:
        """Begins this step's decision, and returns that of `lag` steps before (None where there is none).

        Args:
            known: of this rank's losses; on a GPU that is less than all steps.
        """
        earlier = list(self._begun)
        self._begin(command, known, busy)
        for begun in earlier:
            self._advance(begun)
        return self._begun.popleft().decision() if len(self._begun) > self.lag else None

    def finish(self) -> Decision | None:
        """The decision of this step; waits for it. None when it has been returned already."""
        decision = None
        while self._begun:
            begun = self._begun.popleft()
            while begun.work is not None:
                self._advance(begun)
            decision = begun.decision()
        return decision

    def agree(self, known: Known) -> Decision:
        """What all ranks together know of the losses; waits for it."""
        self.finish()
        self._begin(Command.GO, known, False)
        decision = self.finish()
        assert decision is not None
        return decision

    def _begin(self, command: Command, known: Known, busy: bool) -> None:
        first = NEVER if known.bad is None else known.bad
        values = torch.tensor([command, -known.through, -first, busy])  # the least of what has a minus
        begun = _Begun(values)
        self._reduce(begun)
        self._begun.append(begun)

    def _advance(self, begun: _Begun) -> None:
        """Waits for a ring, and begins the next one."""
        if begun.work is not None:
            begun.work.wait()
            self._reduce(begun)

    def _reduce(self, begun: _Begun) -> None:
        begun.work = None
        if begun.rings < len(self._rings):
            group = self._rings[begun.rings]
            begun.work = dist.all_reduce(begun.values, dist.ReduceOp.MAX, group=group, async_op=True)
            begun.rings += 1


@dataclass
class _Begun:
    """A step's decision on its way: the rings it has entered, and the one that is at work (None: done)."""

    values: torch.Tensor
    rings: int = 0
    work: dist.Work | None = None

    def decision(self) -> Decision:
        command, through, first, busy = self.values.tolist()
        return Decision(Command(command), -through, None if first == -NEVER else -first, bool(busy))


def _rings(ring: int) -> list[dist.ProcessGroup]:
    """This rank's: none if it is alone, one for all ranks, or its row and its column. A collective."""
    world = dist.get_world_size()
    if world == 1:  # a group of gloo's has threads that look around 100 times a second
        return []
    if world <= ring:
        return [dist.new_group(backend="gloo")]
    places = [_place(rank, world) for rank in range(world)]
    mine = places[dist.get_rank()]
    return [
        dist.new_group(
            [rank for rank, place in enumerate(places) if place[axis] == mine[axis]],
            backend="gloo",
            use_local_synchronization=True,
        )
        for axis in (0, 1)
    ]


def _place(rank: int, world: int) -> tuple[int, int]:
    """Row and column of a rank; each row has a rank in each column, or one or two more."""
    rows = isqrt(world)
    columns = world // rows
    return rank % rows, rank // rows if rank < rows * columns else rank % columns
