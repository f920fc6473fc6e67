"""Recipe for Criteo's click logs in their original layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from raytrec_datasets import PositiveCount
from typer import Option


def prepare(
    out: Path,
    source: Path,
    layout: Literal["auto", "kaggle", "1tb"] = "auto",
    vocabulary: Literal["hash", "frequency"] = "hash",
    hash_rows: Annotated[int, Option(min=2)] = 100_000,
    min_count: PositiveCount = 10,
    dim: int = 16,
    on_bad_line: Literal["error", "skip"] = "error",
    force: bool = False,
) -> None:
    """Write Criteo Kaggle and 1TB click logs from their original TSV layouts.

    Options:
        source: train.txt, a day file, or the folder that contains the files.
        layout: kaggle splits a single file by rows; 1tb holds out the last day; auto selects 1tb if there are
            several days.
        vocabulary: Method that maps values to ids.
        hash_rows: Number of rows in each table, with --vocabulary hash.
        min_count: Minimum number of occurrences of a value in train, with --vocabulary frequency; rarer
            values share id 0.
        on_bad_line: Stop with an error at a malformed line, or skip the line.
    """
    from raytrec_datasets.criteo.recipe import write

    write(out, source, layout, vocabulary, hash_rows, min_count, dim, on_bad_line == "skip", force)
