"""DIN's configuration."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from raytrec.config.models.base import Dropout, Sizes, model
from raytrec.config.models.targeted import TargetedSection
from raytrec.config.schema import Schema


@model("din", "raytrec.models.din:DIN")
class DinSection(TargetedSection):
    """Deep Interest Network: sequences summed by weights that depend on the target (models/din.py)."""

    name: Literal["din"] = Field(description="The model.")
    attention_mlp: Sizes = Field(
        [36], description="Hidden sizes between an id beside the target and its weight."
    )
    top_mlp: Sizes = Field([200, 80], description="Hidden sizes between all vectors side by side and logit.")
    dropout: Dropout = Field(0.0, description="Dropout in the top MLP while training.")

    def check(self, schema: Schema) -> None:
        self.check_dims(schema)
