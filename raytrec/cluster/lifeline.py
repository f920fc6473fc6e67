"""Checks that the raylet and the GCS of a driver are running.

The raylet is Ray's process that starts workers on a machine. The GCS is the process that manages the cluster. Ray
itself reports the end of a raylet after 13 s, and ends the driver 60 s after the end of the GCS. Its reports are long
and do not state how to resume. These checks take seconds and report one sentence.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from time import monotonic, sleep
from typing import Any

from raytrec.common.errors import RunError

POLL_INTERVAL_S = 0.5
LIFELINE_CONNECT_TIMEOUT_S = 2.0
REFUSED_TIMEOUT_S = 2.0  # a process that refuses connections for this time has ended
# The GCS of a joined cluster may restart if Redis stores its state; Ray's variable sets the time to wait for it.
GCS_RESTART_TIMEOUT_S, GCS_RECONNECT_VARIABLE = 10.0, "RAY_gcs_rpc_server_reconnect_timeout_s"
RAYLET, GCS = "raylet", "GCS"
PART_DESCRIPTIONS = {
    RAYLET: "the process that starts workers on a machine",
    GCS: "the process that manages the cluster",
}


class RayLost(RunError):
    """Error raised when the raylet or the GCS has ended or does not respond, so that all workers are lost.

    Attributes:
        part: RAYLET or GCS, whichever is lost.
    """

    part = ""


class RayMonitor:
    """Monitor that connects to the raylet and the GCS of this driver to check that they are running.

    A driver that uses Ray client connects to neither of them, so its checks always pass.

    Args:
        patience_s: Seconds after which a raylet or GCS counts as lost if its machine does not respond at all.
        is_own_ray: True for a local Ray cluster of this process, whose raylet and GCS do not restart.
    """

    def __init__(self, patience_s: float, is_own_ray: bool):
        self._patience_s, self._own, self._last_check = patience_s, is_own_ray, 0.0
        self._since: dict[str, float] = {}
        self._places = _places()

    def check(self) -> None:
        """Check that the raylet and the GCS are running, at most once per POLL_INTERVAL_S.

        Raises:
            RayLost: The raylet or the GCS has ended or does not respond.
        """
        if monotonic() - self._last_check < POLL_INTERVAL_S:
            return
        for part, place in self._places.items():
            self._check(part, place)
        self._last_check = monotonic()

    def confirm(self) -> None:
        """Check whether the end of the raylet or the GCS has caused an error that Ray has raised.

        If one of them cannot be reached, check again until both respond, one counts as lost, or about ten seconds
        have passed. Return normally if none counts as lost.

        Raises:
            RayLost: The raylet or the GCS has ended or does not respond.
        """
        self._last_check = 0.0
        self.check()
        while self._since and not monotonic() - min(self._since.values()) > GCS_RESTART_TIMEOUT_S + POLL_INTERVAL_S:
            sleep(POLL_INTERVAL_S)
            self.check()

    def _check(self, part: str, place: tuple[str, int]) -> None:
        try:
            socket.create_connection(place, LIFELINE_CONNECT_TIMEOUT_S).close()
            self._since.pop(part, None)
            return
        except ConnectionRefusedError:
            gone_s, end = REFUSED_TIMEOUT_S, "has exited, which ended all workers"
            if part == GCS and not self._own:  # it may be restarting
                gone_s = float(os.environ.get(GCS_RECONNECT_VARIABLE, GCS_RESTART_TIMEOUT_S))
        except OSError:
            gone_s, end = self._patience_s, "does not respond, so all workers are lost"
        if monotonic() - self._since.setdefault(part, monotonic()) > gone_s:
            what = f"Ray's {part}, {PART_DESCRIPTIONS[part]}, {end}"
            lost = RayLost(what, where="{}:{}".format(*place))
            lost.part = part
            raise lost


def _places() -> dict[str, tuple[str, int]]:
    """Return {RAYLET: (host, port), GCS: (host, port)}; {} with Ray client."""
    import ray
    from ray.util.client import ray as client

    if client.is_connected():
        return {}
    context = ray.get_runtime_context()
    own_node = next(node for node in ray.nodes() if node["NodeID"] == context.get_node_id())
    host, _, port = context.gcs_address.rpartition(":")
    raylet = (own_node["NodeManagerAddress"], own_node["NodeManagerPort"])
    return {RAYLET: raylet, GCS: (host.strip("[]"), int(port))}


def wait_for(ref: Any, lifeline: RayMonitor, on_poll: Callable[[], None] = lambda: None) -> Any:
    """Wait for the result of a task or actor method, and return it; meanwhile, check that Ray is running.

    Args:
        ref: Object reference of the result.
        lifeline: Monitor of this driver's raylet and GCS.
        on_poll: Function called about every POLL_INTERVAL_S while waiting; its exceptions are not caught.

    Raises:
        RayLost: The raylet or the GCS has ended or does not respond.
        Exception: The task or method raised this error.
    """
    import ray

    while not ray.wait([ref], timeout=POLL_INTERVAL_S, fetch_local=False)[0]:
        lifeline.check()
        on_poll()
    return ray.get(ref)
