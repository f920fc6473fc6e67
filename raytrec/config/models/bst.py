"""BST's configuration."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from raytrec.config.base import Few
from raytrec.config.models.base import Dropout, Size, Sizes, check_heads, model
from raytrec.config.models.targeted import TargetedSection
from raytrec.config.schema import Schema


@model("bst", "raytrec.models.bst:BST")
class BstSection(TargetedSection):
    """Behavior Sequence Transformer: attention between a sequence's ids and its target (models/bst.py)."""

    name: Literal["bst"] = Field(description="The model.")
    blocks: Annotated[Few, Field(le=1000)] = Field(1, description="Transformer layers, one after the other.")
    heads: Annotated[Few, Field(le=1000)] = Field(2, description="Heads of attention in each of them.")
    feedforward: Size = Field(64, description="Hidden size between attention and a layer's result.")
    attention_dropout: Dropout = Field(0.0, description="Dropout of what a layer adds, while training.")
    top_mlp: Sizes = Field([256, 128], description="Hidden sizes between all vectors side by side and logit.")
    dropout: Dropout = Field(0.0, description="Dropout in the top MLP while training.")

    def check(self, schema: Schema) -> None:
        self.check_dims(schema)
        for sequence in self.targets(schema):
            dim = schema.tables[schema.sparse[sequence].table].dim
            check_heads(self.heads, dim, f"the vectors of {sequence} have dim {dim}")
