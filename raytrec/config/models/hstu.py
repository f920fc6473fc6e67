"""HSTU's configuration."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from raytrec.config.base import PositiveFloat
from raytrec.config.models.base import Size, model
from raytrec.config.models.next_item import NextItemSection
from raytrec.config.schema import Schema


@model("hstu", "raytrec.models.hstu:HSTU")
class HstuSection(NextItemSection):
    """Pointwise aggregated attention over a history, for the next item (models/hstu.py)."""

    name: Literal["hstu"] = Field(description="The model.")
    width: Size | None = Field(
        None, description="Width of u, v, queries and keys over all heads; default: the table's dim."
    )
    normalize: bool = Field(
        True, description="Vectors of length 1: scores are cosines instead of dot products."
    )
    temperature: PositiveFloat = Field(0.05, description="What scores are divided by.")

    def check(self, schema: Schema) -> None:
        super().check(schema)
        table = schema.sparse[self.item].table
        if self.width is None:
            self.check_heads(schema.tables[table].dim, f"the dim of table {table}")
        else:
            self.check_heads(self.width, "model.width")
