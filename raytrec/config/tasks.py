"""The `tasks`: what a model learns to predict, one entry each. (raytrec/tasks does it.)

tasks:
  - {label: clicked}                                   # binary cross-entropy
  - {label: watched_s, loss: mse, weight: 0.1, metrics: [mae]}
  - {label: bought, loss: "mine.losses:Focal", options: {gamma: 2}}
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from raytrec.config.base import PositiveFloat, Section


class TaskSection(Section):
    """One label and how it is learned."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z_][\w-]*$", max_length=100)] | None = Field(
        None, description="What it is called in results and charts; default: its label."
    )
    label: str | None = Field(None, description="A label of the schema; default: its first.")
    loss: str = Field(
        "bce",
        description="What is minimised: bce (binary cross-entropy), mse (mean squared error), or a class of "
        "yours as module:Class.",
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="Keyword arguments that the loss is made with."
    )
    weight: PositiveFloat = Field(1.0, description="Its factor in the sum of all tasks' losses.")
    metrics: list[str] | None = Field(
        None, description="Names of metrics, or module:name; default: those of the loss."
    )
