"""DCN-V2's configuration."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from raytrec.common.errors import ConfigError
from raytrec.config.base import Few
from raytrec.config.models.base import Dropout, ModelSection, Size, Sizes, model
from raytrec.config.schema import Schema


@model("dcn", "raytrec.models.dcn:DCN")
class DcnSection(ModelSection):
    """Cross layers over all embeddings side by side: DCN-V2 (models/dcn.py)."""

    name: Literal["dcn"] = Field("dcn", description="The model.")
    bottom_mlp: Sizes = Field(
        [], description="Sizes of layers over the dense columns; []: the columns enter as they are."
    )
    cross_layers: Annotated[Few, Field(le=1000)] = Field(3, description="Cross layers, one after the other.")
    cross_rank: Size | None = Field(
        None, description="Rank of each cross layer's matrix, as a product U V; default: one full matrix."
    )
    deep: Literal["stacked", "parallel"] = Field(
        "stacked", description="top_mlp reads what the cross layers give, or their input beside them."
    )
    top_mlp: Sizes = Field([128, 64], description="Hidden sizes of the deep layers.")
    dropout: Dropout = Field(0.0, description="Dropout in the top MLP while training.")

    def check(self, schema: Schema) -> None:
        if self.bottom_mlp and not schema.dense:
            raise ConfigError(
                f"model.bottom_mlp is {self.bottom_mlp}, and the schema has no dense columns",
                where="model.bottom_mlp",
                expected="[] without dense columns",
                do="set model.bottom_mlp=[]",
            )
