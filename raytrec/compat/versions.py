"""Supported versions of upstream packages, and access to their private names."""

from __future__ import annotations

import re
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from raytrec.common.errors import RunError
from raytrec.common.machine import REINSTALL_ADVICE, get_installed_version, get_torch_cuda_version

# Releases of torch, TorchRec and FBGEMM belong together: FBGEMM is compiled for one torch version, and TorchRec
# calls FBGEMM's operators. Keys are files in requirements/; values map packages to versions or version prefixes. A test
# compares the versions with the files.
PAIRS = {
    "cpu.txt (or cuda.txt, notebook.txt)": {
        "torch": "2.13.0", "torchrec": "1.8.0", "fbgemm-gpu": "1.8.0", "fbgemm-gpu-cpu": "1.8.0"
    },
    "next.txt": {"torch": "2.14", "torchrec": "1.9", "fbgemm-gpu": "1.9.0", "fbgemm-gpu-cpu": "1.9.0"},
}  # fmt: skip
PAIRED_PACKAGES = ("torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu")
# Packages that are compatible with every pair.
SUPPORTED_VERSIONS = {"ray": ("2.60.0",), "mlflow": ("3.17", "3.18"), "pyarrow": ("25", "26")}


def require_versions() -> None:
    """Raise a RunError if an installed package has an unsupported version or build; see `find_wrong_versions`."""
    if error := find_wrong_versions():
        raise error


def find_wrong_versions() -> RunError | None:
    """Compare the installed packages with PAIRS and SUPPORTED_VERSIONS, without importing any.

    Packages that are not installed are ignored, because a driver needs only some packages.

    Returns:
        None if all versions are supported, otherwise an error. The error reports unsupported versions with the nearest
        supported pair, two builds of FBGEMM in one folder, or builds of FBGEMM and torch for different CUDA versions.
    """
    versions = {
        name: version for name in (*SUPPORTED_VERSIONS, *PAIRED_PACKAGES) if (version := get_installed_version(name))
    }
    what, expected = [], []
    for name, pins in SUPPORTED_VERSIONS.items():
        if name in versions and not _matches(versions[name], *pins):
            what.append(f"{name} {versions[name]}")
            expected.append(f"{name} {' or '.join(pins)}")
    paired = {name: versions[name] for name in PAIRED_PACKAGES if name in versions}

    def distance(pair: dict[str, str]) -> int:
        """Return the distance between the installed releases X.Y and a pair's, summed over packages."""
        return sum(abs(_parse_release(version) - _parse_release(pair[name])) for name, version in paired.items())

    files, pair = min(PAIRS.items(), key=lambda item: distance(item[1]))
    if not all(_matches(version, pair[name]) for name, version in paired.items()):
        what.append(" with ".join(f"{name} {version}" for name, version in paired.items()))
        expected.append(" with ".join(f"{name} {pair[name]}" for name in paired))
    where = f"{sys.prefix} on {socket.gethostname()}"
    if not what:
        return _find_wrong_build(versions, where)
    return RunError(
        f"this version of raytrec does not support {', '.join(what)}",
        where=where,
        expected=", ".join(expected),
        do=f"run pip install --no-deps -r requirements/{files} of this version of raytrec (docs/install.md)",
    )


def _find_wrong_build(versions: dict[str, str], where: str) -> RunError | None:
    """Return the error for a build of FBGEMM that does not match torch's build, or None if it matches."""
    cuda, build = versions.get("fbgemm-gpu"), "fbgemm-gpu-cpu"
    release = (cuda or "").partition("+")[0]
    if cuda and build in versions:
        keep = f"{build}=={versions[build]} (on machines with GPUs: fbgemm-gpu=={release})"
        return RunError(
            f"{build} {versions[build]} and fbgemm-gpu {cuda} are both installed and share one folder",
            where=where,
            expected="only one of the two packages, because the later installation has overwritten files of the other",
            do=f"run pip uninstall --yes fbgemm-gpu {build}, then pip install --no-deps {keep}",
        )
    if not cuda or "torch" not in versions:
        return None
    suffix = re.search(r"\+cu(\d+)(\d)$", cuda)  # wheels from PyTorch's index, such as 1.8.0+cu126
    fbgemm, torch = ".".join(suffix.groups()) if suffix else None, get_torch_cuda_version()
    if torch and fbgemm in (None, torch):
        return None
    target, torch_target = (f"CUDA {fbgemm}" if fbgemm else "CUDA"), (f"CUDA {torch}" if torch else "CPUs")
    return RunError(
        f"fbgemm-gpu {cuda} is built for {target}, but torch {versions['torch']} is built for {torch_target}",
        where=where,
        expected="builds of FBGEMM and torch for the same CUDA version, or both for CPUs",
        do=f"run pip install --no-deps --force-reinstall fbgemm-gpu=={release} (PyPI's build, for PyPI's torch)"
        if torch
        else f"run pip uninstall --yes fbgemm-gpu, then pip install --no-deps fbgemm-gpu-cpu=={release}; "
        f"to use GPUs: {REINSTALL_ADVICE.format(device='cuda')}",
    )


def _matches(version: str, *pins: str) -> bool:
    release = version.partition("+")[0].split(".")  # versions of torch builds may end with +cpu or +cu130
    return any(release[: pin.count(".") + 1] == pin.split(".") for pin in pins)


def _parse_release(version: str) -> int:
    major, minor = re.match(r"(\d+)(?:\.(\d+))?", version).groups("0")
    return 100 * int(major) + int(minor)


@contextmanager
def replace_private(package: str, *replacements: tuple[Any, str, Any]) -> Iterator[None]:
    """Replace attributes of upstream objects during the block.

    Args:
        package: Upstream package.
        *replacements: (object, name of its attribute, new value) of each replacement.

    Raises:
        RunError: An attribute is missing; see `private`.
    """
    originals = [(owner, name, private(owner, name, package)) for owner, name, _ in replacements]
    try:
        for owner, name, value in replacements:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in originals:
            setattr(owner, name, value)


def set_private(owner: Any, name: str, value: Any, package: str) -> None:
    """Replace an attribute of an upstream object for the rest of the process; arguments are as in `replace_private`.

    Raises:
        RunError: The attribute is missing; see `private`.
    """
    private(owner, name, package)
    setattr(owner, name, value)


def private(owner: Any, name: str, package: str) -> Any:
    """Return the private attribute `name` of an object (`owner`) of an upstream package.

    Raises:
        RunError: The attribute is missing, because the installed version of `package` is not supported.
    """
    try:
        return getattr(owner, name)
    except AttributeError:
        raise missing(f"{getattr(owner, '__name__', type(owner).__name__)}.{name}", package) from None


def missing(name: str, package: str) -> RunError:
    """Return the error for a private name that the installed version of an upstream package does not have."""
    version = get_installed_version(package) or get_installed_version(f"{package}-cpu") or "(not installed)"
    pins = SUPPORTED_VERSIONS.get(package) or [pair[package] for pair in PAIRS.values()]
    return RunError(
        f"{package} {version} has no {name}",
        where="raytrec/compat",
        expected=f"{package} {' or '.join(pins)}, which has {name}",
        do="install the versions pinned in requirements/, or adapt raytrec/compat to the new version",
    )
