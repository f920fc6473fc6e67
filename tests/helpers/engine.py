"""Podman in separate namespaces: builds the images and runs the unmodified compose file.

All containers run in a pid, network and mount namespace and end with it. Only builds use the network.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil

REPOSITORY = Path(__file__).parents[2]
PODMAN_COMPOSE = Path(sys.executable).with_name("podman-compose")
REQUIRED_PROGRAMS = ["podman", "debootstrap", "crun", "unshare", "nsenter", "iptables"]
MISSING_PROGRAMS = [name for name in REQUIRED_PROGRAMS if not shutil.which(name)]
INSTALL_COMMAND = "apt-get install --no-install-recommends podman crun netavark aardvark-dns iptables debootstrap"
BASE_IMAGE = "docker.io/library/debian:bookworm-slim"

# In a sandbox, limits cannot be raised and cgroups cannot be delegated, so containers run without both.
# Without systemd, podman runs health checks only on request.
CONTAINERS_CONF = """
[containers]
cgroups = "disabled"
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
lock_type = "file"
runtime = "crun"
[engine.runtimes]
crun = ["{folder}/crun"]
[network]
network_config_dir = "{folder}/networks"
"""
CRUN_WRAPPER = """#!{python} -ISB
import json, os, sys
for option, value in zip(sys.argv, sys.argv[1:]):
    if option in ("--bundle", "-b", "--process", "-p"):
        path = os.path.join(value, "config.json") if os.path.isdir(value) else value
        config = json.load(open(path))
        for part in (config, config.get("process", {{}})):
            part.pop("rlimits", None)
            part.pop("oomScoreAdj", None)
        config.get("linux", {{}}).pop("resources", None)
        json.dump(config, open(path, "w"))
os.execv("{crun}", ["crun", *sys.argv[1:]])
"""
PODMAN_WRAPPER = """#!/bin/sh
exec {podman} --root {folder}/images --runroot {folder}/run --storage-driver overlay "$@"
"""
NAMESPACE_SETUP = """
mount --make-rprivate / &&
{ umount --lazy --recursive /sys/fs/cgroup || true; } && mount -t cgroup2 cgroup2 /sys/fs/cgroup &&
mount -t tmpfs tmpfs /run && mkdir /run/lock && mount -t tmpfs tmpfs /dev/shm &&
ip link set lo up && echo ready && exec sleep infinity
"""


class PodmanEngine:
    """Podman with images and containers below `folder`: `with Engine(folder) as engine:`.

    The folder is not removed.

    Args:
        folder: an empty folder with 10 GB of free disk space.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        for name in ("images", "run", "networks"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        parts = {"folder": folder, "python": sys.executable}
        parts |= {name: shutil.which(name) for name in ("crun", "podman")}
        (folder / "containers.conf").write_text(CONTAINERS_CONF.format(**parts))
        for name, text in (("crun", CRUN_WRAPPER), ("podman", PODMAN_WRAPPER)):
            (folder / name).write_text(text.format(**parts))
            (folder / name).chmod(0o755)
        self.env = dict(os.environ) | {
            "PATH": f"{folder}:{os.environ['PATH']}",
            "CONTAINERS_CONF": str(folder / "containers.conf"),
            "DISABLE_HC_SYSTEMD": "true",
        }

    def __enter__(self) -> PodmanEngine:
        own = ["setpriv", "--pdeathsig", "KILL"]  # end the namespaces if this process is killed
        own += ["unshare", "--mount", "--net", "--pid", "--fork", "--mount-proc", "--kill-child"]
        self._holder = subprocess.Popen([*own, "sh", "-c", NAMESPACE_SETUP], stdout=subprocess.PIPE, text=True)
        assert self._holder.stdout.readline() == "ready\n"
        first = psutil.Process(self._holder.pid).children()[0].pid
        self._enter = ["nsenter", "--target", str(first), "--mount", "--net", "--pid", "--wdns=/"]
        return self

    def __exit__(self, *_: object) -> None:
        self._holder.kill()  # --kill-child also kills process 1 of the namespaces, which ends all processes
        self._holder.wait()
        places = {each.mountpoint for each in psutil.disk_partitions(all=True)}
        for place in sorted(places, reverse=True):  # unmount leftovers of builds, innermost first
            if Path(place).is_relative_to(self.folder):
                subprocess.run(["umount", "--lazy", place], check=True)

    def base(self) -> None:
        """Create the Debian base image of the Dockerfiles with debootstrap."""
        root = self.folder / "debian"
        sources = subprocess.run(["apt-get", "indextargets", "--format", "$(REPO_URI)"], capture_output=True)
        mirror = next(line for line in sources.stdout.decode().split() if line.rstrip("/").endswith("debian"))
        run_checked(["debootstrap", "--variant=minbase", "bookworm", str(root), mirror])
        tar = subprocess.Popen(["tar", "-C", str(root), "-c", "."], stdout=subprocess.PIPE)
        run_checked(["podman", "import", "-", BASE_IMAGE], env=self.env, stdin=tar.stdout)
        assert tar.wait() == 0
        shutil.rmtree(root)

    def build(self, target: str) -> None:
        """Build the image raytrec:TARGET with the pip settings of this machine."""
        config, volumes, index = copy_pip_settings(self.folder)
        command = ["podman", "build", "--isolation", "chroot", "--network", "host", "--format", "docker"]
        command += ["--layers", "--pull-never", "--volume", f"{config}:/etc/pip.conf:ro", *volumes]
        command += ["--build-arg", f"TORCH_INDEX={index}", "--file", "deploy/Dockerfile"]
        command += ["--target", target, "--tag", f"raytrec:{target}", "."]
        run_checked(command, env=self.env, cwd=REPOSITORY, timeout=1800)

    def podman(self, *arguments: str, timeout: float = 120, **options) -> subprocess.CompletedProcess:
        """Run a podman command inside the namespaces; stdout and stderr are text."""
        return self.inside("podman", *arguments, timeout=timeout, **options)

    def compose(self, files: list[str], *arguments: str, timeout: float = 300) -> subprocess.CompletedProcess:
        """Run podman-compose on compose files inside the namespaces."""
        named = [word for file in files for word in ("--file", file)]
        return self.inside(str(PODMAN_COMPOSE), *named, *arguments, timeout=timeout)

    def inside(self, *command: str, timeout: float = 120, **options) -> subprocess.CompletedProcess:
        """Run a command inside the namespaces."""
        settings = {"env": self.env, "capture_output": True, "text": True} | options
        return subprocess.run([*self._enter, *command], timeout=timeout, **settings)

    def start(self, *command: str, env: dict[str, str]) -> subprocess.Popen:
        """Start a background command inside the namespaces; stdout is text."""
        return subprocess.Popen([*self._enter, *command], env=env, stdout=subprocess.PIPE, text=True)

    def image(self, tag: str) -> dict:
        """Return the output of `podman image inspect`."""
        shown = subprocess.run(["podman", "image", "inspect", tag], capture_output=True, env=self.env, check=True)
        return json.loads(shown.stdout)[0]


def copy_pip_settings(folder: Path) -> tuple[Path, list[str], str]:
    """Return (pip.conf, mount options, index URL) that give a build the pip settings of this machine."""
    # Imported here: a process that has imported pip cannot import setuptools, which torch.compile needs.
    from pip._internal.models.index import PyPI

    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True)
    values: dict[str, str] = {}
    for line in sorted(listed.stdout.splitlines(), reverse=True):  # :env: comes last and overrides the others
        key, _, value = line.partition("=")
        values[key.rpartition(".")[2]] = value.strip("'").replace("\\n", " ")
    index = values.get("index-url", PyPI.simple_url)
    volumes = []
    for key in ("cert", "find-links", "extra-index-url"):
        for word in values.get(key, "").split():
            place = Path(word.removeprefix("file://"))
            if key == "extra-index-url":  # an index links to files in its parent folder
                place = place.parent
            if place.is_absolute() and place.exists():
                # Mount certificates under another name to keep the certificates of the image.
                inside = f"/opt/pip-{key}.pem" if place.is_file() else str(place)
                values[key] = values[key].replace(word, inside) if place.is_file() else values[key]
                volumes += ["--volume", f"{place}:{inside}:ro"]
    config = folder / "pip.conf"
    kept = ("cert", "find-links", "extra-index-url", "index-url", "default-timeout", "trusted-host")
    config.write_text("[global]\n" + "".join(f"{k} = {v}\n" for k, v in values.items() if k in kept))
    return config, volumes, index


def run_checked(command: list[str], **options) -> None:
    """Run a command; raise AssertionError with the end of its output if it fails."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
    assert done.returncode == 0, f"{command[:3]} failed:\n{done.stdout[-3000:]}"
