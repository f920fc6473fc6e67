"""UCI's Adult (census income) with two labels."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from raytrec_datasets.options import Dim, Force, Out, Seed, place
from typer import Option


def prepare(
    out: Out,
    source: Annotated[
        Path, Option(parser=place, metavar="PATH", help="Folder with adult.data and adult.test.")
    ],
    seed: Seed = 0,
    dim: Dim = 8,
    force: Force = False,
) -> None:
    """UCI Adult for two tasks, labels: income > 50K, never married; a fifth of adult.data is valid."""
    from raytrec_datasets.adult.recipe import write

    write(out, source, seed, dim, force)
