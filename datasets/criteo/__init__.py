"""Criteo's click logs in their original layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from raytrec_datasets.options import Dim, Force, Out, place
from typer import Option


def prepare(
    out: Out,
    source: Annotated[
        Path,
        Option(parser=place, metavar="PATH", help="train.txt, a day file, or the folder that holds them."),
    ],
    layout: Annotated[Literal["auto", "kaggle", "1tb"], Option(help="Kaggle or 1TB files.")] = "auto",
    vocabulary: Annotated[Literal["hash", "frequency"], Option(help="How values become ids.")] = "hash",
    hash_rows: Annotated[int, Option(min=2, help="Rows of each table (hash).")] = 100_000,
    min_count: Annotated[int, Option(min=1, help="Rarer values share id 0 (frequency).")] = 10,
    dim: Dim = 16,
    on_bad_line: Annotated[Literal["error", "skip"], Option(help="What a malformed line does.")] = "error",
    force: Force = False,
) -> None:
    """Criteo Kaggle and 1TB click logs in their original TSV layouts."""
    from raytrec_datasets.criteo.recipe import write

    write(out, source, layout, vocabulary, hash_rows, min_count, dim, on_bad_line == "skip", force)
