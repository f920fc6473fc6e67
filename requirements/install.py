"""Install the pinned packages for one device, with the matching torch build.

    python requirements/install.py cpu            # or cuda
    python requirements/install.py cpu -r requirements/dev.txt --torch-index https://mirror/whl/cpu

On Linux, PyPI's torch is the CUDA build. It needs CUDA's libraries, which cpu.txt leaves out: without them
`import torch` fails. The script therefore requests the CPU build, whose version ends in +cpu: first from the
indexes that pip is configured to use, then from PyTorch's own index. Unknown arguments go to `pip install`.

The script uses only the standard library, because it runs before any package is installed: in the Makefile
and in deploy/Dockerfile, where pip installs into another environment (PIP_PYTHON).
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
# By default pip waits up to 15 s and retries 5 times: too long for an unreachable index when a second
# index remains. The timeout of pip's own indexes is left to pip's configuration.
SOON = ["--retries", "1"]
# Distribution of each device. Both install files into the same folder, so one breaks the other.
FBGEMM = {"cpu": "fbgemm-gpu-cpu", "cuda": "fbgemm-gpu"}
# CUDA version of the pinned torch and fbgemm-gpu, and the oldest driver that supports it.
CUDA, DRIVER, DRIVER_FILE = "13.0", 580, Path("/proc/driver/nvidia/version")
# Oldest and newest Python for which every pinned package has a wheel; the same as in pyproject.toml.
PYTHONS = (3, 11), (3, 14)
INSTALL = ["install", "--no-deps", "--only-binary", ":all:"]

LIST = """
import json
from importlib.metadata import distributions
print(json.dumps([(d.metadata["Name"], d.version) for d in distributions() if d.metadata["Name"]]))
"""


class InstallError(Exception):
    """A failed installation, with the message parts of raytrec.common.errors.RaytrecError.

    RaytrecError itself cannot be used, because raytrec is not installed yet.
    """

    def __init__(self, what: str, **parts: str):
        lines = [f"  {name + ':':<10}{text}" for name, text in parts.items()]
        super().__init__("\n".join([f"error: {what}", *lines]))


def main(arguments: list[str]) -> None:
    """Install the packages for the device in the command-line arguments.

    Raises:
        InstallError: The Python version, the environment or the driver is unsuitable, or pip failed.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("device", choices=list(FBGEMM))
    parser.add_argument(
        "--torch-index", default=TORCH_INDEX, help="index of torch's CPU build, used after pip's own indexes"
    )
    options, more = parser.parse_known_args(arguments)
    refuse_other_python(sys.version_info[:2])
    file = HERE / f"{options.device}.txt"
    torch = re.search(r"^torch==(\S+)", file.read_text(), re.MULTILINE)[1]
    installed = installed_versions()
    refuse_other_device(options.device, installed)
    if options.device == "cuda":
        refuse_old_driver()
    if not is_right_torch(options.device, installed.get("torch", ""), torch):
        install_torch(options.device, torch, options.torch_index)
    if pip(*INSTALL, "-r", str(file), *more).returncode:
        raise InstallError(
            f"pip could not install {file.name} for Python {sys.version_info[0]}.{sys.version_info[1]}",
            where="pip's messages above",
            expected="a wheel of every package; 'No matching distribution found' names a missing one",
            do="let pip reach an index with all packages, or use another Python: make clean, make install "
            "PYTHON=python3.12",
        )
    check_installed(options.device, installed_versions(), torch)


def pip(*arguments: str, **options: object) -> subprocess.CompletedProcess:
    """Run pip with arguments; options are those of subprocess.run."""
    return subprocess.run([*PIP, *arguments], text=True, **options)


def installed_versions() -> dict[str, str]:
    """Return name → version of the packages in the environment that pip installs into."""
    python = os.environ.get("PIP_PYTHON") or sys.executable
    listed = subprocess.run([python, "-c", LIST], stdout=subprocess.PIPE, check=True)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in json.loads(listed.stdout)}


def refuse_other_python(version: tuple[int, int]) -> None:
    """Check that the pinned packages have wheels for this Python version.

    Raises:
        InstallError: They have no wheels.
    """
    first, last = PYTHONS
    if not first <= version <= last:
        raise InstallError(
            f"the pinned packages have no wheels for Python {version[0]}.{version[1]}",
            where=sys.executable,
            expected=f"Python {first[0]}.{first[1]} to {last[0]}.{last[1]}",
            do="run make clean, then make install or make install PYTHON=/path/to/python3.12",
        )


def refuse_other_device(device: str, installed: dict[str, str]) -> None:
    """Check that the environment has no packages of the other device.

    Raises:
        InstallError: The environment has packages of the other device.
    """
    other = next(name for name in FBGEMM if name != device)
    if FBGEMM[other] in installed:
        raise InstallError(
            f"this environment is for {other}, because it contains {FBGEMM[other]}",
            where=f"requirements/install.py {device}",
            expected=f"an environment without {FBGEMM[other]}; {FBGEMM[device]} has the same files",
            do=f"use {other}, or create another environment: make clean, make install DEVICE={device}",
        )


def refuse_old_driver(file: Path = DRIVER_FILE) -> None:
    """Check NVIDIA's driver before 5 GB are downloaded. A missing driver is accepted, as in an image build.

    Raises:
        InstallError: NVIDIA's driver on this machine is older than the packages' CUDA needs.
    """
    try:
        match = re.search(r"\b(\d{3})\.\d+(\.\d+)?\b", file.read_text(encoding="utf-8"))
    except OSError:
        return
    # Data-center GPUs can use older drivers with NVIDIA's compatibility package of CUDA.
    if match and int(match[1]) < DRIVER and not list(Path("/usr/local").glob("cuda-13*/compat/libcuda.so.*")):
        raise InstallError(
            f"NVIDIA's driver {match[0]} is too old for these packages to find a GPU",
            where=str(file),
            expected=f"{DRIVER} or newer: the packages are built for CUDA {CUDA}",
            do="install a newer driver, or, for data-center GPUs, NVIDIA's package "
            f"cuda-compat-{CUDA.replace('.', '-')}, whose folder must be in LD_LIBRARY_PATH",
        )


def is_right_torch(device: str, version: str, pinned: str) -> bool:
    """Return True if a version of torch ("" if not installed) is the pinned one, built for the device."""
    public, _, local = version.partition("+")
    return public == pinned and local in {"cpu": ("cpu",), "cuda": ("", f"cu{CUDA.replace('.', '')}")}[device]


def install_torch(device: str, version: str, index: str) -> None:
    """Install the torch build for the device.

    Raises:
        InstallError: No index has that build.
    """
    if device == "cuda":  # === compares literally; == would prefer an available +cpu build
        if pip(*INSTALL, f"torch==={version}").returncode:
            raise InstallError(f"pip could not install torch {version}", where="pip's messages above")
        return
    logs = []
    for place in ([], ["--timeout", "15", "--index-url", index]):
        done = pip(*INSTALL, *SOON, *place, f"torch=={version}+cpu", stderr=subprocess.PIPE)
        if not done.returncode:
            return
        logs += [line for line in done.stderr.splitlines() if line.startswith(("ERROR", "WARNING: Retrying"))]
    raise InstallError(
        f"found no CPU build of torch {version}",
        where=f"the indexes configured for pip, then {index}",
        expected=f"torch {version}+cpu; PyPI's torch {version} is the CUDA build, which fails without CUDA",
        do="pass a reachable index (--torch-index URL; make install TORCH_INDEX=URL), or a "
        "folder with the wheel (PIP_FIND_LINKS=FOLDER)",
        **{"pip": "\n            ".join(dict.fromkeys(logs))},
    )


def check_installed(device: str, installed: dict[str, str], pinned: str) -> None:
    """Check that torch is the build for the device and that only one build of FBGEMM is installed.

    Raises:
        InstallError: torch is not the build for the device, or the other build of FBGEMM is installed.
    """
    version = installed.get("torch", "")
    if not is_right_torch(device, version, pinned):
        raise InstallError(
            f"torch {version or '(missing)'} is not the build for {device}",
            expected=f"torch {pinned}+cpu" if device == "cpu" else f"torch {pinned} for CUDA {CUDA}, as on PyPI",
            do="check pip's constraints and indexes (pip config list), then recreate "
            f"the environment: make clean, make install DEVICE={device}",
        )
    refuse_other_device(device, installed)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except InstallError as error:
        sys.exit(str(error))
