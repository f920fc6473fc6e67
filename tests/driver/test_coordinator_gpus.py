"""Whom the coordinator names when hosts wait for GPUs that do not go on."""

import asyncio

from raytrec.driver.coordinator import Coordinator

WAITS = "synchronize, cuda/streams.py:223"


def named(*states):
    """What is said of ranks that have sent (step, waiting for others, unfinished) and nothing new for 8 s."""
    coordinator = Coordinator(hang_timeout_s=5, patience_s=60)

    async def meet():
        coordinator._keep_looking = lambda: asyncio.sleep(0)
        for rank in range(len(states)):
            await coordinator.enter("a", rank, len(states), 100 + rank, "10.0.0.1", "")
        for rank, (step, waiting, unfinished) in enumerate(states):
            await coordinator.beat("a", rank, 9, step, "step", WAITS, waiting, unfinished)
        for member in coordinator._members.values():
            member.progress_at -= 8

    asyncio.run(meet())
    return coordinator._hang()


def test_the_rank_whose_gpu_is_behind():
    found = named(
        (57, False, (55, "collectives")), (57, False, (55, "forward")), (57, False, (55, "backward"))
    )
    assert found.startswith(
        "rank 1 (pid 101 on 10.0.0.1) has made no progress for 8 s: its GPU has not finished"
    )
    assert "not finished step 55 (in the forward pass), at step 57, computing" in found
    assert named((57, False, (56, "forward")), (57, False, (55, "backward"))).startswith("rank 1 ")
    found = named((57, True, (55, "backward")), (57, True, (55, "forward")))
    assert found.startswith("rank 1 ") and "wait for one another" not in found


def test_hosts_come_before_gpus():
    found = named((57, False, (56, "forward")), (56, False, None))
    assert found.startswith("rank 1 (pid 101 on 10.0.0.1) has made no progress") and "GPU" not in found
    found = named((57, False, (56, "collectives")), (57, False, None))
    assert found.startswith("rank 0 ")


def test_all_gpus_alike():
    found = named((57, False, (55, "backward")), (57, False, (55, "backward")))
    assert "all GPUs have not finished step 55 (in the backward pass)" in found
    assert "its GPU has not finished step 57," in named((58, False, (57, "")))
