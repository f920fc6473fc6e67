"""The sections `tasks`, with one entry per label to learn, and `eval`. Losses and metrics are in raytrec/tasks.

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

from raytrec.config.base import Number, PositiveFloat, PositiveInt, Section, SmallCount

TowerName = Literal["query", "item"]  # towers of a retrieval model
Column = Annotated[str, Field(min_length=1)]


def _built_in_losses() -> list[str]:
    """Return the names of raytrec's losses as registered in their files, without importing the files."""
    files = (Path(__file__).parents[1] / "tasks" / "losses").glob("*.py")
    texts = (file.read_text(encoding="utf-8") for file in files)
    return sorted(name for text in texts for name in re.findall(r'(?m)^@loss\("(\w+)"\)$', text))


class TaskSection(Section):
    """A label and its loss, metrics and weights."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z_][\w-]*$", max_length=100)] | None = None
    """Name in results and charts; default: the label."""
    label: str | None = None
    """Label of the schema; default: the first label."""
    loss: str = Field(
        "bce",
        description=f"Loss to minimize: {', '.join(_built_in_losses())}, or a user-defined class as module:Class.",
    )
    options: dict[str, JsonValue] = Field(default_factory=dict)
    """Keyword arguments of the loss."""
    weight: PositiveFloat = 1.0
    """Factor of this task's loss in the sum over all tasks."""
    metrics: list[str] | None = None
    """Names of metrics, or module:name; default: the metrics of the loss."""
    mask: Column | None = None
    """Column that selects the rows of this task: only rows with value 1 count. The label of another task, or a
    column of zeros and ones or bools; default: all rows."""
    nulls: Literal["error", "skip"] | None = None
    """Meaning of a null label: an error, or a row without a label of this task; default: error with one task,
    skip with several."""
    sample_weight: Column | None = None
    """Column of finite numbers ≥ 0 that weight each row in the loss and metrics."""
    positive_weight: PositiveFloat = 1.0
    """Factor of a row's loss if the label is 1; metrics ignore this factor."""
    negatives_kept: Annotated[Number, Field(gt=0, le=1)] = 1.0
    """Share of negatives that down-sampling of the data has kept. Predictions p become p ÷ (p + (1 - p) ÷
    share) (He et al. 2014, section 6.3) before metrics are computed (bce and focal)."""
    group: Column | None = None
    """Column of data.reserve_columns: rows with equal values are ranked against each other (bpr,
    listwise_softmax, group metrics). If rows are requests, the losses ignore it."""
    item: Column | None = None
    """Column of data.reserve_columns that identifies the item of a row (in_batch_softmax, coverage)."""
    item_frequency: Column | None = None
    """Column of data.reserve_columns with the number of occurrences of the row's item in the training data.
    in_batch_softmax then corrects scores, because frequent items appear in more batches."""


class RetrievalSection(Section):
    """Ranking of each evaluated row's right items among all items, for models with query and item vectors."""

    items: str
    """Folder or file of Parquet with one row per item: its key and the features of the item tower."""
    item: Column = "item"
    """Column of `items` that contains the item's key."""
    right_items: Column | None = None
    """Column of the evaluated rows with the key of the right (relevant) item, or with a list of the keys of all right
    items. null: the column `item`."""
    seen: list[Column] = Field(default_factory=list, max_length=20)
    """List columns of the evaluated rows, such as history, with the keys of items to exclude from the row's ranking.
    Right items are never excluded."""
    at: list[SmallCount] = Field([10], min_length=1, max_length=20)
    """Cutoffs k of hit rate, recall, NDCG and MAP."""

    @property
    def right_column(self) -> str:
        """Return the column of evaluated rows that contains the keys of the right items."""
        return self.right_items or self.item


class EvalSection(Section):
    """Slices, memory limit and item ranking of evaluations."""

    slices: list[str] = Field(default_factory=list, max_length=20)
    """Columns of data.reserve_columns with few values, such as country. For each task without classes, number of
    rows, AUC and calibration are reported for the 10 most frequent and the 10 worst values. The worst have the lowest
    AUC among values with enough rows of both labels. If not all labels are 0 or 1, calibration decides."""
    max_exact_rows: PositiveInt = 2_000_000
    """Maximum number of rows of an evaluation that a worker keeps in memory for rank-based and grouped metrics. Beyond
    this number, areas under curves are computed from bins, with a bound on their error, and grouped rows are
    written to temporary files."""
    retrieval: RetrievalSection | None = None
    """Rank each evaluated row's right items among all items (items, item, right_items, seen, at); null: no ranking."""
