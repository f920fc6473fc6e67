"""Recipe for MovieLens in its original layouts."""

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
    """Write MovieLens 100K, 1M, 20M, 25M or 32M from their original layouts; the label is 1 for ratings of 4 or more.

    The layout of leave-one-out with given candidates (NAME.test.negative) can also be read; its label is 1 for films
    that the user has seen. With --split leave-one-out, or --split time with --rows user, the columns are those of
    `raytrec prepare interactions`, and features of users and films.

    Options:
        split: Method that divides rows into train, valid and test.
        history: Maximum number of ids in a history, which contains the items liked before a rating or, with
            leave-one-out or --rows user, all earlier items. Ratings in valid and test are in histories only with
            --split time.
        download: Download this set from GroupLens.
        negatives: Number of items drawn for each pair of train, with leave-one-out and the layout of
            NAME.test.negative.
        candidates: Number of items drawn for each user in valid, and in test if the source has no candidates,
            with leave-one-out or --rows user. 0: all items are ranked.
        rows: Rows of train with leave-one-out: one for each pair, or one for every --history films of a user.
            With --split time, one for each rating, or again one for every --history films of a user.
        with_valid: With leave-one-out or --rows user, add the interactions of valid to train, for a final run with
            settings already chosen.
    """
    options = {**locals()}
    from raytrec_datasets.movielens.recipe import write

    write(**options)
