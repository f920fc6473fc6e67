"""Which example of jobs/ fits interactions that have just been written, and what is to be set in it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq

from raytrec.common.storage import relative
from raytrec.config.overrides import as_texts
from raytrec.config.schema import Schema

if TYPE_CHECKING:
    from raytrec_datasets.interactions.recipe import Choices

OWN, SASREC, TWO_TOWER = "own", "interactions/sasrec", "interactions/two_tower"
LOSS = {SASREC: {"loss": "from_model"}}
IN_BATCH = {"loss": "in_batch_softmax", "item": "item", "item_frequency": "item_count"}
LENGTH, TOWERS = 50, {"query": ["user", "history"], "item": ["item"]}  # of the examples


def fitting_job(folder: Path, chosen: Choices) -> tuple[str, list[str]]:
    """(its name below jobs/, overrides).

    Rows of label 1 alone are learned against other items, of the batch or drawn. Without candidates, items
    are ranked among all.

    Args:
        folder: where the dataset is.
    """
    if chosen.train_negatives and chosen.negatives:
        return OWN, []
    job = SASREC if chosen.rows == "user" else TWO_TOWER
    settings: dict[str, object] = {}
    if job == SASREC and chosen.max_length != LENGTH:
        settings["model.max_length"] = chosen.max_length
    if job == TWO_TOWER and (towers := _towers(folder)) != TOWERS:
        settings["model.towers"] = towers
    if not chosen.negatives:
        settings["tasks"] = [LOSS.get(job, IN_BATCH) | {"metrics": []}]
        settings["eval.retrieval"] = {"items": f"{relative(folder)}/items", "seen": ["seen"]}
    return job, as_texts(settings)


def _towers(folder: Path) -> dict[str, list[str]]:
    """Tower → its features: what items/ has is the item's."""
    schema = Schema.load(folder / "schema.yaml")
    of_item = {*pq.ParquetDataset(folder / "items").schema.names}
    names = [*schema.sparse, *schema.dense]
    return {
        "query": [name for name in names if name not in of_item],
        "item": [name for name in names if name in of_item],
    }
