"""HSTU's configuration."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from raytrec.common.errors import ConfigError, did_you_mean
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
    time: str | None = Field(
        None,
        description="A column of times beside the history's ids (schema: sparse.HISTORY.side_features): "
        "attention knows how long lies between two items; default: only how many items do.",
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
        if self.time is not None:
            self.time_place(schema)

    def time_place(self, schema: Schema) -> int:
        """Which of the history's side features the times are.

        Raises:
            ConfigError: none.
        """
        columns = schema.sparse[self.history].side_features
        if self.time not in columns:
            near = did_you_mean(self.time or "", columns)
            raise ConfigError(
                f"'{self.time}' is not a column beside {self.history}"
                + (f"; did you mean '{near}'?" if near else ""),
                where="model.time",
                expected=f"a side feature of {self.history}: {', '.join(columns) or 'there are none'}",
                do=f"set side_features: [{self.time}] on {self.history} in schema.yaml",
            )
        return columns.index(self.time)
