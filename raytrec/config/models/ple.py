"""The configuration of experts of which some belong to one task."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from raytrec.config.base import Few
from raytrec.config.models.base import Dropout, ModelSection, Sizes, model


@model("ple", "raytrec.models.ple:PLE")
class PLESection(ModelSection):
    """Levels of experts, shared ones and those of each task, with gates between them (models/ple.py)."""

    name: Literal["ple"] = Field(description="The model.")
    levels: Annotated[Few, Field(le=100)] = Field(
        2, description="Extraction levels, one after the other; 1 is CGC, the paper's single level."
    )
    shared_experts: Few = Field(2, description="Experts of each level that all tasks read.")
    task_experts: Few = Field(2, description="Experts of each level for each task, which it alone reads.")
    expert_mlp: Annotated[Sizes, Field(min_length=1)] = Field(
        [64], description="Sizes of an expert's layers."
    )
    tower_mlp: Sizes = Field([32], description="Hidden sizes of each task's tower.")
    dropout: Dropout = Field(0.0, description="Dropout in experts and towers while training.")
