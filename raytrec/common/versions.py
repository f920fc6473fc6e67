"""Versions of the packages that a result depends on."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("raytrec", "torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu", "ray")


def installed_versions(*more: str) -> dict[str, str]:
    """Package → version, of PACKAGES and `more`; without those that are not installed."""
    found = {}
    for package in (*PACKAGES, *more):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
