"""What the sections of models that read sequences for the item in question share."""

from __future__ import annotations

from pydantic import Field

from raytrec.common.errors import ConfigError, did_you_mean
from raytrec.config.base import Few
from raytrec.config.models.base import ModelSection
from raytrec.config.schema import Schema


class TargetedSection(ModelSection):
    """A model that reads each sequence for a target: an item, say, that may come next."""

    max_length: Few = Field(
        50,
        description="The most recent so many ids of a sequence feature are read; the last id is the newest.",
    )
    target: str | None = Field(
        None,
        description="The feature that sequences are attended for; default: the one that shares their table.",
    )

    def sequences(self, schema: Schema) -> list[str]:
        """The sequences that are read for a target, in the schema's order."""
        return [f for f, spec in schema.sparse.items() if spec.pooling == "sequence"]

    def targets(self, schema: Schema) -> dict[str, str]:
        """Sequence → the feature that it is attended for.

        Raises:
            ConfigError: no sequence; a target that there is not, or that has to be named.
        """
        sequences = self.sequences(schema)
        if not sequences:
            raise ConfigError(
                "the schema has no sequence",
                where="schema.yaml, sparse",
                expected=f"a feature of pooling: sequence for model.name={self.name}",
                do="set pooling: sequence on the feature whose ids are in the order of time, or take dlrm",
            )
        return {sequence: self._target(schema, sequence) for sequence in sequences}

    def check_dims(self, schema: Schema) -> None:
        """Looks whether each sequence's ids have vectors as wide as its target's.

        Raises:
            ConfigError: one has not, and what `targets` raises.
        """
        for sequence, target in self.targets(schema).items():
            dims = [schema.tables[schema.sparse[feature].table].dim for feature in (sequence, target)]
            if dims[0] != dims[1]:
                raise ConfigError(
                    f"vectors of {sequence} have dim {dims[0]}, and those of its target {target} {dims[1]}",
                    where="schema.yaml, tables",
                    expected="one dim: they are held against each other",
                    do="give both tables the same dim, or set model.target to another feature",
                )

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
