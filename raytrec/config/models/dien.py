"""DIEN's configuration."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from raytrec.common.errors import ConfigError
from raytrec.config.base import PositiveFloat
from raytrec.config.models.base import Dropout, Sizes, model
from raytrec.config.models.sampled import feature_of
from raytrec.config.models.targeted import TargetedSection
from raytrec.config.schema import Schema


@model("dien", "raytrec.models.dien:DIEN")
class DienSection(TargetedSection):
    """Deep Interest Evolution Network: interests as they change towards the target (models/dien.py)."""

    name: Literal["dien"] = Field(description="The model.")
    negatives: str | None = Field(
        None,
        description="A feature of ids that a sequence's are held against, one for each, such as "
        "data.transforms makes by do: sample: the auxiliary loss; default: there is none.",
    )
    auxiliary_weight: PositiveFloat = Field(1.0, description="Factor of the auxiliary loss.")
    top_mlp: Sizes = Field([200, 80], description="Hidden sizes between all vectors side by side and logit.")
    dropout: Dropout = Field(0.0, description="Dropout in the top MLP while training.")

    @property
    def own_loss(self) -> bool:
        return self.negatives is not None

    def sequences(self, schema: Schema) -> list[str]:
        """All but the negatives."""
        return [feature for feature in super().sequences(schema) if feature != self.negatives]

    def held_against(self, schema: Schema) -> list[str]:
        """The sequences whose ids the negatives are held against: those of their table."""
        if self.negatives is None:
            return []
        table = schema.sparse[self.negatives].table
        return [feature for feature in self.sequences(schema) if schema.sparse[feature].table == table]

    def check(self, schema: Schema) -> None:
        if self.negatives is not None:
            feature_of(schema, self.negatives, "model.negatives", sequence=True)
        self.targets(schema)
        if self.negatives is not None and not self.held_against(schema):
            table = schema.sparse[self.negatives].table
            raise ConfigError(
                f"'{self.negatives}' looks up table {table}, and no sequence does",
                where="model.negatives",
                expected="a feature of the table of a sequence, whose ids they are held against",
                do=f"set table on {self.negatives} to that of {self.sequences(schema)[0]}",
            )
