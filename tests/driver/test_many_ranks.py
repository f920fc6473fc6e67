"""The coordinator with many ranks: heartbeats a second, and who counts as silent."""

import asyncio

from raytrec.common.messages import BEAT_S, MOST_BEATS, beat_s
from raytrec.driver.coordinator import Coordinator


def test_heartbeats_a_second_are_bounded():
    assert beat_s(1) == beat_s(256) == BEAT_S, "few ranks are heard as often as ever"
    assert all(world / beat_s(world) <= MOST_BEATS for world in (1, 256, 257, 1024, 4096))


def hang(world, beat_age_s, dead=None):
    """What is said of ranks that have last been heard so many seconds ago, and made no progress for 60 s."""
    coordinator = Coordinator(hang_timeout_s=50, patience_s=500)

    async def meet():
        coordinator._keep_looking = lambda: asyncio.sleep(0)
        for rank in range(world):
            await coordinator.enter("a", rank, world, 100 + rank, "10.0.0.1", "")
            await coordinator.beat("a", rank, 9, 57, "step", "", False)
        for member in coordinator._members.values():
            member.progress_at -= 60
            member.beat_at -= beat_age_s if member.rank != dead else 8

    asyncio.run(meet())
    return coordinator._hang()


def test_ranks_that_are_heard_rarely_are_not_silent():
    late = beat_s(1024) * 1.5
    assert late >= 3.0 and "no heartbeat" not in hang(1024, late)
    assert "rank 0 (pid 100 on 10.0.0.1) hangs: no heartbeat for 3 s" in hang(4, late + 0.1)
    assert "rank 700 (pid 800 on 10.0.0.1) hangs: no heartbeat for 8 s" in hang(1024, late, dead=700)
