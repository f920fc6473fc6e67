"""The configuration of neural collaborative filtering."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from raytrec.common.errors import ConfigError
from raytrec.config.base import NonNegativeInt
from raytrec.config.models.base import Dropout, Sizes, model
from raytrec.config.models.sampled import SampledSection, feature_of
from raytrec.config.schema import Schema


@model("ncf", "raytrec.models.ncf:NeuMF")
class NcfSection(SampledSection):
    """Products of a user's and an item's embeddings beside an MLP over them: NeuMF (models/ncf.py)."""

    name: Literal["ncf"] = Field(description="The model.")
    user: str = Field("user", description="The feature of who asks.")
    item: str = Field("item", description="The feature of what is recommended.")
    gmf_dim: NonNegativeInt | None = Field(
        None,
        description="The first so many numbers of each embedding are for the products, the others for the "
        "MLP; 0: an MLP alone; all: products alone. Default: half of them.",
    )
    shared: bool = Field(
        False, description="Products and MLP read the whole of the same embeddings; without gmf_dim."
    )
    mlp: Annotated[Sizes, Field(min_length=1)] = Field([64, 32, 16], description="Sizes of the MLP's layers.")
    dropout: Dropout = Field(0.0, description="Dropout in the MLP while training.")

    def check(self, schema: Schema) -> None:
        feature_of(schema, self.user, "model.user")
        feature_of(schema, self.item, "model.item")
        self.widths(schema)
        self.check_negatives(schema, self.item)

    def widths(self, schema: Schema) -> tuple[int, int, int]:
        """How many numbers the products have, and how many of user and item the MLP reads.

        Raises:
            ConfigError: the products would have different ones of user and item.
        """
        dims = [schema.tables[schema.sparse[f].table].dim for f in (self.user, self.item)]
        if self.shared and self.gmf_dim is not None:
            raise ConfigError(
                f"model.shared is true, and model.gmf_dim is {self.gmf_dim}",
                where="model.gmf_dim",
                expected="one of the two: embeddings are shared, or parted",
                do="leave gmf_dim out, or set model.shared=false",
            )
        if self.shared:
            self._check_dims(dims, dims[0], "model.shared")
            return dims[0], dims[0], dims[1]
        products = min(dims) // 2 if self.gmf_dim is None else self.gmf_dim
        if products > min(dims):
            self._check_dims(dims, products, "model.gmf_dim")
        return products, dims[0] - products, dims[1] - products

    def _check_dims(self, dims: list[int], products: int, key: str) -> None:
        if products > min(dims) or (self.shared and dims[0] != dims[1]):
            raise ConfigError(
                f"embeddings of {self.user} have {dims[0]} numbers, those of {self.item} {dims[1]}",
                where=f"schema.yaml, tables; {key}",
                expected=f"{products} of each for their products",
                do="change the tables' dims, or set model.gmf_dim",
            )
