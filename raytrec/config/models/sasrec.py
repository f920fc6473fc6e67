"""SASRec's configuration."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from raytrec.config.models.base import Dropout, Size, model
from raytrec.config.models.next_item import NextItemSection
from raytrec.config.schema import Schema


@model("sasrec", "raytrec.models.sasrec:SASRec")
class SasrecSection(NextItemSection):
    """Self-attention over a history, for the next item (models/sasrec.py)."""

    name: Literal["sasrec"] = Field(description="The model.")
    feedforward: Size | None = Field(
        None, description="Width between the two layers of a block's network; default: the table's dim."
    )
    attention_dropout: Dropout = Field(
        0.0, description="Dropout of attention weights in training; more than 0 is slow on CPU."
    )

    def check(self, schema: Schema) -> None:
        super().check(schema)
        table = schema.sparse[self.item].table
        self.check_heads(schema.tables[table].dim, f"the dim of table {table}")
