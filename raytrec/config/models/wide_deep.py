"""Wide & Deep's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from raytrec.common.errors import ConfigError
from raytrec.config.models.base import Dropout, ModelSection, Sizes, check_first_order, matching, model
from raytrec.config.schema import Schema

Names = Annotated[list[str], Field(min_length=1)]


@model("wide_deep", "raytrec.models.wide_deep:WideDeep")
class WideDeepSection(ModelSection):
    """A linear model of ids and columns beside an MLP over their embeddings (models/wide_deep.py)."""

    name: Literal["wide_deep"] = Field(description="The model.")
    wide: Names = Field(
        ["*"],
        description="Sparse features and dense columns (or patterns) of the linear part; crosses of columns "
        "belong here.",
    )
    deep: Names = Field(["*"], description="Those of the MLP. Each feature and column is in one of the two.")
    top_mlp: Sizes = Field([128, 64], description="Hidden sizes of the MLP.")
    dropout: Dropout = Field(0.0, description="Dropout in the MLP while training.")

    def check(self, schema: Schema) -> None:
        self.parts(schema)

    def check_tasks(self, schema: Schema, tasks: Mapping[str, int]) -> None:
        wide = self.parts(schema)["wide"]
        check_first_order(schema, self.name, tasks, [f for f in schema.sparse if f in wide])

    def parts(self, schema: Schema) -> dict[str, set[str]]:
        """wide and deep → their features and columns.

        Raises:
            ConfigError: a pattern that matches nothing; a feature in neither.
        """
        names = [*schema.dense, *schema.sparse]
        found = {part: matching(getattr(self, part), names, f"model.{part}") for part in ("wide", "deep")}
        if neither := set(names) - found["wide"] - found["deep"]:
            raise ConfigError(
                f"neither wide nor deep: {', '.join(sorted(neither))}",
                where="model.wide, model.deep",
                expected="each feature and dense column in one of them at least",
                do="name it, or leave it out of the schema",
            )
        return found
