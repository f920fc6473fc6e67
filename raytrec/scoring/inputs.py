"""The tensors that an exported model takes: dense columns, bags and sequences. No torch here."""

from __future__ import annotations

from typing import Literal

from raytrec.config.base import Section
from raytrec.config.features import Features

InputKind = Literal["dense", "bag", "vectors", "present", "side_features"]


class Input(Section):
    """One tensor of B rows.

    Attributes:
        kind: dense: float32 [B, width], the dense columns of the schema in its order. Of a feature: bag,
            float32 [B, width], its pooled embedding; of a sequence that is read id by id, the most recent
            first: vectors, float32 [B, length, width]; present, bool [B, length], where there is an id;
            side_features, float64 [B, length, width].
    """

    kind: InputKind
    feature: str = ""
    length: int = 0
    width: int = 0


def inputs_of(features: Features) -> list[Input]:
    """All inputs of a model, in the order of the schema."""
    schema = features.schema
    found = [Input(kind="dense", width=len(schema.dense))]
    for name, spec in schema.sparse.items():
        width, length = schema.tables[spec.table].dim, features.sequences.get(name)
        if length is None:
            found.append(Input(kind="bag", feature=name, width=width))
            continue
        found.append(Input(kind="vectors", feature=name, length=length, width=width))
        found.append(Input(kind="present", feature=name, length=length))
        if sides := features.side_features.get(name):
            found.append(Input(kind="side_features", feature=name, length=length, width=sides))
    return found
