"""Recipe for interactions of users and items in common layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from raytrec_datasets import Count, File
from typer import Option

Split = Literal["leave-one-out", "time", "random"]
Rows = Literal["each", "user"]


def prepare(
    out: Path,
    source: Path,
    user: str = "user",
    item: str = "item",
    time: str | None = None,
    split: Split | None = None,
    negatives: Count = 99,
    candidates: File = None,
    user_features: File = None,
    item_features: File = None,
    train_negatives: Count = 0,
    max_length: Annotated[int, Option(min=0, max=100_000)] = 50,
    rows: Rows = "each",
    test_rows: Rows = "each",
    min_interactions: Annotated[int | None, Option(min=1)] = None,
    with_valid: bool = False,
    seed: int = 0,
    dim: int = 16,
    force: bool = False,
) -> None:
    """Write users, items and times in common layouts as rows with histories and candidates.

    The label is 1 for interactions, and 0 for candidates and drawn negatives.

    Options:
        source: Parquet (also a folder), CSV, a text file with a user and its items in each line (S3-Rec), a
            folder with train, valid and test in one of these formats (LightGCN, RecBole), or
            NAME.train.rating (NCF).
        user: Column of users, in Parquet and CSV.
        item: Column of items, or of lists of items in chronological order.
        time: Column of times; default: the file is in chronological order.
        split: Interactions in test and valid: each user's last and next-to-last interaction, the last and the
            next-to-last tenth in time, or two random tenths; default: the source's own splits, else
            leave-one-out.
        negatives: Number of candidates for each user in valid and test: items that are new to the user. 0: all
            items are ranked, and candidates of the source are ignored.
        candidates: File with given candidates for test: Parquet, or text with a user and items in each line; not
            with --negatives 0.
        user_features: File with features of users, in the formats of --item-features.
        item_features: Parquet or CSV with a column of items and a column for each feature; or JSON, {"item":
            [attribute, …], …}, as in S3-Rec.
        train_negatives: Number of rows with label 0 in train per interaction: items that are new to the user.
        max_length: Maximum number of ids in a history; 0: no histories.
        rows: Rows of train: one for each interaction, or one for every --max-length interactions of a user,
            for models that learn at every position of a sequence.
        test_rows: Rows of valid and test: one for each held-out interaction, or one for each user with the
            list right_items, as in the evaluation of LightGCN and BARS; requires --negatives 0.
        min_interactions: Remove users and items with fewer interactions until all have at least this many (k-core).
        with_valid: Add the interactions of valid to train, for a final run with settings already chosen.
    """
    options = {**locals()}
    from raytrec_datasets.interactions.events import Columns
    from raytrec_datasets.interactions.recipe import Choices, Files, write

    files = Files(source, candidates, user_features, item_features)
    chosen = Choices(**{name: options[name] for name in Choices.__dataclass_fields__})
    write(out, files, Columns(user, item, time), chosen, force)
