"""DeepFM's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from raytrec.config.models.base import Dropout, ModelSection, Sizes, check_first_order, model, one_dim
from raytrec.config.schema import Schema


@model("deepfm", "raytrec.models.deepfm:DeepFM")
class DeepFMSection(ModelSection):
    """A factorization machine beside an MLP over the same vectors (models/deepfm.py)."""

    name: Literal["deepfm"] = Field(description="The model.")
    top_mlp: Sizes = Field([128, 64], description="Hidden sizes of the MLP.")
    dropout: Dropout = Field(0.0, description="Dropout in the MLP while training.")

    def check(self, schema: Schema) -> None:
        one_dim(schema, self.name)

    def check_tasks(self, schema: Schema, tasks: Mapping[str, int]) -> None:
        check_first_order(schema, self.name, tasks)
