"""Options that recipes share. A parameter of one of these names gets its option without being annotated."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from raytrec.common.storage import COPIES, ROOT, absolute


def place(text: str) -> Path:
    """A path as given; in a job of a cluster, from its shared folder (storage.absolute)."""
    return Path(absolute(text)) if os.environ.get(ROOT) or COPIES in os.getcwd() else Path(text)


Out = Annotated[
    Path,
    typer.Option(
        parser=place, metavar="PATH", help="Folder to write train/, valid/, test/ and schema.yaml to."
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Replace what the folder holds.")]
Dim = Annotated[int, typer.Option(help="Width of the embeddings; a multiple of 4.")]
Seed = Annotated[int, typer.Option(help="The same seed gives the same data.")]
Source = Annotated[
    Path | None, typer.Option(parser=place, metavar="PATH", help="Folder with the original files.")
]

SHARED = {"out": Out, "force": Force, "dim": Dim, "seed": Seed, "source": Source}
