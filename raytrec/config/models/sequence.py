"""The configuration of attention over sequences."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from raytrec.common.errors import ConfigError, did_you_mean
from raytrec.config.base import Few
from raytrec.config.models.base import Dropout, ModelSection, Sizes, model, one_dim
from raytrec.config.schema import Schema


@model("sequence", "raytrec.models.sequence:SequenceModel")
class SequenceSection(ModelSection):
    """Attention over sequences, for the item in question, before DLRM's dot products (models/sequence.py)."""

    name: Literal["sequence"] = Field(description="The model.")
    max_length: Few = Field(
        50,
        description="The most recent so many ids of a sequence feature are read; the last id is the newest.",
    )
    target: str | None = Field(
        None,
        description="The feature that sequences are attended for; default: the one that shares their table.",
    )
    attention_mlp: Sizes = Field(
        [32], description="Hidden sizes between an id beside the target and its score."
    )
    bottom_mlp: Sizes = Field(
        [128], description="Hidden sizes between the dense columns and their embedding."
    )
    top_mlp: Sizes = Field([128, 64], description="Hidden sizes between interactions and logit.")
    dropout: Dropout = Field(0.0, description="Dropout in the top MLP while training.")

    def check(self, schema: Schema) -> None:
        one_dim(schema, self.name)
        self.targets(schema)

    def targets(self, schema: Schema) -> dict[str, str]:
        """Sequence → the feature that it is attended for.

        Raises:
            ConfigError: no sequence; a target that there is not, or that has to be named.
        """
        sequences = [f for f, spec in schema.sparse.items() if spec.pooling == "sequence"]
        if not sequences:
            raise ConfigError(
                "the schema has no sequence",
                where="schema.yaml, sparse",
                expected="a feature of pooling: sequence for model.name=sequence",
                do="set pooling: sequence on the feature whose ids are in the order of time, or take dlrm",
            )
        return {sequence: self._target(schema, sequence) for sequence in sequences}

    def _target(self, schema: Schema, sequence: str) -> str:
        bags = [feature for feature, spec in schema.sparse.items() if spec.pooling != "sequence"]
        same = [feature for feature in bags if schema.sparse[feature].table == schema.sparse[sequence].table]
        if self.target in bags:
            return self.target
        if self.target is not None:
            near = did_you_mean(self.target, bags)
            raise ConfigError(
                f"'{self.target}' is no feature" + (f"; did you mean '{near}'?" if near else ""),
                where="model.target",
                expected=f"one of {', '.join(bags)}",
            )
        if len(same) != 1:
            raise ConfigError(
                f"for which feature is {sequence} to be read? {len(same)} others look up its table",
                where="model.target",
                expected="one feature that shares the sequence's table, or a word on which it is",
                do=f"set model.target to one of {', '.join(same or bags)}",
            )
        return same[0]
