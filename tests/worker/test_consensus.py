"""Decisions that all ranks make together, over one ring or over the rows and columns of a rank grid."""

from collections import Counter

import pytest
import torch.distributed as dist
from ranks import run_on_ranks

from raytrec.common.messages import Command
from raytrec.worker.consensus import StepConsensus, _find_grid_position
from raytrec.worker.nonfinite import LossStatus

STEPS = 6


def run_consensus(rank, world, ring):
    """Exchange commands for a few steps.

    Each rank sends a command at one step; the last rank reports a bad loss at step 4.
    """
    consensus = StepConsensus(ring)
    given = []
    for step in range(1, STEPS + 1):
        command = Command.SAVE if step == 1 + rank % 3 else Command.GO
        bad = 100 + rank if step == 4 and rank == world - 1 else None
        given.append(consensus.exchange(command, LossStatus(step - rank % 2, bad), busy=rank == 0 and step == 2))
    last = consensus.finish()
    assert consensus.finish() is None
    agreed = consensus.agree(LossStatus(50 + rank, 7 if rank == 1 else None))
    sizes = [dist.get_world_size(group) for group in consensus._rings]
    return consensus.lag, given, last, agreed, sizes


@pytest.mark.slow
@pytest.mark.parametrize(("world", "ring", "lag"), [(2, 64, 1), (4, 2, 2), (5, 4, 2)])
def test_every_rank_gets_the_same_decision(world, ring, lag):
    found = run_on_ranks(world, run_consensus, ring)
    assert all(each[:4] == found[0][:4] for each in found)
    assert world <= ring or all(max(each[4]) < world for each in found), "the rings are short"
    own_lag, given, last, agreed, _ = found[0]
    assert own_lag == lag
    assert given[:lag] == [None] * lag and None not in given[lag:]
    asked = {1 + rank % 3 for rank in range(world)}
    for step, decision in enumerate([*given[lag:], *[None] * (lag - 1), last], 1):
        if decision is None:
            continue
        assert decision.command == (Command.SAVE if step in asked else Command.GO)
        assert decision.through == step - 1
        assert decision.bad == (100 + world - 1 if step == 4 else None)
        assert decision.busy == (step == 2)
    assert (agreed.through, agreed.bad) == (50, 7)


@pytest.mark.parametrize("world", [65, 97, 256, 1000, 1021, 1024])
def test_grid_pairs_every_row_with_every_column(world):
    places = [_find_grid_position(rank, world) for rank in range(world)]
    rows, columns = (Counter(place[axis] for place in places) for axis in (0, 1))
    assert set(places) == {(row, column) for row in rows for column in columns}
    assert max(*rows.values(), *columns.values()) <= world**0.5 + 2
