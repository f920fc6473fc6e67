"""What ranks, coordinator and driver say to one another."""

from __future__ import annotations

from enum import IntEnum

BEAT_S = 0.5  # between two heartbeats of a rank


class Command(IntEnum):
    """What ranks are told, in the order of what overrules what."""

    GO = 0
    SAVE = 1
    RESTART = 2  # save, then end, so that Ray Train starts the group again with what nodes there are
    STOP = 3  # save, then end
    ABORT = 9  # end the process at once


class Restart(Exception):
    """Raised by all ranks when the state is saved and the group is to be started again: no failure."""
