"""Recipe for synthetic data with the same kinds of columns as Criteo, and labels from a known model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from raytrec_datasets import Count, PositiveCount
from typer import Option


def prepare(
    out: Path,
    rows: PositiveCount = 1_000_000,
    seed: int = 0,
    dense: Count = 13,
    sparse: Annotated[int, Option(min=2)] = 26,
    multi_hot: Count = 6,
    table_rows: Annotated[int, Option(min=100)] = 50_000,
    dim: int = 16,
    force: bool = False,
) -> None:
    """Write Criteo-shaped data with labels from a planted model, and print the best reachable AUC.

    Options:
        rows: Number of rows in train; valid and test contain a tenth each.
        dense: Number of dense columns.
        sparse: Number of sparse features.
        multi_hot: Number of sparse features that are bags of several ids.
        table_rows: Number of rows in the largest table.
    """
    options = {**locals()}
    from raytrec_datasets.synthetic.recipe import write

    write(**options)
