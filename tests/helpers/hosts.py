"""Simulated hosts on one machine: Linux namespaces with separate addresses, processes and host names.

A bridge in a separate network namespace connects the hosts, so the network of the machine is not changed.
One process holds the namespaces of a host. When it ends, the kernel kills all processes of the host and
removes its network. It ends with the test, even if the test is killed. Requires root.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from heads import RAY, environment_with_token, make_short_link
from waiting import wait_for

PORT = 6379
NETWORK_PREFIX = "10.77.0."
HOST_NAMESPACES = ["--net", "--mount", "--pid", "--uts"]  # namespaces of a host
START_S = 240.0
PORT_DISABLED, PORT_FORWARDING = "0", "3"  # bridge port states
COUNT_NODES_SOURCE = """
import sys
import ray
from ray._raylet import GcsClient
try:
    print(sum(node.state == 0 for node in GcsClient(address=sys.argv[1]).get_all_node_info().values()))
except ray.exceptions.RayError:
    print(0)
"""


class HostCluster:
    """Ray cluster on simulated hosts, started with `ray start` and a token.

    The first host is the head and has no CPUs for workers. `ray start --block` ends when the cluster declares
    its node dead. It is then restarted, as systemd, KubeRay or the cluster launcher would do.

    Args:
        folder: an empty folder for the token, logs, Ray's files and the shared root.
        workers: number of hosts other than the head.
        cpus: logical CPUs of each worker host.
        environment: additional environment variables of Ray's processes.

    Attributes:
        all: the hosts, the head first.
        address: address of the cluster, HOST:PORT.
        root: RAYTREC_ROOT of the cluster's nodes, shared by all hosts.
        token: path of the token file.
        env: environment variables for commands of a cluster user.
    """

    def __init__(self, folder: Path, workers: int = 3, cpus: int = 2, environment: dict[str, str] | None = None):
        self.address, self.root, self.token = (f"{NETWORK_PREFIX}1:{PORT}", folder / "root", folder / "auth_token")
        self.root.mkdir(parents=True, exist_ok=True)
        self.env = environment_with_token(self.token) | {"RAYTREC_ROOT": str(self.root)} | (environment or {})
        self._folder, self._cpus = folder, [0, *[cpus] * workers]
        self._switch: NamespaceHost | None = None
        self.all: list[NamespaceHost] = []

    def __enter__(self) -> HostCluster:
        try:
            self._switch = NamespaceHost("switch", self._folder)
            self._switch.net("ip", "link", "add", "br0", "type", "bridge")
            self._switch.net("ip", "link", "set", "br0", "up")
            for number, cpus in enumerate(self._cpus, 1):
                self._connect(number)
                self._start_ray(number, cpus)
            self._wait_for_nodes()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for host in filter(None, [*self.all, self._switch]):
            host.end()

    def _connect(self, number: int) -> None:
        """Create a host and connect it to port p<number> of the bridge."""
        host = NamespaceHost(f"host{number}", self._folder)
        self.all.append(host)
        cable = ["type", "veth", "peer", "name", "eth0", "netns", str(host.pid)]
        self._switch.net("ip", "link", "add", f"p{number}", *cable)
        self._switch.net("ip", "link", "set", f"p{number}", "master", "br0", "up")
        host.address = f"{NETWORK_PREFIX}{number}"
        host.net("ip", "address", "add", f"{host.address}/24", "dev", "eth0")
        host.net("ip", "link", "set", "eth0", "up")

    def _start_ray(self, number: int, cpus: int) -> None:
        host, place = self.all[number - 1], self._folder / f"ray{number}"
        place.mkdir()
        command = [RAY, "start", "--block", f"--node-ip-address={host.address}", f"--num-cpus={cpus}"]
        command += [f"--object-store-memory={200 << 20}", f"--temp-dir={make_short_link(place)}"]
        command += ["--disable-usage-stats"]
        if number == 1:
            command += ["--head", f"--port={PORT}", "--dashboard-host=127.0.0.1"]
        else:
            command += [f"--address={self.address}"]
        host.start("sh", "-c", f"while true; do {shlex.join(command)}; sleep 1; done", env=self.env)
        if number == 1:  # a worker that starts before the head fails and is restarted
            self._wait_for_nodes()

    def _wait_for_nodes(self) -> None:
        try:
            wait_for(lambda: self.alive() == len(self.all), f"{len(self.all)} hosts", START_S)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.logs()}") from None

    def alive(self) -> int:
        """Return the number of nodes that are alive according to the cluster."""
        return int(self.all[0].run(sys.executable, "-c", COUNT_NODES_SOURCE, self.address, env=self.env).split()[-1])

    def cut_off(self, number: int) -> None:
        """Drop all packets from and to a host, so that connections hang without an error.

        Args:
            number: number of the host (the head is 1), equal to the last part of its address.
        """
        self._switch.net("bridge", "link", "set", "dev", f"p{number}", "state", PORT_DISABLED)

    def heal(self, number: int) -> None:
        """Reconnect a host that was cut off."""
        self._switch.net("bridge", "link", "set", "dev", f"p{number}", "state", PORT_FORWARDING)

    def logs(self) -> str:
        return "\n".join(f"{host.name}: {host.log.read_text()[-2000:]}" for host in self.all)


class NamespaceHost:
    """Simulated host: namespaces held by their process 1.

    Attributes:
        pid: id of that process outside the namespaces.
        log: log file of the processes of the host.
    """

    def __init__(self, name: str, folder: Path):
        self.name, self.log, self.address = name, folder / f"{name}.log", ""
        hold = ["setpriv", "--pdeathsig", "KILL", "unshare", *HOST_NAMESPACES, "--fork", "--kill-child", "--mount-proc"]
        hold += ["sh", "-c", "sleep infinity & wait"]
        self._process = subprocess.Popen(hold, stdin=subprocess.DEVNULL, start_new_session=True)
        self.log.touch()
        self.pid = self._wait_for_shell()
        self.net("ip", "link", "set", "lo", "up")
        self.run("hostname", name)

    def _wait_for_shell(self) -> int:
        outer, end = self._process.pid, time.monotonic() + 10
        while time.monotonic() < end and self._process.poll() is None:
            with suppress(FileNotFoundError, IndexError):
                child = int(Path(f"/proc/{outer}/task/{outer}/children").read_text().split()[0])
                if Path(f"/proc/{child}/comm").read_text().strip() == "sh":
                    return child
            time.sleep(0.01)
        raise OSError("namespaces cannot be made here")

    def command(self, *command: str) -> list[str]:
        """Return the command line that runs a command on this host."""
        return ["nsenter", "--target", str(self.pid), *HOST_NAMESPACES, "--", *command]

    def net(self, *command: str) -> None:
        """Run a command in the network namespace only; it sees the process ids of the machine."""
        command = ["nsenter", "--target", str(self.pid), "--net", "--", *command]
        subprocess.run(command, check=True, timeout=30, stderr=subprocess.PIPE)

    def run(self, *command: str, env: dict[str, str] | None = None) -> str:
        """Run a command on this host and return its output."""
        done = subprocess.run(self.command(*command), capture_output=True, text=True, env=env, timeout=120)
        assert done.returncode == 0, f"{self.name}: {' '.join(command)}: {done.stderr}"
        return done.stdout

    def start(self, *command: str, env: dict[str, str] | None = None, **options: Any) -> subprocess.Popen:
        """Start a background command; it ends with the host at the latest."""
        with open(self.log, "ab") as log:
            output = {"stdout": log, "stderr": log, "stdin": subprocess.DEVNULL} | options
            return subprocess.Popen(self.command(*command), env=env, **output)

    def listens(self) -> set[tuple[str, int]]:
        """Return (address, port) of all listening sockets, with addresses in the format of /proc/net/tcp."""
        return {
            (address, int(port, 16))
            for name in ("tcp", "tcp6")
            for line in Path(f"/proc/{self.pid}/net/{name}").read_text().splitlines()[1:]
            if line.split()[3] == "0A"
            for address, port in [line.split()[1].split(":")]
        }

    def end(self) -> None:
        """End all processes of the host."""
        self._process.kill()
        self._process.wait(30)


def why_hosts_unavailable(folder: Path) -> str | None:
    """Return the reason why simulated hosts cannot be created, or None if they can."""
    if os.geteuid() != 0:
        return "namespaces as hosts need root"
    try:
        switch = NamespaceHost("trial", folder)
        try:
            switch.net("ip", "link", "add", "br0", "type", "bridge")
            switch.net("ip", "link", "add", "p1", "type", "veth", "peer", "name", "eth0")
        finally:
            switch.end()
    except (OSError, AssertionError, subprocess.SubprocessError) as error:
        return f"namespaces as hosts cannot be made here: {error}"
    return None
