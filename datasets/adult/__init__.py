"""Recipe for UCI's Adult (census income) with two labels."""

from __future__ import annotations

from pathlib import Path


def prepare(out: Path, source: Path, seed: int = 0, dim: int = 8, force: bool = False) -> None:
    """Write UCI Adult with two labels: income above 50K, and never married. A fifth of adult.data becomes valid.

    Options:
        source: Folder with adult.data and adult.test.
    """
    from raytrec_datasets.adult.recipe import write

    write(out, source, seed, dim, force)
