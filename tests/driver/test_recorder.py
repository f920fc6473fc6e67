"""The thread that reads the messages of ranks."""

import time
from threading import enumerate as threads

import pytest
from recorded import interval

from raytrec.cluster.lifeline import RayLost
from raytrec.common.messages import ENDED_EARLY, Event, RankLine
from raytrec.driver.recorder import Record, Watch, _Reading


def test_no_thread_is_left_in_a_call_to_a_ray_that_was_lost(ray_cluster):
    """Ray is shut down next, and would crash the process in that thread."""
    import ray

    @ray.remote(num_cpus=0)
    class Silent:
        def get(self, timeout):
            time.sleep(30)

    coordinator = Silent.remote()
    ray.get(coordinator.__ray_ready__.remote())
    with pytest.raises(RayLost), _Reading(coordinator, print):
        time.sleep(1)
        began = time.monotonic()
        raise RayLost("Ray's raylet has ended")
    assert time.monotonic() - began < 20
    assert not [thread for thread in threads() if thread.name == "coordinator"]
    ray.kill(coordinator)


def test_the_step_at_which_training_was_over_is_kept():
    watch = Watch(console=None)
    watch.receive(Event(event="asked", details={"command": "SAVE", "reason": "a-user"}))
    assert watch.ended_early_at is None
    watch.receive(Event(event=ENDED_EARLY, details={"step": 30, "reason": "no better"}))
    assert watch.ended_early_at == 30


def intervals(count, slow=False):
    """Messages of two ranks of 5.5 s each, of which rank 1 may spend 2 s in its own data."""
    for number in range(1, count + 1):
        for rank in range(2):
            line = interval(["a"], rank, 2, 100 * number) | {"seconds": 5.5}
            line["phases_s"]["data" if slow and rank else "collectives"] += 2.0
            yield RankLine(**line)


def test_a_rank_is_called_slow_once_it_has_been_for_a_minute(tmp_path):
    record = Record(tmp_path)
    first = [record.keep(message) for message in intervals(12, slow=True)]
    # The first interval does not count, and rank 1 is the last of each: the 11 others are 60.5 s.
    assert first[:-1] == [[]] * 23 and "rank 1 is slow" in first[-1][0]
    record = Record(tmp_path)
    assert [record.keep(message) for message in intervals(30)] == [[]] * 60
