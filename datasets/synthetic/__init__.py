"""Criteo-shaped data with a planted model."""

from __future__ import annotations

from typing import Annotated

from raytrec_datasets.options import Dim, Force, Out, Seed
from typer import Option


def prepare(
    out: Out,
    rows: Annotated[int, Option(min=1, help="Rows of train; valid and test have a tenth each.")] = 1_000_000,
    seed: Seed = 0,
    dense: Annotated[int, Option(min=0, help="Dense columns.")] = 13,
    sparse: Annotated[int, Option(min=2, help="Sparse features.")] = 26,
    multi_hot: Annotated[int, Option(min=0, help="How many of them are bags of several ids.")] = 6,
    table_rows: Annotated[int, Option(min=100, help="Rows of the largest table.")] = 50_000,
    dim: Dim = 16,
    force: Force = False,
) -> None:
    """Criteo-shaped data with a planted model, whose best reachable AUC is printed."""
    from raytrec_datasets.synthetic.recipe import write

    write(out, rows, seed, dense, sparse, multi_hot, table_rows, dim, force)
