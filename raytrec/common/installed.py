"""For which device the installed packages are built: found without importing torch, which takes seconds."""

from __future__ import annotations

import runpy
from importlib.metadata import PackageNotFoundError, distribution

from raytrec.common.versions import installed

# What to do where it is the wrong one; see requirements/install.py.
OTHER_DEVICE = "make clean, then make install DEVICE={device} (docs/install.md)"


def built_for() -> str | None:
    """What torch and FBGEMM of this environment are for, "cuda" or "cpu"; None where there is no torch.

    FBGEMM's builds are two distributions that share their folder, so that one beside the other breaks it.
    """
    try:
        torch = distribution("torch")
    except PackageNotFoundError:
        return None
    # Its few lines are constants; the version's suffix (+cpu, +cu130) is missing where PyPI is the source.
    version = runpy.run_path(str(torch.locate_file("torch/version.py")))
    return "cuda" if version.get("cuda") and not installed("fbgemm-gpu-cpu") else "cpu"
