"""DLRM's configuration."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from raytrec.config.models.base import Dropout, ModelSection, Sizes, model, one_dim
from raytrec.config.schema import Schema


@model("dlrm", "raytrec.models.dlrm:DLRM")
class DlrmSection(ModelSection):
    """Dot products of all pairs of embeddings (models/dlrm.py)."""

    name: Literal["dlrm"] = Field("dlrm", description="The model.")
    bottom_mlp: Sizes = Field(
        [128], description="Hidden sizes between the dense columns and their embedding."
    )
    top_mlp: Sizes = Field([128, 64], description="Hidden sizes between interactions and logit.")
    dropout: Dropout = Field(0.0, description="Dropout in the top MLP while training.")

    def check(self, schema: Schema) -> None:
        one_dim(schema, self.name)
