"""What is installed: versions of packages, the device that they are built for, and compilers.

No torch here, whose import takes seconds: the driver asks.
"""

from __future__ import annotations

import os
import runpy
import shutil
import sysconfig
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

from raytrec.common.errors import ConfigError

PACKAGES = ("raytrec", "torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu", "ray")
# What to do where it is the wrong one; see requirements/install.py.
OTHER_DEVICE = "make clean, then make install DEVICE={device} (docs/install.md)"


def installed(package: str) -> str | None:
    """The version of a package of this environment; None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def installed_versions(*more: str) -> dict[str, str]:
    """Package → version, of PACKAGES and `more`; without those that are not installed."""
    return {package: found for package in (*PACKAGES, *more) if (found := installed(package))}


def built_for() -> str | None:
    """What torch and FBGEMM of this environment are for, "cuda" or "cpu"; None where there is no torch.

    FBGEMM's builds are two distributions that share their folder, so that installing both breaks it.
    """
    try:
        torch = distribution("torch")
    except PackageNotFoundError:
        return None
    # Its few lines are constants; the version's suffix (+cpu, +cu130) is missing where PyPI is the source.
    version = runpy.run_path(str(torch.locate_file("torch/version.py")))
    return "cuda" if version.get("cuda") and not installed("fbgemm-gpu-cpu") else "cpu"


def require_compiler(device: str) -> None:
    """Refuses train.compile on a machine that has nothing to compile with.

    For CPUs torch (2.13.0) writes C++ modules of Python; for GPUs kernels of Triton, with a C compiler.

    Args:
        device: cpu or cuda.

    Raises:
        ConfigError: names what is missing.
    """
    if lacking := _missing(device):
        raise ConfigError(
            f"train.compile is set, and {lacking}",
            where="train.compile",
            expected="what torch.compile needs on every node with workers",
            do="install it, or set train.compile=false",
        )


def _missing(device: str) -> str | None:
    names = [os.environ.get("CXX", "g++")] if device == "cpu" else [os.environ.get("CC", "gcc"), "clang"]
    if not any(shutil.which(name) for name in names):
        return f"there is no {'C++' if device == 'cpu' else 'C'} compiler ({' or '.join(names)})"
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    if not headers.is_file():
        return f"Python's headers are missing ({headers})"
    if device == "cuda" and not installed("triton"):
        return "the package triton is not installed"
    return None
