"""A cluster of Ray nodes on this machine that can be added and killed, and a disk that can be filled."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from ray.cluster_utils import Cluster
from ray.core.generated import autoscaler_pb2

from raytrec.cluster.access import use_token
from raytrec.cluster.session import stay_on_loopback
from raytrec.compat.ray_core import make_gcs_client

HERE = Path(__file__).parent
PREEMPTION = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")


class Nodes:
    """Ray cluster on loopback: a head node without CPUs, and nodes for one worker and its reader each.

    The constructor changes PYTHONPATH and RAY_TMPDIR of this process, and handles SIGTERM like Ctrl-C.

    Args:
        temporary: Folder for Ray's files, which must not contain `ray` yet.
    """

    def __init__(self, temporary: Path):
        stay_on_loopback()
        use_token(create=True)  # as drivers do: nodes without the token could not connect to them
        paths = [os.environ.get("PYTHONPATH"), str(HERE)]  # workers import recorder
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        # Ray records its most recent cluster in this folder; other users of the machine must not find this one.
        os.environ["RAY_TMPDIR"], self._temporary = str(temporary), str(temporary / "ray")
        Path(self._temporary).mkdir(parents=True)
        self._begin()

    def _begin(self) -> None:
        head = self._node(0, temp_dir=self._temporary, include_dashboard=False)
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self.address = self._cluster.address
        self._gcs = make_gcs_client(self.address)
        self.all: list[Any] = []
        _end_in_order()

    def begin_again(self) -> None:
        """Replace this cluster with a new one that has the same number of nodes."""
        number = len(self.all)
        self.close()
        self._begin()
        for _ in range(number):
            self.add()

    def _node(self, cpus: int, **more: Any) -> dict[str, Any]:
        return {"num_cpus": cpus, "node_ip_address": "127.0.0.1", "object_store_memory": 200 << 20, **more}

    def add(self) -> None:
        """Add a node to the cluster."""
        self.all.append(self._cluster.add_node(**self._node(2)))
        _end_in_order()

    def kill(self, node: Any) -> None:
        """Kill a node's processes without notice."""
        self.all.remove(node)
        self._cluster.remove_node(node, allow_graceful=False)

    def drain(self, node: Any, seconds: float) -> None:
        """Give notice that a node will be terminated after some seconds."""
        deadline = int((time.time() + seconds) * 1000)
        accepted, why = self._gcs.drain_node(node.node_id, PREEMPTION, "chaos", deadline)
        assert accepted, why

    def of(self, raylet: int) -> Any | None:
        """Return the node whose raylet has this process id, or None if the node is gone."""
        return next((node for node in self.all if self._raylet(node) == raylet), None)

    def coordinator(self) -> int | None:
        """Return the process id of the coordinator on the head node, or None if it is not running."""
        with suppress(psutil.Error):  # a process may end during the search
            for process in psutil.Process(self._raylet(self._cluster.head_node)).children(recursive=True):
                if "".join(process.cmdline()[:1]).startswith("ray::Coordinator"):
                    return process.pid
        return None

    def kill_raylet(self, node: Any) -> None:
        """Kill a node's raylet, and 3 seconds later the node's other processes."""
        os.kill(self._raylet(node), signal.SIGKILL)
        time.sleep(3)
        self.kill(node)

    def kill_in_head(self, name: str) -> None:
        """Kill a process on the head node: gcs_server or raylet."""
        os.kill(self._cluster.head_node.all_processes[name][0].process.pid, signal.SIGKILL)

    def _raylet(self, node: Any) -> int:
        return node.all_processes["raylet"][0].process.pid

    def close(self) -> None:
        """Shut down the cluster."""
        self._cluster.shutdown()


def _end_in_order() -> None:
    """Handle SIGTERM like Ctrl-C, so that no process keeps running; each Ray node sets another handler."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


@contextmanager
def small_disk(place: Path, mib: int) -> Iterator[None]:
    """Mount an in-memory file system of `mib` MiB for the duration of the block."""
    place.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={mib}m", "chaos", str(place)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)
