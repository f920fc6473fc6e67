"""UCI's Adult (census income) with two labels."""

from __future__ import annotations

from pathlib import Path


def prepare(out: Path, source: Path, seed: int = 0, dim: int = 8, force: bool = False) -> None:
    """Write UCI Adult for two tasks, labels: income > 50K, never married; a fifth of adult.data is valid.

    Options:
        source: Folder with adult.data and adult.test.
    """
    from raytrec_datasets.adult.recipe import write

    write(out, source, seed, dim, force)
