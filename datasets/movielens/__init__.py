"""MovieLens in its original layouts."""

from __future__ import annotations

from typing import Annotated, Literal

from raytrec_datasets.options import Dim, Force, Out, Seed, Source
from typer import Option

Split = Literal["random", "per-user", "time"]
Set = Literal["100k", "1m", "20m", "25m", "32m"]


def prepare(
    out: Out,
    source: Source = None,
    split: Annotated[Split, Option(help="How rows are divided into train, valid and test.")] = "random",
    seed: Seed = 0,
    history: Annotated[int, Option(min=1, max=1000, help="Liked items before a rating, at most.")] = 20,
    dim: Dim = 16,
    download: Annotated[Set | None, Option(help="Fetch this set from GroupLens.")] = None,
    negatives: Annotated[
        int,
        Option(min=1, max=100, help="Of NAME.test.negative's layout: items drawn for each pair of train."),
    ] = 4,
    force: Force = False,
) -> None:
    """MovieLens 100K, 1M, 20M, 25M or 32M in their original layouts, label: rating ≥ 4; or leave-one-out with
    given candidates (NAME.test.negative), label: seen."""
    from raytrec_datasets.movielens.recipe import write

    write(out, source, split, seed, history, dim, download, force, negatives)
