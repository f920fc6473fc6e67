"""MovieLens in its original layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from raytrec_datasets import Count
from raytrec_datasets.interactions import Rows
from typer import Option

Split = Literal["random", "per-user", "time", "leave-one-out"]
Set = Literal["100k", "1m", "20m", "25m", "32m"]


def prepare(
    out: Path,
    source: Path | None = None,
    split: Split = "random",
    seed: int = 0,
    history: Annotated[int, Option(min=1, max=1000)] = 20,
    dim: int = 16,
    download: Set | None = None,
    negatives: Annotated[int, Option(min=0, max=100)] = 4,
    candidates: Count = 99,
    rows: Rows = "each",
    with_valid: bool = False,
    force: bool = False,
) -> None:
    """MovieLens 100K, 1M, 20M, 25M or 32M in their original layouts, label: rating ≥ 4; or leave-one-out with
    given candidates (NAME.test.negative), label: seen. --split leave-one-out of any of them, or time with
    --rows user: the columns of `raytrec prepare interactions`, and features of users and films.

    Args:
        split: How rows are divided into train, valid and test.
        history: Liked items before a rating, at most; of leave-one-out all items.
        download: Fetch this set from GroupLens.
        negatives: Of leave-one-out, and NAME.test.negative's layout: items drawn for each pair of train.
        candidates: Of leave-one-out: items drawn for each user of valid, and of test where none are given. 0:
            none, all are ranked.
        rows: Of leave-one-out: rows of train, for each pair, or each user and --history of its films. With
            --split time, user writes such rows, of interactions instead of ratings.
        with_valid: Train has the interactions of valid, too: for a last run, whose settings have been chosen.
    """
    options = {**locals()}
    from raytrec_datasets.movielens.recipe import write

    write(**options)
