"""The thread that reads what ranks have said."""

import time
from threading import enumerate as threads

import pytest

from raytrec.cluster.lifeline import RayLost
from raytrec.common.messages import ENDED_EARLY, Event
from raytrec.driver.recorder import Watch, _Reading


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
    watch.receive(Event(event="asked", details={"command": "SAVE", "reason": "somebody"}))
    assert watch.ended_early_at is None
    watch.receive(Event(event=ENDED_EARLY, details={"step": 30, "reason": "no better"}))
    assert watch.ended_early_at == 30
