"""The last checkpoint of a run takes as long as it takes: its limit is that of a phase, not of a step."""

import loop
from ranks import on_ranks

from raytrec.driver.coordinator import SLOW_PHASES


def phases_of_waits(rank, world, folder):
    """The phase that the heartbeat reports, each time it waits for a checkpoint that is being written."""
    made, found = loop.make(rank, world, 3, ["checkpoint.every_s=null"], folder), []
    saver, heartbeat = made.checkpoints._saver, made.context.heartbeat
    taken = saver.taken

    def waits():
        if saver._running is not None:
            found.append(heartbeat.phase)
        return taken()

    saver.taken = waits
    made.train(3)
    assert made.error is None
    return found


def test_the_wait_for_the_last_checkpoint_is_no_step(tmp_path):
    [found] = on_ranks(1, phases_of_waits, str(tmp_path))
    assert found and set(found) <= set(SLOW_PHASES)
