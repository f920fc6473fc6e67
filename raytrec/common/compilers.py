"""What torch.compile needs of a machine. No torch: the driver asks, too."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path

from raytrec.common.errors import ConfigError
from raytrec.common.versions import installed


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
