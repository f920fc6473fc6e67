"""Recipe for Yambda, Yandex's log of music listening, as requests in chronological order."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from raytrec_datasets import Count, PositiveCount, resolve_path_option
from typer import Option


def prepare(
    out: Path,
    source: Annotated[Path | None, Option(parser=resolve_path_option, metavar="PATH")] = None,
    size: Literal["50m", "500m", "5b"] = "50m",
    synthetic: Count = 0,
    days: Annotated[int, Option(min=2)] = 300,
    history: Annotated[int, Option(min=3)] = 4086,
    min_history: Count = 0,
    candidates: PositiveCount = 1,
    first_day: Count = 0,
    valid: bool = False,
    seed: int = 0,
    dim: int = 512,
    force: bool = False,
) -> None:
    """Write Yambda's listens as requests, in a folder per day, as MLPerf Training's DLRMv4 reads them.

    The last day is test. All other days are train, except with --valid.

    Options:
        source: Folder with flat/SIZE/ or sequential/SIZE/ and {artist,album}_item_mapping.parquet, as in
            yandex/yambda on Hugging Face.
        size: Subset of the source: 50m, 500m or 5b events.
        synthetic: Number of users to generate instead of reading a source, in the proportions of 50m and with
            planted preferences that drift by day.
        days: Number of generated days.
        history: Maximum number of ids in a history, a third each for finished, liked and skipped items.
        min_history: Minimum number of earlier events of the user (4,086 in DLRMv4).
        candidates: Maximum number of listens in a request. With more than one, consecutive listens of a session
            share the history before the first of them.
        first_day: First day that is written; earlier days only fill the histories.
        valid: Write the day before the last as valid instead of train.
    """
    options = {**locals()}
    from raytrec_datasets.yambda.recipe import write

    write(**options)
