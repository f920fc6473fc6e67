"""Make all ranks agree at each step on the command to execute and on the first step with a non-finite loss."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from math import isqrt
from typing import NamedTuple

import torch
import torch.distributed as dist

from raytrec.common.messages import Command
from raytrec.worker.nonfinite import LossStatus

NEVER = 2**62  # value of the first bad step if there is none
MAX_RING_RANKS = 64  # maximum number of ranks in one ring; its 126 hops of 25 µs take less time than a step


class Decision(NamedTuple):
    """Joint decision of all ranks at a step; the same on all ranks.

    Attributes:
        command: Highest Command received by any rank.
        through: Step up to which every rank had checked its losses.
        bad: First step for which any rank had found a non-finite loss, or None. If `through` has reached this
            step, no earlier step had a non-finite loss.
        busy: True if a rank is still writing a checkpoint.
    """

    command: Command
    through: int
    bad: int | None
    busy: bool


class StepConsensus:
    """Asynchronous all-reduce of four integers (see Decision) over gloo; its result is read `lag` steps later.

    gloo's all-reduce passes a ring of W ranks in 2 (W - 1) hops. Many ranks are therefore arranged in rows
    and columns: they reduce along the rows, and along the columns during the next step. With 1,024 ranks, a
    step takes 62 hops instead of 2,046.

    All methods are collective operations. Every rank must call the constructor, and `exchange` after each step.

    Args:
        ring: Maximum number of ranks in a single ring.

    Attributes:
        lag: Number of steps after which a decision is known.
    """

    def __init__(self, ring: int = MAX_RING_RANKS):
        self._rings = _rings(ring)
        self.lag = max(1, len(self._rings))
        self._pending: deque[_PendingDecision] = deque()

    def exchange(self, command: Command, loss_status: LossStatus, busy: bool) -> Decision | None:
        """Start this step's decision, and return that of `lag` steps ago; None if no such decision is pending.

        Args:
            command: Command that this rank has received.
            loss_status: Status of this rank's losses; on a GPU, the most recent steps are not included.
            busy: True if this rank is writing a checkpoint.
        """
        earlier = list(self._pending)
        self._begin(command, loss_status, busy)
        for pending in earlier:
            pending.advance()
        return self._pending.popleft().decision() if len(self._pending) > self.lag else None

    def finish(self) -> Decision | None:
        """Wait for the decision of the last step and return it; None if no decision is pending.

        Decisions of earlier steps that are still pending are discarded.
        """
        decision = None
        while self._pending:
            pending = self._pending.popleft()
            while pending.work is not None:
                pending.advance()
            decision = pending.decision()
        return decision

    def agree(self, loss_status: LossStatus) -> Decision:
        """Exchange the status of the losses once more, and return the joint decision, whose command is Command.GO."""
        self.finish()
        self._begin(Command.GO, loss_status, False)
        decision = self.finish()
        assert decision is not None
        return decision

    def _begin(self, command: Command, losses: LossStatus, busy: bool) -> None:
        first = NEVER if losses.bad is None else losses.bad
        values = torch.tensor([command, -losses.through, -first, busy])  # negated values give the minimum over ranks
        self._pending.append(_PendingDecision(values, iter(self._rings)))
        self._pending[-1].advance()


@dataclass
class _PendingDecision:
    """Decision in progress: its values, the process groups still to reduce over, and the current reduction, if any."""

    values: torch.Tensor
    rings: Iterator[dist.ProcessGroup]
    work: dist.Work | None = None

    def advance(self) -> None:
        """Wait for the reduction over one ring, and start the next one."""
        if self.work is not None:
            self.work.wait()
        self.work = None
        if (group := next(self.rings, None)) is not None:
            self.work = dist.all_reduce(self.values, dist.ReduceOp.MAX, group=group, async_op=True)

    def decision(self) -> Decision:
        command, through, first, busy = self.values.tolist()
        return Decision(Command(command), -through, None if first == -NEVER else -first, bool(busy))


def _rings(ring: int) -> list[dist.ProcessGroup]:
    """Return this rank's groups: none for one rank, one for up to `ring` ranks, else its row and column of a grid.

    This is a collective operation: every rank must call it.
    """
    world = dist.get_world_size()
    if world == 1:  # the threads of a gloo group poll 100 times a second
        return []
    if world <= ring:
        return [dist.new_group(backend="gloo")]
    positions = [_find_grid_position(rank, world) for rank in range(world)]
    own_position = positions[dist.get_rank()]
    return [
        dist.new_group(
            [rank for rank, position in enumerate(positions) if position[axis] == own_position[axis]],
            backend="gloo",
            use_local_synchronization=True,
        )
        for axis in (0, 1)
    ]


def _find_grid_position(rank: int, world: int) -> tuple[int, int]:
    """Return the row and column of a rank in the grid; some positions are shared by two ranks."""
    rows = isqrt(world)
    columns = world // rows
    return rank % rows, rank // rows if rank < rows * columns else rank % columns
