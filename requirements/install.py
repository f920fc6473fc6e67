"""Installs the pinned packages for one device, with the torch that belongs to it.

    python requirements/install.py cpu            # or cuda
    python requirements/install.py cpu -r requirements/dev.txt --torch-index https://mirror/whl/cpu

On Linux, PyPI's torch is the CUDA build. It needs CUDA's libraries, which cpu.txt leaves out: without them
`import torch` fails. So the CPU build, whose version ends in +cpu, is asked for by that name: first wherever
pip is configured to look, then at PyTorch's own index. What this script does not know goes to `pip install`.

Only the standard library: it runs before anything is installed, in the Makefile and in deploy/Dockerfile,
where pip installs into an environment that is not its own (PIP_PYTHON).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
# pip waits up to 15 s for an answer and asks 5 more times: too long for an index that is out of reach, where
# another place is still to be asked. How long it waits is left to pip's configuration where that is asked.
SOON = ["--retries", "1"]
# Distributions of one device: they put their files into the same folder, so one breaks the other.
FBGEMM = {"cpu": "fbgemm-gpu-cpu", "cuda": "fbgemm-gpu"}
# What the pinned torch and fbgemm-gpu are built for, and the oldest driver that runs it.
CUDA, DRIVER, DRIVER_FILE = "13.0", 580, Path("/proc/driver/nvidia/version")
# The oldest and the newest Python for which every pinned package has a wheel; pyproject.toml has the same.
PYTHONS = (3, 11), (3, 14)
INSTALL = ["install", "--no-deps", "--only-binary", ":all:"]

LIST = """
import json
from importlib.metadata import distributions
print(json.dumps([(d.metadata["Name"], d.version) for d in distributions() if d.metadata["Name"]]))
"""


class InstallError(Exception):
    """What went wrong, in the parts of raytrec.common.errors.RaytrecError, which is not installed yet."""

    def __init__(self, what: str, **parts: str):
        lines = [f"  {name + ':':<10}{text}" for name, text in parts.items()]
        super().__init__("\n".join([f"error: {what}", *lines]))


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("device", choices=list(FBGEMM))
    parser.add_argument(
        "--torch-index", default=TORCH_INDEX, help="where torch's CPU build is, after pip's own"
    )
    options, more = parser.parse_known_args(arguments)
    refuse_other_python(sys.version_info[:2])
    file = HERE / f"{options.device}.txt"
    torch = re.search(r"^torch==(\S+)", file.read_text(), re.MULTILINE)[1]
    before = installed_versions()
    refuse_other_device(options.device, before)
    if options.device == "cuda":
        refuse_old_driver()
    if not is_right_torch(options.device, before.get("torch", ""), torch):
        install_torch(options.device, torch, options.torch_index)
    if pip(*INSTALL, "-r", str(file), *more).returncode:
        raise InstallError(
            f"pip could not install {file.name} for Python {sys.version_info[0]}.{sys.version_info[1]}",
            where="pip's messages above",
            expected="wheels of every package; 'No matching distribution found' names one that has none",
            do="let pip reach an index with all of them, or use another Python: make clean, make install "
            "PYTHON=python3.12",
        )
    check_installed(options.device, installed_versions(), torch)


def pip(*arguments: str, **options: object) -> subprocess.CompletedProcess:
    return subprocess.run([*PIP, *arguments], text=True, **options)


def installed_versions() -> dict[str, str]:
    """Name → version of the packages in the environment that pip installs into."""
    python = os.environ.get("PIP_PYTHON") or sys.executable
    listed = subprocess.run([python, "-c", LIST], stdout=subprocess.PIPE, check=True)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in json.loads(listed.stdout)}


def refuse_other_python(version: tuple[int, int]) -> None:
    """
    Raises:
        InstallError: the pinned packages have no wheels for this Python.
    """
    first, last = PYTHONS
    if not first <= version <= last:
        raise InstallError(
            f"this is Python {version[0]}.{version[1]}, for which pinned packages have no wheels",
            where=sys.executable,
            expected=f"Python {first[0]}.{first[1]} to {last[0]}.{last[1]}",
            do="make clean, then make install, or make install PYTHON=/path/to/python3.12",
        )


def refuse_other_device(device: str, installed: dict[str, str]) -> None:
    """
    Raises:
        InstallError: the environment holds the packages of the other device.
    """
    other = next(name for name in FBGEMM if name != device)
    if FBGEMM[other] in installed:
        raise InstallError(
            f"this environment is for {other}: it holds {FBGEMM[other]}",
            where=f"requirements/install.py {device}",
            expected=f"an environment without it, because {FBGEMM[device]} has the same files",
            do=f"go on with {other}, or make another environment: make clean, make install DEVICE={device}",
        )


def refuse_old_driver(file: Path = DRIVER_FILE) -> None:
    """Before 5 GB are downloaded. Where there is no driver, as in an image that is built, nothing is refused.

    Raises:
        InstallError: NVIDIA's driver on this machine is older than the packages' CUDA needs.
    """
    try:
        found = re.search(r"\b(\d{3})\.\d+(\.\d+)?\b", file.read_text(encoding="utf-8"))
    except OSError:
        return
    # NVIDIA's package of CUDA's libraries for older drivers, on GPUs of data centers.
    if found and int(found[1]) < DRIVER and not list(Path("/usr/local").glob("cuda-13*/compat/libcuda.so.*")):
        raise InstallError(
            f"NVIDIA's driver is {found[0]}, with which these packages find no GPU",
            where=str(file),
            expected=f"{DRIVER} or newer: the packages are built for CUDA {CUDA}",
            do="install a newer driver; or, on GPUs of data centers, NVIDIA's package "
            f"cuda-compat-{CUDA.replace('.', '-')}, whose folder LD_LIBRARY_PATH has to name",
        )


def is_right_torch(device: str, version: str, pinned: str) -> bool:
    """Whether an installed version of torch ("" for none) is the pinned one, built for the device."""
    public, _, local = version.partition("+")
    return public == pinned and local in {"cpu": ("cpu",), "cuda": ("", f"cu{CUDA.replace('.', '')}")}[device]


def install_torch(device: str, version: str, index: str) -> None:
    """
    Raises:
        InstallError: no place that was asked has that build.
    """
    if device == "cuda":  # === is equal to the letter: a +cpu beside it, which == would prefer, is not
        if pip(*INSTALL, f"torch==={version}").returncode:
            raise InstallError(f"pip could not install torch {version}", where="pip's messages above")
        return
    said = []
    for place in ([], ["--timeout", "15", "--index-url", index]):
        done = pip(*INSTALL, *SOON, *place, f"torch=={version}+cpu", stderr=subprocess.PIPE)
        if not done.returncode:
            return
        said += [line for line in done.stderr.splitlines() if line.startswith(("ERROR", "WARNING: Retrying"))]
    raise InstallError(
        f"found no CPU build of torch {version}",
        where=f"where pip is configured to look, then {index}",
        expected=f"torch {version}+cpu; PyPI's torch {version} is the CUDA build, which fails without CUDA",
        do="name an index that this machine reaches (--torch-index URL; make install TORCH_INDEX=URL), or a "
        "folder with the wheel (PIP_FIND_LINKS=FOLDER)",
        **{"pip said": "\n            ".join(dict.fromkeys(said))},
    )


def check_installed(device: str, installed: dict[str, str], pinned: str) -> None:
    """
    Raises:
        InstallError: torch is not the build for the device, or FBGEMM's other build is there, too.
    """
    version = installed.get("torch", "")
    if not is_right_torch(device, version, pinned):
        raise InstallError(
            f"torch {version or 'is missing'} is installed, which is not the build for {device}",
            expected=f"torch {pinned}+cpu"
            if device == "cpu"
            else f"torch {pinned} for CUDA {CUDA}, as on PyPI",
            do="look for constraints or indexes of pip that choose another one (pip config list), and make "
            f"the environment anew: make clean, make install DEVICE={device}",
        )
    refuse_other_device(device, installed)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except InstallError as error:
        sys.exit(str(error))
