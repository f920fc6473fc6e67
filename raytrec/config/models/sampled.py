"""What the sections of models that learn from drawn items share: `model.negatives`."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from raytrec.common.errors import ConfigError, did_you_mean
from raytrec.config.base import Few
from raytrec.config.models.base import ModelSection
from raytrec.config.schema import Schema


class SampledSection(ModelSection):
    """A model that can hold each row's item against others, drawn for it (models/sampled.py)."""

    own_loss_of_last: ClassVar[bool] = True
    negatives: str | None = Field(
        None,
        description="A feature of ids that a row's item is held against, such as data.transforms makes by "
        "do: sample: the model's own loss (tasks: [{loss: from_model}]); default: it has none.",
    )
    max_negatives: Few = Field(
        100, description="The most ids of `negatives` that are read of a row; what is not there is padded."
    )
    loss: Literal["softmax", "bce", "bpr"] = Field(
        "softmax",
        description="What is learned from an item and its negatives: cross-entropy of the softmax over all "
        "of them; binary cross-entropy of each; or that it has a higher score than they, pair by pair.",
    )

    @property
    def own_loss(self) -> bool:
        return self.negatives is not None

    def sequence_lengths(self, schema: Schema) -> dict[str, int]:
        """Negatives are read id by id."""
        return {} if self.negatives is None else {self.negatives: self.max_negatives}

    def check_negatives(self, schema: Schema, item: str) -> None:
        """Holds `negatives` to the item's feature.

        Raises:
            ConfigError: there is no such sequence, or it looks up another table.
        """
        if self.negatives is not None:
            feature_of(schema, self.negatives, "model.negatives", sequence=True)
            same_table(schema, self.negatives, item, "model.negatives")


def feature_of(schema: Schema, feature: str, key: str, *, sequence: bool = False) -> None:
    """Looks whether a feature can be read as a key wants it.

    Args:
        key: that names it: model.item.
        sequence: whether it has to be one that is read id by id.

    Raises:
        ConfigError: it cannot.
    """
    if feature not in schema.sparse:
        near = did_you_mean(feature, list(schema.sparse))
        raise ConfigError(
            f"'{feature}' is no feature" + (f"; did you mean '{near}'?" if near else ""),
            where=key,
            expected=f"one of {', '.join(schema.sparse)}",
        )
    pooling = schema.sparse[feature].pooling
    if sequence and pooling != "sequence":
        raise ConfigError(
            f"'{feature}' is pooled by its {pooling}, and is to be read id by id",
            where=f"schema.yaml, sparse.{feature}.pooling",
            expected="sequence",
            do=f"set pooling: sequence on {feature}, or name another feature",
        )


def same_table(schema: Schema, feature: str, item: str, key: str) -> None:
    """Looks whether a feature's ids are those of the item.

    Raises:
        ConfigError: they look up different tables.
    """
    tables = schema.sparse[feature].table, schema.sparse[item].table
    if tables[0] != tables[1]:
        raise ConfigError(
            f"'{feature}' looks up table {tables[0]}, and '{item}' table {tables[1]}",
            where=key,
            expected="one table: their ids are of the same things, whose vectors are compared",
            do=f"set table: {tables[1]} on {feature}, or name another feature",
        )
