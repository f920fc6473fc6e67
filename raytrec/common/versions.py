"""Versions of the packages that a result depends on."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("raytrec", "torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu", "ray")


def installed(package: str) -> str | None:
    """The version of a package of this environment; None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def installed_versions(*more: str) -> dict[str, str]:
    """Package → version, of PACKAGES and `more`; without those that are not installed."""
    return {package: found for package in (*PACKAGES, *more) if (found := installed(package))}
