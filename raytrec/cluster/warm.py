"""A process with all imports, which forks a local Ray's workers.

Importing torch, TorchRec, FBGEMM and Ray takes a processor 5 s, and a run starts some ten processes that do;
after a failure again. The warm process does it once, while the driver reads its configuration, and is kept as
long as the driver lives. It talks over a Unix socket in the private folder of the local Ray (local_ray.py).
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

from raytrec.common.memory import FEW_ARENAS
from raytrec.compat.ray_start import ON_DEMAND, first_job, workers_started_by

HERE = Path(__file__).parent
SERVER, FORKED_WORKER, PLACE = HERE / "forking.py", HERE / "forked_worker.py", "RAYTREC_WARM"
END_S = 0.5  # that its end takes, unless it is importing
# What ranks, read tasks and Ray Train's controller import: first what does not import Ray.
MODULES = ("torch", "torchrec", "torch.distributed.checkpoint", "pandas", "pyarrow.dataset", "pydantic")
ON_RAY = (
    "ray.data",
    "ray.train.torch",
    "raytrec.driver.policies",
    "raytrec.driver.coordinator",
    "raytrec.worker.loop",
    "raytrec.worker.build",
    "raytrec.worker.checkpointing",
    "raytrec.worker.evaluate",
    "raytrec.worker.observers",
    "raytrec.data.stream",
    "raytrec.data.rows",
    "torchrec.metrics.rec_metric",  # and with it torchmetrics and PIL, for the first step
)


class Warm:
    """The warm process; it ends when `close` is called, or this process ends.

    Args:
        modules: to import at once.
        on_ray: modules to import when the raylet has been started, because they import Ray.

    Attributes:
        listens: whether it has an address.
    """

    def __init__(self, modules: Sequence[str], on_ray: Sequence[str]):
        self._on_ray, self._listener = list(on_ray), socket.socket(socket.AF_UNIX)
        self.listens = False
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(SERVER)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=os.environ | FEW_ARENAS,
                start_new_session=True,  # signals to the driver's group are for the driver
            )
        self._send({"path": [os.path.abspath(path) for path in sys.path], "modules": list(modules)})

    def listen(self, place: Path) -> None:
        """From now on, requests wait at this address; once, as it is for one Ray alone."""
        self.listens = True
        self._listener.bind(str(place))
        self._listener.listen(64)

    def serve(self, raylet: int) -> None:
        """Serves them, as soon as all is imported, for a new cluster.

        Args:
            raylet: process id.
        """
        message = {"env": first_job(raylet), "modules": self._on_ray}
        with suppress(OSError), self._listener:  # it has ended: workers begin from the beginning
            self._send(message, [self._listener.fileno()])

    def close(self) -> None:
        """Ends it, and what it has forked."""
        with suppress(OSError):  # it has ended
            self._control.sendall(b"!")
        self._control.close()
        self._listener.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:  # it still imports
            self._process.kill()
            self._process.wait()

    def _send(self, message: dict, fds: Sequence[int] = ()) -> None:
        data = json.dumps(message).encode()
        socket.send_fds(self._control, [struct.pack("!I", len(data))], fds)
        self._control.sendall(data)


_running: dict[str, Warm] = {}
WARM = "warm"


def warm_up() -> None:
    """Start the warm process of this process, unless there is one, without waiting for its imports."""
    if WARM not in _running:
        _running[WARM] = Warm(MODULES, ON_RAY)
        atexit.register(cool_down)


def cool_down() -> None:
    """End the warm process of this process, if there is one."""
    if process := _running.pop(WARM, None):
        process.close()


@contextmanager
def warm_workers(alone: bool) -> Iterator[None]:
    """Keep a warm process during the block, so that a local Ray that the block starts forks its workers.

    Args:
        alone: True if the block starts a local Ray. Raylets of a cluster start their workers themselves.
    """
    import ray

    if ray.is_initialized():  # a caller's, and so is a warm process that it may have
        yield
        return
    if alone:
        warm_up()
    try:
        yield
    finally:
        cool_down()


@contextmanager
def forked_workers(folder: Path) -> Iterator[tuple[dict[str, str], Callable[[int], None]]]:
    """A block in which a local Ray that is started has its workers forked, if there is a warm process.

    Args:
        folder: a private one.

    Yields:
        Variables for the Ray's processes, and what is to be called with its raylet's process id.
    """
    process, place = _running.get(WARM), folder / WARM
    if process is None or process.listens:
        yield FEW_ARENAS, lambda pid: None
        return
    process.listen(place)
    with workers_started_by(FORKED_WORKER):
        yield FEW_ARENAS | ON_DEMAND | {PLACE: str(place)}, process.serve
