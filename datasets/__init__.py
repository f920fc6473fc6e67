"""Recipes: how public data becomes Parquet and a schema.yaml. Commands of `raytrec prepare`.

A new recipe is a folder with a `recipe.py` and a command here. Imports stay inside the commands, so that
`raytrec --help` answers at once.
"""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from raytrec.common.storage import COPIES, ROOT, absolute

app = typer.Typer(help="Makes Parquet and a schema.yaml out of public data.", no_args_is_help=True)


def _place(text: str) -> Path:
    """A path as given; in a job of a cluster, from its shared folder (storage.absolute)."""
    return Path(absolute(text)) if os.environ.get(ROOT) or COPIES in os.getcwd() else Path(text)


Out = Annotated[
    Path,
    typer.Option(
        parser=_place, metavar="PATH", help="Folder to write train/, valid/, test/ and schema.yaml to."
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Replace what the folder holds.")]
Dim = Annotated[int, typer.Option(help="Width of the embeddings; a multiple of 4.")]
Seed = Annotated[int, typer.Option(help="The same seed gives the same data.")]
Source = Annotated[
    Path | None, typer.Option(parser=_place, metavar="PATH", help="Folder with the original files.")
]


class Split(StrEnum):
    random = "random"
    per_user = "per-user"
    time = "time"


class MovieLens(StrEnum):
    ml_100k = "100k"
    ml_1m = "1m"
    ml_20m = "20m"
    ml_25m = "25m"
    ml_32m = "32m"


class Layout(StrEnum):
    auto = "auto"
    kaggle = "kaggle"
    one_tb = "1tb"


class Vocabulary(StrEnum):
    hash = "hash"
    frequency = "frequency"


class BadLine(StrEnum):
    error = "error"
    skip = "skip"


@app.command()
def synthetic(
    out: Out,
    rows: Annotated[
        int, typer.Option(min=1, help="Rows of train; valid and test have a tenth each.")
    ] = 1_000_000,
    seed: Seed = 0,
    dense: Annotated[int, typer.Option(min=0, help="Dense columns.")] = 13,
    sparse: Annotated[int, typer.Option(min=2, help="Sparse features.")] = 26,
    multi_hot: Annotated[int, typer.Option(min=0, help="How many of them are bags of several ids.")] = 6,
    table_rows: Annotated[int, typer.Option(min=100, help="Rows of the largest table.")] = 50_000,
    dim: Dim = 16,
    force: Force = False,
):
    """Criteo-shaped data with a planted model, whose best reachable AUC is printed."""
    from raytrec_datasets.synthetic.recipe import prepare

    prepare(out, rows, seed, dense, sparse, multi_hot, table_rows, dim, force)


@app.command()
def movielens(
    out: Out,
    source: Source = None,
    split: Annotated[
        Split, typer.Option(help="How rows are divided into train, valid and test.")
    ] = Split.random,
    seed: Seed = 0,
    history: Annotated[int, typer.Option(min=1, max=1000, help="Liked items before a rating, at most.")] = 20,
    dim: Dim = 16,
    download: Annotated[MovieLens | None, typer.Option(help="Fetch this set from GroupLens.")] = None,
    force: Force = False,
):
    """MovieLens 100K, 1M, 20M, 25M or 32M in their original layouts; label: rating ≥ 4."""
    from raytrec_datasets.movielens.recipe import prepare

    prepare(out, source, str(split), seed, history, dim, str(download) if download else None, force)


@app.command()
def criteo(
    out: Out,
    source: Annotated[
        Path,
        typer.Option(
            parser=_place, metavar="PATH", help="train.txt, a day file, or the folder that holds them."
        ),
    ],
    layout: Annotated[Layout, typer.Option(help="Kaggle or 1TB files.")] = Layout.auto,
    vocabulary: Annotated[Vocabulary, typer.Option(help="How values become ids.")] = Vocabulary.hash,
    hash_rows: Annotated[int, typer.Option(min=2, help="Rows of each table (hash).")] = 100_000,
    min_count: Annotated[int, typer.Option(min=1, help="Rarer values share id 0 (frequency).")] = 10,
    dim: Dim = 16,
    on_bad_line: Annotated[BadLine, typer.Option(help="What a malformed line does.")] = BadLine.error,
    force: Force = False,
):
    """Criteo Kaggle and 1TB click logs in their original TSV layouts."""
    from raytrec_datasets.criteo.recipe import prepare

    prepare(
        out,
        source,
        str(layout),
        str(vocabulary),
        hash_rows,
        min_count,
        dim,
        str(on_bad_line) == "skip",
        force,
    )
