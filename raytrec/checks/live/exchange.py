"""What ranks have seen, brought to all of them: few bytes, however many ranks there are.

A rank that received the looks of 1,023 others would receive hundreds of megabytes. So looks go up a tree. On
their way those that are alike stand once, with how often, and a check may fold those of neighbours into one
(`Check.fold`). What arrives at rank 0 goes to all: in a run that is well, about as much as one rank's looks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from raytrec.checks.live.outcome import Check

FEW = 8  # ranks up to which each simply sends its looks to all


@dataclass
class Repeated:
    """The look of `count` neighbouring ranks, which is the same."""

    look: Any
    count: int = 1


def exchange(
    checks: list[Check], step: int, mine: list[Any], group: dist.ProcessGroup | None
) -> tuple[int, list[list[Any]]]:
    """Rank 0's step, and for each check what it is to judge; the same on all ranks. A collective.

    Args:
        mine: this rank's look for each check.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    if world <= FEW:
        everyone: list[Any] = [None] * world
        dist.all_gather_object(everyone, (step, mine), group=group)
        return everyone[0][0], [list(looks) for looks in zip(*(looks for _, looks in everyone), strict=True)]
    seen, distance = [[Repeated(look)] for look in mine], 1
    while distance < world:
        if rank & distance:
            dist.send_object_list([seen], rank - distance, group=group)
            break
        if rank + distance < world:
            theirs: list[Any] = [None]
            dist.recv_object_list(theirs, rank + distance, group=group)
            seen = [join(check, *two) for check, *two in zip(checks, seen, theirs[0], strict=True)]
        distance *= 2
    found = [(step, seen)]
    dist.broadcast_object_list(found, 0, group=group)
    ((step, seen),) = found
    return step, [_expand(looks) for looks in seen]


def join(check: Check, one: list[Repeated], other: list[Repeated]) -> list[Repeated]:
    """The looks of two groups of neighbours, in the order of their ranks."""
    joined = list(one)
    for each in other:
        if joined[-1].look == each.look:
            joined[-1] = Repeated(each.look, joined[-1].count + each.count)
        else:
            joined.append(each)
    if len(joined) == 1:
        return joined
    looks = _expand(joined)
    folded = check.fold(looks)
    return joined if folded is looks else [Repeated(look) for look in folded]


def _expand(repeated: list[Repeated]) -> list[Any]:
    """A look for each rank."""
    return [look for each in repeated for look in [each.look] * each.count]
