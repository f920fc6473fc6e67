"""The configuration of attention over sequences."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from raytrec.config.models.base import Dropout, Sizes, model, one_dim
from raytrec.config.models.targeted import TargetedSection
from raytrec.config.schema import Schema


@model("sequence", "raytrec.models.sequence:SequenceModel")
class SequenceSection(TargetedSection):
    """Attention over sequences, for the item in question, before DLRM's dot products (models/sequence.py)."""

    name: Literal["sequence"] = Field(description="The model.")
    attention_mlp: Sizes = Field(
        [32], description="Hidden sizes between an id beside the target and its score."
    )
    bottom_mlp: Sizes = Field(
        [128], description="Hidden sizes between the dense columns and their embedding."
    )
    top_mlp: Sizes = Field([128, 64], description="Hidden sizes between interactions and logit.")
    dropout: Dropout = Field(0.0, description="Dropout in the top MLP while training.")

    def check(self, schema: Schema) -> None:
        one_dim(schema, self.name)
        self.targets(schema)
