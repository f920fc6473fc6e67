"""The configuration of experts that each task weighs for itself."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from raytrec.config.base import Few
from raytrec.config.models.base import Dropout, ModelSection, Sizes, model


@model("mmoe", "raytrec.models.mmoe:MMoE")
class MMoESection(ModelSection):
    """Experts that all tasks share, a gate and a tower for each task (models/mmoe.py)."""

    name: Literal["mmoe"] = Field(description="The model.")
    experts: Few = Field(4, description="Experts, each an MLP over all inputs.")
    expert_mlp: Annotated[Sizes, Field(min_length=1)] = Field(
        [64], description="Sizes of an expert's layers."
    )
    tower_mlp: Sizes = Field([32], description="Hidden sizes of each task's tower.")
    dropout: Dropout = Field(0.0, description="Dropout in experts and towers while training.")
