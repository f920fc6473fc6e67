"""The versions that raytrec is made for; any other one is refused before anything starts."""

from __future__ import annotations

import socket
import sys
from typing import Any

from raytrec.common.errors import RunError
from raytrec.common.versions import installed

# Package → version, or how it begins: those of pyproject.toml and requirements/ (a test compares).
PINNED = {
    "ray": "2.60.0",
    "torch": "2.13.0",
    "torchrec": "1.8.0",
    "fbgemm-gpu": "1.8.0",
    "fbgemm-gpu-cpu": "1.8.0",
    "mlflow": "3.17",
    "pyarrow": "25",
}


def require_versions() -> None:
    """Compares what is installed here with PINNED; imports none of it. A driver does without some of them.

    Raises:
        RunError: names every package of another version.
    """
    wrong = {
        package: found
        for package, pin in PINNED.items()
        if (found := installed(package)) is not None and not _matches(found, pin)
    }
    if wrong:
        raise RunError(
            f"this raytrec is not made for {', '.join(f'{name} {found}' for name, found in wrong.items())}",
            where=f"{sys.prefix} on {socket.gethostname()}",
            expected=", ".join(f"{name} {PINNED[name]}" for name in wrong),
            do="pip install --no-deps -r requirements/cpu.txt (or cuda.txt, notebook.txt) of this raytrec",
        )


def _matches(found: str, pin: str) -> bool:
    release = found.partition("+")[0].split(".")  # torch's builds end with +cpu or +cu130
    return release[: pin.count(".") + 1] == pin.split(".")


def private(owner: Any, name: str, package: str) -> Any:
    """A private attribute of an upstream object.

    Raises:
        RunError: there is none of that name, because `package` is of another version than PINNED has.
    """
    try:
        return getattr(owner, name)
    except AttributeError:
        raise missing(f"{_name_of(owner)}.{name}", package) from None


def missing(name: str, package: str) -> RunError:
    """The error for a name that upstream does not have any more."""
    found = installed(package) or installed(f"{package}-cpu") or "(not installed)"
    return RunError(
        f"{package} {found} has no {name}",
        where="raytrec/compat",
        expected=f"{package} {PINNED[package]}, which has",
        do="install the versions of requirements/, or adapt raytrec/compat to the new one",
    )


def _name_of(owner: Any) -> str:
    return getattr(owner, "__name__", type(owner).__name__)
