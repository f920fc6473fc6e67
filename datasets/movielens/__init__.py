"""MovieLens in its original layouts."""

from __future__ import annotations

from typing import Annotated, Literal

from raytrec_datasets.interactions import Rows, WithValid
from raytrec_datasets.options import Dim, Force, Out, Seed, Source
from typer import Option

Split = Literal["random", "per-user", "time", "leave-one-out"]
Set = Literal["100k", "1m", "20m", "25m", "32m"]


def prepare(
    out: Out,
    source: Source = None,
    split: Annotated[Split, Option(help="How rows are divided into train, valid and test.")] = "random",
    seed: Seed = 0,
    history: Annotated[
        int, Option(min=1, max=1000, help="Liked items before a rating, at most; of leave-one-out all items.")
    ] = 20,
    dim: Dim = 16,
    download: Annotated[Set | None, Option(help="Fetch this set from GroupLens.")] = None,
    negatives: Annotated[
        int,
        Option(
            min=0,
            max=100,
            help="Of leave-one-out, and NAME.test.negative's layout: items drawn for each pair of train.",
        ),
    ] = 4,
    candidates: Annotated[
        int,
        Option(
            min=0,
            help="Of leave-one-out: items drawn for each user of valid, and of test where none are given. "
            "0: none, all are ranked.",
        ),
    ] = 99,
    rows: Annotated[
        Rows,
        Option(
            help="Of leave-one-out: rows of train, for each pair, or each user and --history of its films. "
            "With --split time, user writes such rows, of interactions instead of ratings."
        ),
    ] = "each",
    with_valid: WithValid = False,
    force: Force = False,
) -> None:
    """MovieLens 100K, 1M, 20M, 25M or 32M in their original layouts, label: rating ≥ 4; or leave-one-out with
    given candidates (NAME.test.negative), label: seen. --split leave-one-out of any of them, or time with
    --rows user: the columns of `raytrec prepare interactions`, and features of users and films."""
    from raytrec_datasets.movielens.recipe import write

    write(out, source, split, seed, history, dim, download, force, negatives, candidates, rows, with_valid)
