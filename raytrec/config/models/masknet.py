"""MaskNet's configuration."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from raytrec.config.base import PositiveFloat
from raytrec.config.models.base import Dropout, ModelSection, Sizes, model, one_dim
from raytrec.config.schema import Schema


@model("masknet", "raytrec.models.masknet:MaskNet")
class MaskNetSection(ModelSection):
    """Layers whose inputs are multiplied by masks that each row's embeddings give (models/masknet.py)."""

    name: Literal["masknet"] = Field(description="The model.")
    arrangement: Literal["parallel", "serial"] = Field(
        "parallel",
        description="Blocks side by side over the embeddings, or each over what the one before it gives.",
    )
    blocks: Annotated[Sizes, Field(min_length=1)] = Field(
        [64, 64], description="Width of what each mask block gives."
    )
    reduction: PositiveFloat = Field(
        2.0, description="Hidden width of a block's mask network, as a multiple of the mask's width."
    )
    top_mlp: Sizes = Field(
        [64],
        description="Hidden sizes between the blocks and the logit; [] is the serial model of the paper.",
    )
    dropout: Dropout = Field(0.0, description="Dropout in the top MLP while training.")

    def check(self, schema: Schema) -> None:
        one_dim(schema, self.name)
