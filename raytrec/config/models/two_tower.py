"""The two towers' configuration."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from raytrec.common.errors import ConfigError
from raytrec.config.base import Section
from raytrec.config.models.base import Dropout, ModelSection, Sizes, matching, model
from raytrec.config.schema import Schema


class Towers(Section):
    query: list[str] = Field(
        min_length=1, description="Sparse features and dense columns (or patterns) of who or what asks."
    )
    item: list[str] = Field(min_length=1, description="Those of what is recommended.")


@model("two_tower", "raytrec.models.two_tower:TwoTower")
class TwoTowerSection(ModelSection):
    """One vector for the query, one for the item, and their dot product (models/two_tower.py)."""

    gives_vectors: ClassVar[bool | None] = True
    retrieves: ClassVar[bool] = True
    name: Literal["two_tower"] = Field(description="The model.")
    towers: Towers = Field(
        description="Which features belong to which tower: each to one. Patterns as 'user*'."
    )
    tower_mlp: Annotated[Sizes, Field(min_length=1)] = Field(
        [128, 64], description="Sizes of each tower's layers; the last is the width of its vectors."
    )
    normalize: bool = Field(
        False, description="Vectors of length 1: retrieval by cosine instead of by dot product."
    )
    dropout: Dropout = Field(0.0, description="Dropout after each tower's hidden layers while training.")

    def check(self, schema: Schema) -> None:
        self.members(schema)

    def sides(self, schema: Schema) -> dict[str, set[str]]:
        return self.members(schema)

    def members(self, schema: Schema) -> dict[str, set[str]]:
        """Tower → its features and columns; each name of the schema is in one.

        Raises:
            ConfigError: a feature of no or of two towers; a pattern that matches nothing.
        """
        names = [*schema.dense, *schema.sparse]
        found = {
            side: matching(getattr(self.towers, side), names, f"model.towers.{side}")
            for side in ("query", "item")
        }
        both = found["query"] & found["item"]
        neither = set(names) - found["query"] - found["item"]
        if both or neither:
            what, which = ("both towers", both) if both else ("neither tower", neither)
            raise ConfigError(
                f"in {what}: {', '.join(sorted(which))}",
                where="model.towers",
                expected="each feature and dense column in one tower: a query's vector knows nothing of the "
                "item",
                do="name it under query or item, or leave it out of the schema",
            )
        return found
