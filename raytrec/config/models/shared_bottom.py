"""The configuration of tasks that share their lowest layers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from raytrec.config.models.base import Dropout, ModelSection, Sizes, model


@model("shared_bottom", "raytrec.models.shared_bottom:SharedBottom")
class SharedBottomSection(ModelSection):
    """One MLP that all tasks share, and a tower for each (models/shared_bottom.py)."""

    name: Literal["shared_bottom"] = Field(description="The model.")
    bottom_mlp: Annotated[Sizes, Field(min_length=1)] = Field(
        [128], description="Sizes of the layers that all tasks share."
    )
    tower_mlp: Sizes = Field([64], description="Hidden sizes of each task's tower.")
    dropout: Dropout = Field(0.0, description="Dropout in all layers while training.")
