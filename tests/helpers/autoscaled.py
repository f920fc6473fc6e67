"""A Ray cluster with the settings of cluster.yaml whose autoscaler starts and ends nodes on this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
from heads import RAY, end_ray, environment_with_token, find_free_ports, make_short_link
from launching import AWS_CONFIG, prepare_launcher_config
from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID, FAKE_HEAD_NODE_TYPE
from waiting import wait_for

TESTS, BENCHMARKS = Path(__file__).parent, Path(__file__).parents[2] / "benchmarks"
START_S = 120.0


def autoscaler_config(address: str, idle_s: float) -> dict[str, Any]:
    """Return the configuration of cluster.yaml with simulated nodes on this machine.

    A node type with GPUs gets 2 CPUs, for a worker and its reader.

    Args:
        address: address of the Ray cluster.
        idle_s: seconds after which an idle node is terminated.
    """
    config = prepare_launcher_config(AWS_CONFIG)
    types = config["available_node_types"]
    types[FAKE_HEAD_NODE_TYPE] = types.pop(config["head_node_type"])
    config["head_node_type"] = FAKE_HEAD_NODE_TYPE
    config["provider"] = {
        "type": "external",
        "module": "machines.LocalMachineProvider",
        "gcs_address": address,
        "head_node_id": FAKE_HEAD_NODE_ID,
        "launch_multiple": True,
        "disable_node_updaters": True,  # nothing is installed
        "disable_launch_config_check": True,
    }
    for kind in types.values():
        gpus = kind["resources"].pop("GPU", 0)
        kind["node_config"], kind["resources"]["CPU"] = {}, 2 if gpus else min(1, kind["resources"]["CPU"])
        kind["resources"]["object_store_memory"] = 200 << 20
    return config | {"idle_timeout_minutes": idle_s / 60, "file_mounts": {}}


class AutoscaledCluster:
    """Autoscaling Ray cluster: `with Autoscaled(folder, idle_s) as cluster:` runs the head.

    Args:
        folder: an empty folder for the token, Ray's files and the configuration.
        idle_s: seconds after which an idle node is terminated.

    Attributes:
        address: address of the cluster, HOST:PORT.
        env: environment variables for commands of a cluster user.
    """

    def __init__(self, folder: Path, idle_s: float):
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, config = folder, folder / "cluster.json"
        port, dashboard = find_free_ports(2)
        self.address = f"127.0.0.1:{port}"
        settings = autoscaler_config(self.address, idle_s)
        config.write_text(json.dumps(settings))
        paths = [os.environ.get("PYTHONPATH"), str(TESTS), str(BENCHMARKS)]  # machines, recorder
        self.env = environment_with_token(folder / "auth_token") | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        # Same settings as raytrec.cluster.session.stay_on_loopback.
        self.env |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "GLOO_SOCKET_IFNAME": "lo"}
        self._environment = self.env | {
            "RAY_FAKE_CLUSTER": "1",
            "RAY_enable_autoscaler_v2": "1",  # as `ray up` and KubeRay choose
            "RAY_CLOUD_INSTANCE_ID": FAKE_HEAD_NODE_ID,
            "RAY_NODE_TYPE_NAME": FAKE_HEAD_NODE_TYPE,
            "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        }
        self._command = [RAY, "start", "--head", "--block", "--node-ip-address", "127.0.0.1"]
        self._command += ["--port", str(port), "--dashboard-host", "127.0.0.1"]
        self._command += ["--dashboard-port", str(dashboard), "--num-cpus", "0"]
        self._command += ["--autoscaling-config", str(config), "--object-store-memory", str(200 << 20)]
        self._command += ["--temp-dir", str(make_short_link(folder)), "--disable-usage-stats"]

    def __enter__(self) -> AutoscaledCluster:
        with (self._folder / "ray.log").open("w") as log:
            self._process = subprocess.Popen(self._command, env=self._environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            wait_for(self._has_monitor, "the autoscaler", START_S)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        children = psutil.Process(self._process.pid).children(recursive=True)
        end_ray(self._process)
        psutil.wait_procs(children, timeout=5)

    def nodes(self) -> dict[str, psutil.Process]:
        """Return machine name → raylet process, without the head."""
        found = {}
        for process in psutil.Process(self._process.pid).children(recursive=True):
            try:
                if process.name() == "raylet" and process.status() != psutil.STATUS_ZOMBIE:
                    found[process.environ().get("RAY_CLOUD_INSTANCE_ID", "")] = process
            except psutil.Error:
                continue
        found.pop(FAKE_HEAD_NODE_ID, None)
        return found

    def node_of(self, raylet: int) -> str:
        """Return the machine name of a raylet process id."""
        return next(name for name, process in self.nodes().items() if process.pid == raylet)

    def kill_node(self, name: str) -> None:
        """Kill the raylet of a node, like a spot instance that is reclaimed without notice."""
        self.nodes()[name].send_signal(signal.SIGKILL)

    def run(self, *command: str) -> None:
        """Run a command as a cluster user and wait until it ends."""
        env = self.env | {"RAY_ADDRESS": self.address}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=180)
        assert done.returncode == 0, done.stdout + done.stderr

    def log(self) -> str:
        """Return the end of the Ray and autoscaler logs."""
        logs = [self._folder / "ray.log", *(self._folder / "ray").glob("session_latest/logs/monitor.*")]
        return "\n".join(path.read_text(errors="replace")[-3000:] for path in logs)

    def _has_monitor(self) -> bool:
        """Return True if the autoscaler is running."""
        assert self._process.poll() is None, self.log()
        return any((self._folder / "ray").glob("session_latest/logs/monitor.log"))
