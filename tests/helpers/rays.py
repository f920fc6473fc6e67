"""Local Ray clusters shared by tests, one at a time; workers are forked from a warm process."""

import os
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from unittest.mock import patch

RAY_CPUS = 6
HELPERS_FOLDER = str(Path(__file__).parent)


class SharedRay:
    """Local Ray that is restarted if a test needs another number of GPUs.

    Attributes:
        gpus: number of GPUs of the running Ray; None if no Ray is running.
    """

    def __init__(self):
        self.gpus, self._running = None, ExitStack()

    def use(self, gpus):
        if self.gpus != gpus:
            self.close()
            self._running.enter_context(_started(gpus))
            self.gpus = gpus

    def close(self):
        self._running.close()
        self.gpus = None


def alive_worker_pids():
    """Return the process ids of the Ray Train workers that are alive."""
    import ray

    actors = ray._private.state.actors().values()
    alive = [each for each in actors if each["State"] == "ALIVE"]
    return sorted(each["Pid"] for each in alive if each["ActorClassName"] == "RayTrainWorker")


@contextmanager
def _started(gpus):
    """Start a local Ray on loopback with 6 logical CPUs and `gpus` simulated GPUs."""
    import ranks
    import ray
    from stores import reuse_first_store

    from raytrec.cluster import warm_process
    from raytrec.cluster.session import ray_session

    ranks.close_rank_pools()  # idle ranks would use CPU time
    assert not ray.is_initialized(), "an earlier test left Ray running"
    # Workers with stand-in GPUs import helper modules from this folder.
    path = os.pathsep.join(p for p in (HELPERS_FOLDER, os.environ.get("PYTHONPATH")) if p)
    with patch.dict(os.environ, {"PYTHONPATH": path} if gpus else {}):
        warm_process.warm_up()
        counted = patch("ray.init", partial(ray.init, num_gpus=gpus)) if gpus else nullcontext()
        try:
            with reuse_first_store(), counted, ray_session(num_cpus=RAY_CPUS):
                yield
        finally:
            warm_process.stop_warm_process()
