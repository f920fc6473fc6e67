"""The final checkpoint: each rank writes its own shards; any number of ranks, with any plan, reads them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from raytrec.config import RunConfig
from raytrec.errors import RunError
from raytrec.schema import Schema

if TYPE_CHECKING:  # the driver finds and describes checkpoints without torch
    from torchrec.distributed.model_parallel import DistributedModelParallel

FINAL = "checkpoints/final"


def save(model: DistributedModelParallel, folder: Path) -> None:
    """Writes the weights with torch.distributed.checkpoint; a collective."""
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations inside torch that users cannot act on
        dcp.save({"model": model.state_dict()}, checkpoint_id=folder)


def load(model: DistributedModelParallel, folder: str | Path) -> None:
    """Reads weights into a sharded model, in place; a collective."""
    import torch.distributed.checkpoint as dcp

    state = {"model": model.state_dict()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])


def describe(folder: Path, config: RunConfig, schema: Schema) -> None:
    """Puts beside the weights what is needed to build their model again."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(config.to_yaml())
    (folder / "schema.yaml").write_text(schema.to_yaml())


def find(place: str | Path) -> Path:
    """The checkpoint folder of a run folder, or of a checkpoint folder itself.

    Raises:
        RunError: when there is no complete checkpoint there.
    """
    place = Path(place).expanduser().absolute()
    for folder in (place, place / FINAL):
        if (folder / ".metadata").is_file() and (folder / "config.yaml").is_file():
            return folder
    raise RunError(
        "there is no finished run or checkpoint here",
        where=str(place),
        expected=f"a run folder with {FINAL}/, or a checkpoint folder",
        do="give the folder that `raytrec train` printed (run.dir)",
    )
