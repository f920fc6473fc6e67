"""Test hang attribution by the coordinator and the heartbeat interval of ranks."""

import asyncio

from raytrec.common.messages import (
    HEARTBEAT_INTERVAL_S,
    MAX_HEARTBEATS_PER_S,
    PHASES,
    Command,
    compute_heartbeat_interval,
)
from raytrec.driver.coordinator import GPU_PHASE_TEXTS, Coordinator

WAIT_LOCATION = "wait, distributed/comm_ops.py:12"


def describe_hang(*states, idle_s=8, silent_s=None, hang_timeout_s=5, patience_s=60):
    """Return the coordinator's description of ranks without progress for `idle_s`.

    Args:
        states: last heartbeat of each rank: (ticks, step, phase, where, waiting, unfinished).
        silent_s: seconds since the last heartbeat by rank; default: 0.
    """
    coordinator = Coordinator(hang_timeout_s, patience_s)

    async def meet():
        coordinator._watch_ranks = lambda: asyncio.sleep(0)
        for rank in range(len(states)):
            await coordinator.enter("a", rank, len(states), 100 + rank, "10.0.0.1", "")
        for rank, state in enumerate(states):
            await coordinator.beat("a", rank, *state)
        assert await coordinator.beat("before", 0, 1, 1, "step", "", False) == Command.ABORT
        for rank, member in coordinator._members.items():
            member.last_progress_at -= idle_s
            member.last_heartbeat_at -= (silent_s or {}).get(rank, 0)

    asyncio.run(meet())
    return coordinator._describe_hang()


def test_coordinator_names_the_rank_that_others_wait_for():
    waits = (9, 57, "step", WAIT_LOCATION, True)
    found = describe_hang(waits, (9, 57, "step", "forward, mine/model.py:3", False), waits)
    assert found.startswith("rank 1 (pid 101 on 10.0.0.1) has made no progress for 8 s at step 57, computing")
    assert "forward, mine/model.py:3" in found and "rank 0 waits at wait, distributed" in found
    found = describe_hang(waits, waits, (9, 57, "step", "", False), silent_s={2: 8})
    assert found.startswith("rank 2 (pid 102 on 10.0.0.1) hangs or has ended: no heartbeat for 8 s")
    assert describe_hang(waits, (8, 56, "step", "wait, distributed/x.py:1", True)).startswith("rank 1")
    assert describe_hang(waits, waits).startswith("all ranks have waited for each other for 8 s; rank 0")
    assert describe_hang(waits, (9, 56, "data", "", False)) is None, "reading may take longer"
    assert describe_hang((9, 57, "save", "", False), waits) is None


def describe_gpu_hang(*states):
    """Describe the hang of ranks that have sent these (step, waiting for others, unfinished)."""
    return describe_hang(
        *((9, step, "step", WAIT_LOCATION, waiting, unfinished) for step, waiting, unfinished in states)
    )


def test_each_phase_of_a_gpu_has_a_text():
    assert {*GPU_PHASE_TEXTS} == {*PHASES}
    found = describe_gpu_hang((57, False, (55, "backward")), (57, False, (55, "tables")))
    assert found.startswith("rank 1 ") and "(in lookups or updates of tables)" in found


def test_coordinator_names_the_rank_whose_gpu_is_behind():
    found = describe_gpu_hang(*((57, False, (55, phase)) for phase in ("collectives", "forward", "backward")))
    assert found.startswith("rank 1 (pid 101 on 10.0.0.1) has made no progress for 8 s: its GPU has not")
    assert "its GPU has not finished step 55 (in the forward pass); the rank is at step 57" in found
    assert describe_gpu_hang((57, False, (56, "forward")), (57, False, (55, "backward"))).startswith("rank 1 ")
    found = describe_gpu_hang((57, True, (55, "backward")), (57, True, (55, "forward")))
    assert found.startswith("rank 1 ") and "waited for each other" not in found


def test_host_progress_takes_precedence_over_gpu_progress():
    found = describe_gpu_hang((57, False, (56, "forward")), (56, False, None))
    assert found.startswith("rank 1 (pid 101 on 10.0.0.1) has made no progress") and "GPU" not in found
    assert describe_gpu_hang((57, False, (56, "collectives")), (57, False, None)).startswith("rank 0 ")


def test_coordinator_reports_that_no_gpu_has_finished():
    found = describe_gpu_hang((57, False, (55, "backward")), (57, False, (55, "backward")))
    assert "no GPU has finished step 55 (in the backward pass)" in found
    assert "its GPU has not finished step 57; the rank" in describe_gpu_hang((58, False, (57, "")))


def test_heartbeat_rate_is_bounded():
    assert compute_heartbeat_interval(1) == compute_heartbeat_interval(256) == HEARTBEAT_INTERVAL_S, (
        "few ranks must keep the default interval"
    )
    assert all(world / compute_heartbeat_interval(world) <= MAX_HEARTBEATS_PER_S for world in (1, 256, 257, 1024, 4096))


def test_long_heartbeat_interval_is_not_silence():
    def found(world, late, dead=None):
        ages = {rank: 8 if rank == dead else late for rank in range(world)}
        states = [(9, 57, "step", "", False)] * world
        return describe_hang(*states, idle_s=60, silent_s=ages, hang_timeout_s=50, patience_s=500)

    late = compute_heartbeat_interval(1024) * 1.5
    assert late >= 3.0 and "no heartbeat" not in found(1024, late)
    assert "rank 0 (pid 100 on 10.0.0.1) hangs or has ended: no heartbeat for 3 s" in found(4, late + 0.1)
    assert "rank 700 (pid 800 on 10.0.0.1) hangs or has ended: no heartbeat for 8 s" in found(1024, late, dead=700)
