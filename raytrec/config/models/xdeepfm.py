"""xDeepFM's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from raytrec.config.models.base import Dropout, ModelSection, Sizes, check_first_order, model, one_dim
from raytrec.config.schema import Schema


@model("xdeepfm", "raytrec.models.xdeepfm:XDeepFM")
class XDeepFMSection(ModelSection):
    """A compressed interaction network beside an MLP and a linear model (models/xdeepfm.py)."""

    name: Literal["xdeepfm"] = Field(description="The model.")
    cin: Annotated[Sizes, Field(min_length=1)] = Field(
        [32, 32],
        description="Feature maps of each layer of the compressed interaction network; layer k has products "
        "of k + 1 features.",
    )
    top_mlp: Sizes = Field([128, 64], description="Hidden sizes of the MLP.")
    dropout: Dropout = Field(0.0, description="Dropout in the MLP while training.")

    def check(self, schema: Schema) -> None:
        one_dim(schema, self.name)

    def check_tasks(self, schema: Schema, tasks: Mapping[str, int]) -> None:
        check_first_order(schema, self.name, tasks)
