"""FinalMLP's configuration."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from raytrec.common.errors import ConfigError
from raytrec.config.base import Few
from raytrec.config.models.base import Dropout, ModelSection, Sizes, matching, model
from raytrec.config.schema import Schema

Stream = Annotated[Sizes, Field(min_length=1)]


@model("final_mlp", "raytrec.models.final_mlp:FinalMLP")
class FinalMLPSection(ModelSection):
    """Two MLPs, each over inputs that it weighs, and a bilinear form of both (models/final_mlp.py)."""

    name: Literal["final_mlp"] = Field(description="The model.")
    mlp1: Stream = Field([128, 64], description="Sizes of the first stream's layers.")
    mlp2: Stream = Field([128, 64], description="Sizes of the second stream's layers.")
    gating: bool = Field(
        True, description="Whether each stream weighs its inputs (the paper's feature selection)."
    )
    gate1: list[str] = Field(
        [],
        description="Sparse features and dense columns (or patterns) that the weights of the first stream's "
        "inputs follow from, such as the user's; []: weights are the same for all rows.",
    )
    gate2: list[str] = Field([], description="The same for the second stream, such as the item's.")
    gate_mlp: Sizes = Field([64], description="Hidden sizes of the network that gives the weights.")
    heads: Few = Field(
        1, description="Parts that the streams are cut into, each with a bilinear form of its own."
    )
    dropout: Dropout = Field(0.0, description="Dropout in both streams while training.")

    def check(self, schema: Schema) -> None:
        if not self.gating and (self.gate1 or self.gate2):
            raise ConfigError(
                "gate1 and gate2 name what inputs are weighted by, and gating is false",
                where="model.gating, model.gate1, model.gate2",
                expected="gating: true, or neither of them",
                do="set model.gating=true",
            )
        for stream in ("gate1", "gate2"):
            self.context(schema, stream)
        for name, sizes in (("mlp1", self.mlp1), ("mlp2", self.mlp2)):
            if sizes[-1] % self.heads:
                raise ConfigError(
                    f"a stream of width {sizes[-1]} cannot be cut into {self.heads} heads",
                    where=f"model.{name}, model.heads",
                    expected=f"a last size that is a multiple of {self.heads}",
                    do=f"set the last of model.{name} to {-(-sizes[-1] // self.heads) * self.heads}",
                )

    def context(self, schema: Schema, stream: str) -> set[str]:
        """The features and columns that a stream's weights follow from.

        Raises:
            ConfigError: a pattern that matches nothing.
        """
        return matching(getattr(self, stream), [*schema.dense, *schema.sparse], f"model.{stream}")
