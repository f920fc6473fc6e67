"""What the sections of models of the next item share."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from raytrec.config.base import Few, PositiveFloat
from raytrec.config.models.base import Dropout, check_heads
from raytrec.config.models.sampled import SampledSection, feature_of, same_table
from raytrec.config.schema import Schema


class NextItemSection(SampledSection):
    """A causal model of a history of items (models/next_item.py)."""

    gives_vectors: ClassVar[bool | None] = True
    retrieves: ClassVar[bool] = True
    history: str = Field("history", description="The sequence of items so far, the most recent last.")
    item: str = Field("item", description="The feature of the item that comes next, or might.")
    max_length: Few = Field(50, description="The most recent so many items of the history are read.")
    blocks: Annotated[Few, Field(le=1000)] = Field(2, description="Layers, one after the other.")
    heads: Annotated[Few, Field(le=1000)] = Field(1, description="Heads of attention in each of them.")
    dropout: Dropout = Field(0.2, description="Dropout of what a layer adds, and of its input, in training.")
    positions: Literal["recency", "order"] = Field(
        "recency",
        description="Positions are counted from the most recent item of a history, or from its oldest.",
    )
    normalize: bool = Field(
        False, description="Vectors of length 1: scores are cosines instead of dot products."
    )
    temperature: PositiveFloat = Field(1.0, description="What scores are divided by.")

    def sequence_lengths(self, schema: Schema) -> dict[str, int]:
        """The history, too, is read id by id."""
        return {self.history: self.max_length} | super().sequence_lengths(schema)

    def tower_members(self, schema: Schema) -> dict[str, set[str]]:
        return {"query": {self.history}, "item": {self.item}}

    def check(self, schema: Schema) -> None:
        feature_of(schema, self.history, "model.history", sequence=True)
        feature_of(schema, self.item, "model.item")
        same_table(schema, self.history, self.item, "model.history")
        self.check_negatives(schema, self.item)

    def check_heads(self, width: int, what: str) -> None:
        """Looks whether a width can be shared out among the heads.

        Raises:
            ConfigError: it cannot.
        """
        check_heads(self.heads, width, f"{what} is {width}")
