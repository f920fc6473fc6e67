"""The configuration of matrix factorisation."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from raytrec.common.errors import ConfigError
from raytrec.config.models.base import model
from raytrec.config.models.sampled import SampledSection, feature_of
from raytrec.config.schema import Schema


@model("mf", "raytrec.models.mf:MatrixFactorization")
class MfSection(SampledSection):
    """The dot product of a user's and an item's embedding (models/mf.py)."""

    gives_vectors: ClassVar[bool | None] = True
    retrieves: ClassVar[bool] = True
    name: Literal["mf"] = Field(description="The model.")
    user: str = Field("user", description="The feature of who asks.")
    item: str = Field("item", description="The feature of what is recommended.")
    bias: bool = Field(
        True, description="The last number of each embedding is the user's or the item's bias, no factor."
    )

    def check(self, schema: Schema) -> None:
        feature_of(schema, self.user, "model.user")
        feature_of(schema, self.item, "model.item")
        dims = [schema.tables[schema.sparse[f].table].dim for f in (self.user, self.item)]
        if dims[0] != dims[1]:
            raise ConfigError(
                f"embeddings of {self.user} have {dims[0]} numbers, those of {self.item} {dims[1]}",
                where="schema.yaml, tables",
                expected="one dim: mf takes dot products between them",
                do="give both tables the same dim",
            )
        self.check_negatives(schema, self.item)

    def tower_members(self, schema: Schema) -> dict[str, set[str]]:
        return {"query": {self.user}, "item": {self.item}}
