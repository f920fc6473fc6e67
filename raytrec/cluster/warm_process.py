"""Warm process, which imports torch, TorchRec, FBGEMM and Ray once, and forks the workers of a local Ray cluster.

These imports take 5 s of CPU time. A run starts about ten processes that need them, and as many again after a
failure. The warm process imports the packages while the driver reads its configuration, and runs as long as the
driver. Ray requests workers over a Unix socket in the private folder of the local cluster (local_ray.py).
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from raytrec.common.memory import ALLOCATOR_ENV
from raytrec.compat.ray_start import NO_PRESTART_ENV, SERVE_MODULES, get_first_job_env, replace_worker_script

HERE = Path(__file__).parent
FORK_SERVER_PROGRAM, FORKED_WORKER_PROGRAM, PLACE = (HERE / "forking.py", HERE / "forked_worker.py", "RAYTREC_WARM")
EXIT_TIMEOUT_S = 0.5  # time for the warm process to exit before it is killed; while it imports, it cannot exit
TRAINING, SERVING = "training", "serving"
# Modules that ranks, read tasks and Ray Train's controller import: without Ray (PRELOADED_MODULES), and with Ray.
PRELOADED_MODULES = ("torch", "torchrec", "torch.distributed.checkpoint", "pandas", "pyarrow.dataset", "pydantic")
ON_RAY = (
    "ray.data",
    "ray.train.torch",
    "raytrec.driver.policies",
    "raytrec.driver.coordinator",
    "raytrec.worker.trainer",  # also imports the readers
    "torchrec.metrics.rec_metric",  # also imports torchmetrics and PIL, which the first step needs
)
# Modules to import before and after the start of Ray, for each purpose. For SERVING, replicas, Serve's controller and
# the coordinator then share the memory of these modules.
MODULES = {
    TRAINING: (PRELOADED_MODULES, ON_RAY),
    SERVING: (("raytrec.serving.deployment", "raytrec.compat.uvicorn_"), ("ray.serve", *SERVE_MODULES)),
}


class WarmProcess:
    """Handle of the warm process, which ends when `close` is called or this process ends.

    Args:
        modules: Modules to import immediately.
        on_ray: Modules to import after the raylet's start, because they import Ray.

    Attributes:
        listens: True after `listen` has been called.
    """

    def __init__(self, modules: Sequence[str], on_ray: Sequence[str]):
        self._on_ray, self._listener = list(on_ray), socket.socket(socket.AF_UNIX)
        self.listens = False
        self._control, child_end = socket.socketpair()
        with child_end:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(FORK_SERVER_PROGRAM)],
                stdin=child_end.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=os.environ | ALLOCATOR_ENV,
                start_new_session=True,  # signals to the driver's group must not reach the warm process
            )
        self._send({"path": [os.path.abspath(path) for path in sys.path], "modules": list(modules)})

    def listen(self, place: Path) -> None:
        """Listen for fork requests at the socket path `place`. Call this method only once, for a single cluster."""
        self.listens = True
        self._listener.bind(str(place))
        self._listener.listen(64)

    def serve(self, raylet: int) -> None:
        """Make the warm process serve the fork requests of a new cluster as soon as it has imported all modules.

        Args:
            raylet: Process id of the cluster's raylet.
        """
        message = {"env": get_first_job_env(raylet), "modules": self._on_ray}
        with suppress(OSError), self._listener:  # if the warm process has ended, workers start without forking
            self._send(message, [self._listener.fileno()])

    def close(self) -> None:
        """Terminate the warm process and every worker forked from it."""
        with suppress(OSError):  # the process has already ended
            self._control.sendall(b"!")
        self._control.close()
        self._listener.close()
        try:
            self._process.wait(EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:  # the process is still importing
            self._process.kill()
            self._process.wait()

    def _send(self, message: dict, fds: Sequence[int] = ()) -> None:
        data = json.dumps(message).encode()
        socket.send_fds(self._control, [struct.pack("!I", len(data))], fds)
        self._control.sendall(data)


_warm_processes: dict[str, WarmProcess] = {}
WARM = "warm"


def warm_up(purpose: str = TRAINING) -> None:
    """Start a warm process unless this process already has one, without waiting for the imports.

    The warm process is terminated by `stop_warm_process`, at the latest at the exit of this process.

    Args:
        purpose: TRAINING or SERVING, which determines the imported modules.
    """
    if WARM not in _warm_processes:
        _warm_processes[WARM] = WarmProcess(*MODULES[purpose])
        atexit.register(stop_warm_process)


def stop_warm_process() -> None:
    """Terminate the warm process that this process has started, if there is one."""
    if process := _warm_processes.pop(WARM, None):
        process.close()


@contextmanager
def keep_warm_process(alone: bool, purpose: str = TRAINING) -> Iterator[None]:
    """Keep a warm process during the block, in which a local cluster forks workers; do nothing if Ray is connected.

    At the end of the block, the warm process is terminated, even if it was started before the block.

    Args:
        alone: True if the block starts a local cluster. False if the block joins a cluster, whose raylets start
            workers without a warm process; none is then started.
        purpose: TRAINING or SERVING, which determines the imported modules.
    """
    import ray

    if ray.is_initialized():  # the caller has started or joined this cluster, and owns any warm process
        yield
        return
    if alone:
        warm_up(purpose)
    try:
        yield
    finally:
        stop_warm_process()


@contextmanager
def fork_workers(folder: Path) -> Iterator[tuple[dict[str, str], Callable[[int], None]]]:
    """Make a local Ray cluster that is started in the block fork its workers, if a warm process is not yet in use.

    Args:
        folder: Private folder for the socket of the warm process.

    Yields:
        Environment variables for Ray's processes, and a function to call with the raylet's process id once it runs.
    """
    process, place = _warm_processes.get(WARM), folder / WARM
    environment, on_raylet = {PLACE: ""}, lambda pid: None  # not the warm process of an enclosing Ray
    if process is not None and not process.listens:
        process.listen(place)
        environment, on_raylet = NO_PRESTART_ENV | {PLACE: str(place)}, process.serve
    with replace_worker_script(FORKED_WORKER_PROGRAM):
        yield ALLOCATOR_ENV | environment, on_raylet
