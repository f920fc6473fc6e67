"""A one-node Ray cluster started with `raytrec head`."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import parquet
from waiting import wait_for

PYTHON = sys.executable
RAY = str(Path(sys.executable).with_name("ray"))
RAYTREC = str(Path(sys.executable).with_name("raytrec"))


class RayHead:
    """Ray head on loopback: `with Head(folder) as head:`.

    Args:
        folder: an empty folder for the token, Ray's files and the shared root.
        cpus: number of logical CPUs.
        environment: additional environment variables of Ray and its jobs.
        program: command `raytrec`.

    Attributes:
        url: URL of the job API.
        client: ray:// address of the cluster.
        address: HOST:PORT of the cluster.
        root: RAYTREC_ROOT of the cluster's nodes.
        token: path of the token file.
        env: environment variables for commands of a cluster user.
    """

    def __init__(
        self,
        folder: Path,
        cpus: int = 6,
        environment: dict[str, str] | None = None,
        program: tuple[str, ...] = (RAYTREC,),
    ):
        self.folder, self.root, self.token = folder, folder / "root", folder / "auth_token"
        self.root.mkdir(parents=True)
        port, dashboard, client = find_free_ports(3)
        self.address = f"127.0.0.1:{port}"
        self.url, self.client = f"http://127.0.0.1:{dashboard}", f"ray://127.0.0.1:{client}"
        self.env = environment_with_token(self.token)
        short = {"RAY_TMPDIR": str(make_short_link(folder))}
        self._environment = self.env | short | (environment or {})
        self._command = [*program, "head", "--root", str(self.root), "--port", str(port)]
        self._command += ["--dashboard-port", str(dashboard), "--client-port", str(client)]
        self._command += ["--cpus", str(cpus)]

    def __enter__(self) -> RayHead:
        with (self.folder / "ray.log").open("w") as log:
            self._process = subprocess.Popen(self._command, env=self._environment, stdout=log, stderr=subprocess.STDOUT)
        wait_for(self._answers, "the head's answer", 90)
        return self

    def __exit__(self, *_: object) -> None:
        end_ray(self._process)

    @property
    def pid(self) -> int:
        return self._process.pid

    def run(self, *command: str, timeout: float = 240, **options) -> subprocess.CompletedProcess:
        """Run a command as a cluster user and wait until it ends; stdout and stderr are text."""
        return subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=timeout, **options)

    def _answers(self) -> bool:
        assert self._process.poll() is None, (self.folder / "ray.log").read_text()
        request = urllib.request.Request(f"{self.url}/api/jobs/")
        request.add_header("Authorization", f"Bearer {self.token.read_text()}")
        try:
            return urllib.request.urlopen(request, timeout=5).status == 200
        except (urllib.error.URLError, OSError):
            return False


def tiny_config(**changes) -> dict[str, Any]:
    """Return config values for the parquet.write_dataset in `data/tiny` below RAYTREC_ROOT.

    Args:
        changes: section__key=value.
    """
    values = parquet.config_values("data/tiny", "unused", **changes)
    del values["run"]
    return values


def plain_environment() -> dict[str, str]:
    """Return this process's environment without Ray and raytrec variables, with the venv first on PATH."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "RAYTREC_"))}
    path = os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", "")])
    return kept | {"OMP_NUM_THREADS": "1", "PATH": path}


def environment_with_token(file: Path) -> dict[str, str]:
    """Write a new token to a file and return the environment of a user of that token."""
    file.touch(mode=0o600)
    file.write_text(secrets.token_hex(32))
    return plain_environment() | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(file)}


def end_ray(process: subprocess.Popen) -> None:
    """End `ray start --head --block` and all its descendants."""
    if process.poll() is None:
        children = descendant_pids(process.pid)
        process.send_signal(signal.SIGTERM)  # Ray ends its own processes
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        kill_processes(children)


def kill_processes(pids: list[int]) -> None:
    """Kill the processes that are still running."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def descendant_pids(pid: int) -> list[int]:
    """Return the process ids of all descendants."""
    import psutil

    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def find_free_ports(count: int) -> list[int]:
    """Return ports that are free on loopback."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def make_short_link(folder: Path) -> Path:
    """Create a short symlink to a folder for Ray's Unix sockets, whose paths are limited to 107 bytes."""
    link = Path(tempfile.mkdtemp(prefix="rt")) / "r"
    (folder / "ray").mkdir(exist_ok=True)
    link.symlink_to(folder / "ray")
    return link
