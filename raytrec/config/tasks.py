"""The sections `tasks`, what a model learns, one entry each, and `eval`. (raytrec/tasks does it.)

tasks:
  - {label: clicked}                                   # binary cross-entropy
  - {label: watched_s, loss: mse, weight: 0.1, metrics: [mae], mask: clicked}
  - {label: bought, loss: "mine.losses:Focal", options: {gamma: 2}}
  - {label: category, loss: cross_entropy, options: {classes: 12}}
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, JsonValue

from raytrec.config.base import Few, Number, PositiveFloat, PositiveInt, Section

TowerName = Literal["query", "item"]  # of a model that retrieves
Column = Annotated[str, Field(min_length=1)]


def _built_in_losses() -> list[str]:
    """Return the names of raytrec's losses, as their files register them; no file is imported."""
    files = (Path(__file__).parents[1] / "tasks" / "losses").glob("*.py")
    texts = (file.read_text(encoding="utf-8") for file in files)
    return sorted(name for text in texts for name in re.findall(r'(?m)^@loss\("(\w+)"\)$', text))


class TaskSection(Section):
    """One label and how it is learned."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z_][\w-]*$", max_length=100)] | None = None
    """What it is called in results and charts; default: its label."""
    label: str | None = None
    """A label of the schema; default: its first."""
    loss: str = Field(
        "bce",
        description=f"What is minimised: {', '.join(_built_in_losses())}, or a class of "
        "yours as module:Class.",
    )
    options: dict[str, JsonValue] = Field(default_factory=dict)
    """Keyword arguments that the loss is made with."""
    weight: PositiveFloat = 1.0
    """Its factor in the sum of all tasks' losses."""
    metrics: list[str] | None = None
    """Names of metrics, or module:name; default: those of the loss."""
    mask: Column | None = None
    """Only rows where it is 1 count: another task (its label), else a column of 0 and 1 or of bools; default:
    all rows."""
    nulls: Literal["error", "skip"] | None = None
    """What a null label is: an error, or a row without a label of this task; default: error with one task,
    skip with several."""
    sample_weight: Column | None = None
    """A column of finite numbers of 0 or more: each row's factor in loss and metrics."""
    positive_weight: PositiveFloat = 1.0
    """Factor of a row's loss where the label is 1; metrics do not know it."""
    negatives_kept: Annotated[Number, Field(gt=0, le=1)] = 1.0
    """The share of negatives that down-sampling of the data has kept: predictions p become p ÷ (p + (1 - p) ÷
    share), which metrics see (bce and focal)."""
    group: Column | None = None
    """A column of data.reserve_columns: rows of one value are ranked against each other (bpr, metrics of
    groups)."""
    item: Column | None = None
    """A column of data.reserve_columns that names the item of a row (in_batch_softmax, coverage)."""
    item_frequency: Column | None = None
    """A column of data.reserve_columns with whole numbers: how often the row's item occurs in the data that
    is trained on. in_batch_softmax then corrects scores for frequent items being in more batches."""


class RetrievalSection(Section):
    """Every evaluated row's item, or items, ranked among all; for models that give vectors of query and
    item."""

    items: str
    """Folder or file of Parquet with one row for each item: its key and the features of the item's tower."""
    item: Column = "item"
    """The column of `items` that is an item's key."""
    right_items: Column | None = None
    """The column of evaluated rows with the key of the right item, or a list of keys: each of these items is
    right, and recall, NDCG, … are of the row's list. null: the column `item`."""
    seen: list[Column] = Field(default_factory=list, max_length=20)
    """List columns of the evaluated rows, such as history: keys of items that a row's ranking leaves out,
    except right items."""
    at: list[Few] = Field([10], min_length=1, max_length=20)
    """Places k that hit rate, recall, NDCG and MAP are of."""

    @property
    def right_column(self) -> str:
        """Column of evaluated rows with the right items."""
        return self.right_items or self.item


class EvalSection(Section):
    slices: list[str] = Field(default_factory=list, max_length=20)
    """Columns of data.reserve_columns with few values, such as country: of the 10 largest and the 10 worst of
    them, rows, AUC and calibration of each task are reported."""
    max_exact_rows: PositiveInt = 2_000_000
    """Rows of an evaluation that a worker keeps in memory for metrics of an order or of groups. Beyond, areas
    under curves come from bins, with a bound on their error, and rows of groups go to temporary files."""
    retrieval: RetrievalSection | None = None
    """Rank every evaluated row's item among all items: items, item, right_items, seen, at; null: no."""
