"""The features of a run, resolved from schema and model.

Reader, model, planner and checks share this one description. No torch here.

What a model reads id by id is decided here. A sequence of which it reads at most L ids is one key of a batch,
the most recent L ids of each row, the most recent first. A table that such a sequence looks up gives the
vector of each id (TorchRec's EmbeddingCollection), for all features that read it: those of them that are bags
are summed behind the lookup. So does a table that candidates look up, with one id each. All other tables give
sums of bags (EmbeddingBagCollection).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from raytrec.config.models.base import ModelSection
from raytrec.config.schema import Schema


@dataclass(frozen=True)
class Features:
    """What a row has, and how it is looked up.

    Attributes:
        schema: the user's, which the data and the run folder have.
        sequences: sequence features that the model reads id by id → how many ids, at most.
    """

    schema: Schema
    sequences: Mapping[str, int]

    @property
    def keys(self) -> list[str]:
        """The keys of a batch's KeyedJaggedTensor, in their order: one for each feature."""
        return list(self.schema.sparse)

    @cached_property
    def side_features(self) -> dict[str, int]:
        """Sequences that are read id by id and have side features → how many."""
        found = {feature: len(self.schema.sparse[feature].side_features) for feature in self.sequences}
        return {feature: count for feature, count in found.items() if count}

    def is_mean(self, feature: str) -> bool:
        """Whether a feature's bags are averaged."""
        one = feature in self.sequences or feature in self.schema.candidates
        return self.schema.sparse[feature].pooling != "sum" and not one

    @cached_property
    def tables_by_id(self) -> dict[str, list[str]]:
        """Tables that give the vector of each id → all features that read them, in the schema's order."""
        by_id = [*self.sequences, *self.schema.of_candidates(self.schema.sparse)]
        tables = {self.schema.sparse[feature].table for feature in by_id}
        found: dict[str, list[str]] = {table: [] for table in self.schema.tables if table in tables}
        for feature, spec in self.schema.sparse.items():
            if spec.table in found:
                found[spec.table].append(feature)
        return found


def resolve_features(schema: Schema, model: ModelSection | None = None) -> Features:
    """The features of a run.

    Args:
        model: the `model` section, which knows what it reads id by id; default: means of sequences.
    """
    lengths = model.sequence_lengths(schema) if model else {}
    sequences = {
        f: lengths[f] for f in schema.sparse if f in lengths and schema.sparse[f].pooling == "sequence"
    }
    return Features(schema, sequences)
