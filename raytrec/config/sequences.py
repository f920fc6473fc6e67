"""Sequence features that a model reads id by id, instead of by their mean.

Tables are looked up in sums of bags, whatever the model, because sharded sums are right under every way of
sharding. A sequence of which the model reads L ids is therefore looked up as L features of one id or none
that share its table: `history@0`, the most recent id, to `history@{L-1}`. The last id of a list is the most
recent; of longer lists the oldest ids are left out. A sum of one id is that id's embedding (times its weight,
where the feature has weights), so sharding, gradients, clipping and checks are those of any other feature.

The data and the run folder keep the user's schema; batches, tables and what watches them have `looked_up`.
No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping

from raytrec.common.errors import SchemaError
from raytrec.config.base import Section
from raytrec.config.schema import Schema


def read_by_id(schema: Schema, model: Section) -> dict[str, int]:
    """Sequence features that the model reads id by id → how many ids, at most.

    Args:
        model: the `model` section; models without max_length, or with null, take means.
    """
    length = getattr(model, "max_length", None)
    return {f: length for f, spec in schema.sparse.items() if length and spec.pooling == "sequence"}


def positions(feature: str, length: int) -> list[str]:
    """The keys that a sequence is looked up by, the most recent id first."""
    return [f"{feature}@{place}" for place in range(length)]


def looked_up(schema: Schema, lengths: Mapping[str, int]) -> Schema:
    """The schema with each of these sequences as the features that it is looked up by.

    Raises:
        SchemaError: another feature has such a name already.
    """
    if not lengths:
        return schema
    sparse = {}
    for feature, spec in schema.sparse.items():
        if feature not in lengths:
            sparse[feature] = spec
            continue
        keys = positions(feature, lengths[feature])
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
