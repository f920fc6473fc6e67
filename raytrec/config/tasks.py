"""The section `tasks`: what a model learns, one entry each. (raytrec/tasks does it.)

tasks:
  - {label: clicked}                                   # binary cross-entropy
  - {label: watched_s, loss: mse, weight: 0.1, metrics: [mae], mask: clicked}
  - {label: bought, loss: "mine.losses:Focal", options: {gamma: 2}}
  - {label: category, loss: cross_entropy, options: {classes: 12}}
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, JsonValue

from raytrec.common.registry import modules_of
from raytrec.config.base import Number, PositiveFloat, Section

Column = Annotated[str, Field(min_length=1)]


class TaskSection(Section):
    """One label and how it is learned."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z_][\w-]*$", max_length=100)] | None = None
    """What it is called in results and charts; default: its label."""
    label: str | None = None
    """A label of the schema; default: its first."""
    loss: str = Field(
        "bce",
        description=f"What is minimised: {', '.join(modules_of('raytrec.tasks.losses'))}, or a class of "
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
