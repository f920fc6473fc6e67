"""Podman in separate namespaces: builds the images, runs the compose file as it is, and leaves nothing.

What runs is in a pid, network and mount namespace, whose end is the end of it. Only builds use the network.
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
COMPOSE = Path(sys.executable).with_name("podman-compose")
PROGRAMS = ["podman", "debootstrap", "crun", "unshare", "nsenter", "iptables"]
MISSING = [name for name in PROGRAMS if not shutil.which(name)]
PACKAGES = "apt-get install --no-install-recommends podman crun netavark aardvark-dns iptables debootstrap"
BASE = "docker.io/library/debian:bookworm-slim"

# A machine that is a sandbox itself may not raise limits and has no cgroups to give away: containers get by
# without. Where there is no systemd, podman runs health checks when it is asked to.
CONFIGURATION = """
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
CRUN = """#!{python} -ISB
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
PODMAN = """#!/bin/sh
exec {podman} --root {folder}/images --runroot {folder}/run --storage-driver overlay "$@"
"""
NAMESPACES = """
mount --make-rprivate / &&
{ umount --lazy --recursive /sys/fs/cgroup || true; } && mount -t cgroup2 cgroup2 /sys/fs/cgroup &&
mount -t tmpfs tmpfs /run && mkdir /run/lock && mount -t tmpfs tmpfs /dev/shm &&
ip link set lo up && echo ready && exec sleep infinity
"""


class Engine:
    """`with Engine(folder) as engine:` images and containers below `folder`, which is not removed.

    Args:
        folder: an empty folder on a disk with room for 10 GB.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        for name in ("images", "run", "networks"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        parts = {"folder": folder, "python": sys.executable}
        parts |= {name: shutil.which(name) for name in ("crun", "podman")}
        (folder / "containers.conf").write_text(CONFIGURATION.format(**parts))
        for name, text in (("crun", CRUN), ("podman", PODMAN)):
            (folder / name).write_text(text.format(**parts))
            (folder / name).chmod(0o755)
        self.env = dict(os.environ) | {
            "PATH": f"{folder}:{os.environ['PATH']}",
            "CONTAINERS_CONF": str(folder / "containers.conf"),
            "DISABLE_HC_SYSTEMD": "true",
        }

    def __enter__(self) -> Engine:
        own = ["setpriv", "--pdeathsig", "KILL"]  # should this process die without a word
        own += ["unshare", "--mount", "--net", "--pid", "--fork", "--mount-proc", "--kill-child"]
        self._holder = subprocess.Popen([*own, "sh", "-c", NAMESPACES], stdout=subprocess.PIPE, text=True)
        assert self._holder.stdout.readline() == "ready\n"
        first = psutil.Process(self._holder.pid).children()[0].pid
        self._enter = ["nsenter", "--target", str(first), "--mount", "--net", "--pid", "--wdns=/"]
        return self

    def __exit__(self, *_: object) -> None:
        self._holder.kill()  # and by --kill-child the namespaces' first process, whose end is that of all
        self._holder.wait()
        places = {each.mountpoint for each in psutil.disk_partitions(all=True)}
        for place in sorted(places, reverse=True):  # what builds have left, the inner ones first
            if Path(place).is_relative_to(self.folder):
                subprocess.run(["umount", "--lazy", place], check=True)

    def base(self) -> None:
        """Debian as its own tool makes it, under the name of the image that Dockerfiles begin from."""
        root = self.folder / "debian"
        sources = subprocess.run(["apt-get", "indextargets", "--format", "$(REPO_URI)"], capture_output=True)
        mirror = next(line for line in sources.stdout.decode().split() if line.rstrip("/").endswith("debian"))
        check(["debootstrap", "--variant=minbase", "bookworm", str(root), mirror])
        tar = subprocess.Popen(["tar", "-C", str(root), "-c", "."], stdout=subprocess.PIPE)
        check(["podman", "import", "-", BASE], env=self.env, stdin=tar.stdout)
        assert tar.wait() == 0
        shutil.rmtree(root)

    def build(self, target: str) -> None:
        """The image raytrec:TARGET, with this machine's way to packages."""
        config, volumes, index = pip_of_this_machine(self.folder)
        command = ["podman", "build", "--isolation", "chroot", "--network", "host", "--format", "docker"]
        command += ["--layers", "--pull-never", "--volume", f"{config}:/etc/pip.conf:ro", *volumes]
        command += ["--build-arg", f"TORCH_INDEX={index}", "--file", "deploy/Dockerfile"]
        command += ["--target", target, "--tag", f"raytrec:{target}", "."]
        check(command, env=self.env, cwd=REPOSITORY, timeout=1800)

    def podman(self, *arguments: str, timeout: float = 120, **options) -> subprocess.CompletedProcess:
        """A podman command inside; its result with stdout and stderr as text."""
        return self.inside("podman", *arguments, timeout=timeout, **options)

    def compose(self, files: list[str], *arguments: str, timeout: float = 300) -> subprocess.CompletedProcess:
        """A command of podman-compose inside, on compose files."""
        named = [word for file in files for word in ("--file", file)]
        return self.inside(str(COMPOSE), *named, *arguments, timeout=timeout)

    def inside(self, *command: str, timeout: float = 120, **options) -> subprocess.CompletedProcess:
        """Any command inside the namespaces."""
        settings = {"env": self.env, "capture_output": True, "text": True} | options
        return subprocess.run([*self._enter, *command], timeout=timeout, **settings)

    def start(self, *command: str, env: dict[str, str]) -> subprocess.Popen:
        """A command inside that goes on; its output as text."""
        return subprocess.Popen([*self._enter, *command], env=env, stdout=subprocess.PIPE, text=True)

    def image(self, tag: str) -> dict:
        """The output of `podman image inspect`."""
        shown = subprocess.run(
            ["podman", "image", "inspect", tag], capture_output=True, env=self.env, check=True
        )
        return json.loads(shown.stdout)[0]


def pip_of_this_machine(folder: Path) -> tuple[Path, list[str], str]:
    """Where pip finds packages here, for a build: a pip.conf, folders to mount, and the main index.

    All of it comes from pip itself, so that a build finds the same as an installation here would.
    """
    # Here alone: a process that has imported pip cannot import setuptools, which torch's compiler needs.
    from pip._internal.models.index import PyPI

    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True)
    values: dict[str, str] = {}
    for line in sorted(listed.stdout.splitlines(), reverse=True):  # :env: comes last, and counts
        key, _, value = line.partition("=")
        values[key.rpartition(".")[2]] = value.strip("'").replace("\\n", " ")
    index = values.get("index-url", PyPI.simple_url)
    volumes = []
    for key in ("cert", "find-links", "extra-index-url"):
        for word in values.get(key, "").split():
            place = Path(word.removeprefix("file://"))
            if key == "extra-index-url":  # an index's links lead to files next to it
                place = place.parent
            if place.is_absolute() and place.exists():
                # Not over the image's own certificates: those of this machine get another name.
                inside = f"/opt/pip-{key}.pem" if place.is_file() else str(place)
                values[key] = values[key].replace(word, inside) if place.is_file() else values[key]
                volumes += ["--volume", f"{place}:{inside}:ro"]
    config = folder / "pip.conf"
    kept = ("cert", "find-links", "extra-index-url", "index-url", "default-timeout", "trusted-host")
    config.write_text("[global]\n" + "".join(f"{k} = {v}\n" for k, v in values.items() if k in kept))
    return config, volumes, index


def check(command: list[str], **options) -> None:
    """A command that has to succeed; else its last words."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
    assert done.returncode == 0, f"{command[:3]} failed:\n{done.stdout[-3000:]}"
