"""The two towers' configuration."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from raytrec.common.errors import ConfigError
from raytrec.config.base import PositiveFloat, Section
from raytrec.config.models.base import Dropout, Sizes, matching, model
from raytrec.config.models.sampled import SampledSection
from raytrec.config.schema import Schema


class Towers(Section):
    query: list[str] = Field(
        min_length=1, description="Sparse features and dense columns (or patterns) of who or what asks."
    )
    item: list[str] = Field(min_length=1, description="Those of what is recommended.")

    def members(self, names: list[str]) -> dict[str, set[str]]:
        """query and item → those of some features and dense columns that their patterns name.

        Raises:
            ConfigError: a pattern that matches nothing.
        """
        return {
            tower: matching(getattr(self, tower), names, f"model.towers.{tower}")
            for tower in ("query", "item")
        }


@model("two_tower", "raytrec.models.two_tower:TwoTower")
class TwoTowerSection(SampledSection):
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
    temperature: PositiveFloat | None = Field(
        None,
        description="What scores are divided by, at first if it is learned; default: 0.2 of cosines, of dot "
        "products the root of the vectors' width.",
    )
    learn_temperature: bool = Field(True, description="The temperature is learned, or stays what it is.")
    dropout: Dropout = Field(0.0, description="Dropout after each tower's hidden layers while training.")

    def check(self, schema: Schema) -> None:
        of_item = self.members(schema)["item"]
        if self.negatives is None:
            return
        if len(of_item) > 1 or not of_item <= set(schema.sparse):
            raise ConfigError(
                f"the item tower reads {', '.join(sorted(of_item))}, and of negatives only ids are known",
                where="model.towers.item, model.negatives",
                expected="one sparse feature in the item tower, whose ids negatives are",
                do="leave negatives out: in_batch_softmax needs none, or leave the other features out",
            )
        self.check_negatives(schema, *of_item)

    def tower_members(self, schema: Schema) -> dict[str, set[str]]:
        return self.members(schema)

    def members(self, schema: Schema) -> dict[str, set[str]]:
        """Tower → its features and columns; each name of the schema but the negatives is in one.

        Raises:
            ConfigError: a feature of no or of two towers; a pattern that matches nothing.
        """
        names = [name for name in [*schema.dense, *schema.sparse] if name != self.negatives]
        found = self.towers.members(names)
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
