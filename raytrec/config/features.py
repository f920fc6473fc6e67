"""The features of a run, resolved once from its schema and its model: reader, model, planner and checks share
this one description. No torch here.

Sequences that a model reads id by id are resolved here. Tables are looked up in sums of bags, whatever the
model, because sharded sums are right under every way of sharding. A sequence of which the model reads L ids
is therefore looked up as L features of one id or none that share its table: `history@0`, the most recent id,
to `history@{L-1}`. The last id of a list is the most recent; of longer lists the oldest ids are skipped. A
sum of one id is that id's embedding (times its weight, where the feature has weights), so sharding,
gradients, clipping and checks are those of any other feature.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from raytrec.common.errors import SchemaError
from raytrec.config.models.base import ModelSection
from raytrec.config.schema import Schema


@dataclass(frozen=True)
class Features:
    """What a row has, and what is looked up for it.

    Attributes:
        schema: the user's, which the data and the run folder have.
        sequences: sequence features that the model reads id by id → how many ids, at most.
        lookups: the schema with each of these as the features that it is looked up by, which batches, tables
            and what watches them have.
    """

    schema: Schema
    sequences: Mapping[str, int]
    lookups: Schema

    @classmethod
    def of(cls, schema: Schema, sequences: Mapping[str, int]) -> Features:
        """Those of a schema of which these sequences are read id by id.

        Raises:
            SchemaError: a feature has the name of a position of a sequence.
        """
        return cls(schema, sequences, _with_positions(schema, sequences))

    @property
    def keys(self) -> list[str]:
        """The keys of a batch's KeyedJaggedTensor, in their order."""
        return list(self.lookups.sparse)


def resolve_features(schema: Schema, model: ModelSection | None = None) -> Features:
    """The features of a run.

    Args:
        model: the `model` section, which knows what it reads id by id; default: means of sequences.

    Raises:
        SchemaError: a feature has the name of a position of a sequence.
    """
    lengths = model.sequence_lengths(schema) if model else {}
    sequences = {
        f: lengths[f] for f in schema.sparse if f in lengths and schema.sparse[f].pooling == "sequence"
    }
    return Features.of(schema, sequences)


def positions(feature: str, length: int) -> list[str]:
    """The keys that a sequence is looked up by, the most recent id first."""
    return [f"{feature}@{place}" for place in range(length)]


def _with_positions(schema: Schema, sequences: Mapping[str, int]) -> Schema:
    if not sequences:
        return schema
    sparse = {}
    for feature, spec in schema.sparse.items():
        if feature not in sequences:
            sparse[feature] = spec
            continue
        keys = positions(feature, sequences[feature])
        if taken := set(keys) & set(schema.sparse):
            raise SchemaError(
                f"sparse.{min(taken)}: the ids of sequence {feature} are looked up under this name",
                where="schema.yaml, sparse",
                expected="feature names other than SEQUENCE@NUMBER",
                do="rename the feature; `column` names its Parquet column",
            )
        one = spec.model_copy(update={"pooling": "sum", "column": schema.column_of(feature)})
        sparse |= dict.fromkeys(keys, one)
    return schema.model_copy(update={"sparse": sparse})
