"""Interactions of users and items in common layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from raytrec_datasets.options import Dim, Force, Out, Seed, place
from typer import Option

Split = Literal["leave-one-out", "time", "random"]
Rows = Literal["each", "user"]
WithValid = Annotated[
    bool,
    Option(
        "--with-valid",
        help="Train has the interactions of valid, too: for a last run, whose settings have been chosen.",
    ),
]


def prepare(
    out: Out,
    source: Annotated[
        Path,
        Option(
            parser=place,
            metavar="PATH",
            help="Parquet (also a folder), CSV, a text file with a user and its items in each line (S3-Rec), "
            "a folder with train, valid and test of these (LightGCN, RecBole), or NAME.train.rating (NCF).",
        ),
    ],
    user: Annotated[str, Option(help="Column of users, in Parquet and CSV.")] = "user",
    item: Annotated[str, Option(help="Column of items, or of lists of items in the order of time.")] = "item",
    time: Annotated[
        str | None, Option(help="Column of times; default: the order of the file is that of time.")
    ] = None,
    split: Annotated[
        Split | None,
        Option(
            help="What is test and valid: each user's last and last but one interaction, the last two tenths "
            "in time, or two tenths at random; default: as the source divides it, else leave-one-out.",
        ),
    ] = None,
    negatives: Annotated[
        int,
        Option(
            min=0,
            help="Candidates for each user of valid and test: items it has not met. 0: none, all are ranked.",
        ),
    ] = 99,
    candidates: Annotated[
        Path | None,
        Option(
            parser=place,
            metavar="FILE",
            help="Given candidates of the test: Parquet, or text with a user and items in each line.",
        ),
    ] = None,
    user_features: Annotated[
        Path | None,
        Option(
            parser=place,
            metavar="FILE",
            help="Parquet or CSV with a column of users and one for each feature.",
        ),
    ] = None,
    item_features: Annotated[
        Path | None,
        Option(
            parser=place,
            metavar="FILE",
            help='The same of items; or JSON, {"item": [attribute, …], …}, as S3-Rec has it.',
        ),
    ] = None,
    train_negatives: Annotated[
        int, Option(min=0, help="Rows of label 0 in train for each interaction: items its user has not met.")
    ] = 0,
    max_length: Annotated[
        int, Option(min=0, max=100_000, help="Ids of a history, at most; 0: no histories.")
    ] = 50,
    rows: Annotated[
        Rows,
        Option(
            help="Rows of train: one for each interaction, or one for each user and --max-length "
            "interactions, for models that learn at every position of a sequence.",
        ),
    ] = "each",
    test_rows: Annotated[
        Rows,
        Option(
            help="Rows of valid and test: one for each held-out interaction, or one for each user with "
            "their list right_items, as LightGCN and BARS evaluate; needs --negatives 0.",
        ),
    ] = "each",
    min_interactions: Annotated[
        int | None,
        Option(
            min=1, help="Leave out users and items of fewer interactions, until all have as many (k-core)."
        ),
    ] = None,
    with_valid: WithValid = False,
    seed: Seed = 0,
    dim: Dim = 16,
    force: Force = False,
) -> None:
    """Users, items and times in common layouts, as rows with histories and candidates; label: met."""
    from raytrec_datasets.interactions.events import Columns
    from raytrec_datasets.interactions.recipe import Choices, Files, write

    files = Files(source, candidates, user_features, item_features)
    chosen = Choices(
        split,
        negatives,
        train_negatives,
        max_length,
        rows,
        min_interactions,
        seed,
        dim,
        with_valid,
        test_rows,
    )
    write(out, files, Columns(user, item, time), chosen, force)
