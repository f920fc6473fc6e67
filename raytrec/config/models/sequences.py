"""Models of sequences: DIN, DIEN, BST, SASRec, HSTU."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from raytrec.common.errors import ConfigError, unknown
from raytrec.config.base import Few, PositiveFloat
from raytrec.config.models.base import (
    Dropout,
    ModelSection,
    Size,
    Sizes,
    check_same_dim,
    feature_of,
    model,
    one_dim,
    same_table,
    side_feature_place,
)
from raytrec.config.models.retrieval import SampledSection
from raytrec.config.schema import Schema


class TargetedSection(ModelSection):
    """A model that reads each sequence for a target: such as an item that may come next."""

    max_length: Few = 50
    """The most recent so many ids of a sequence feature are read; the last id is the newest."""
    target: str | None = None
    """The feature that sequences are attended for; default: the one that shares their table."""
    dropout: Dropout = 0.0
    """Dropout in the top MLP while training."""

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
        for pair in self.targets(schema).items():
            expected = "one dim: ids of a sequence and its target are held against each other"
            do = "give both tables the same dim, or set model.target to another feature"
            check_same_dim(schema, pair, expected, do)

    def _target(self, schema: Schema, sequence: str) -> str:
        bags = [feature for feature, spec in schema.sparse.items() if spec.pooling != "sequence"]
        same = [feature for feature in bags if schema.sparse[feature].table == schema.sparse[sequence].table]
        if self.target in bags:
            return self.target
        if self.target is not None:
            raise unknown(f"'{self.target}' is not a feature", self.target, bags, "model.target")
        if len(same) != 1:
            raise ConfigError(
                f"for which feature is {sequence} to be read? {len(same)} others look up its table",
                where="model.target",
                expected="one feature that shares the sequence's table, or a word on which it is",
                do=f"set model.target to one of {', '.join(same or bags)}",
            )
        return same[0]


@model("sequence", "raytrec.models.targeted:SequenceModel")
class SequenceSection(TargetedSection):
    """Attention over sequences, for the item in question, before DLRM's dot products (models/dlrm.py)."""

    name: Literal["sequence"]
    attention_mlp: Sizes = Field([32])
    """Hidden sizes between an id with its target and its score."""
    bottom_mlp: Sizes = Field([128])
    """Hidden sizes between the dense columns and their embedding."""
    top_mlp: Sizes = Field([128, 64])
    """Hidden sizes between interactions and logit."""

    def check(self, schema: Schema) -> None:
        one_dim(schema, self.name)
        self.targets(schema)


@model("din", "raytrec.models.targeted:DIN")
class DinSection(TargetedSection):
    """Deep Interest Network: sequences summed by weights that depend on the target (models/targeted.py)."""

    name: Literal["din"]
    attention_mlp: Sizes = Field([36])
    """Hidden sizes between an id with its target and its weight."""
    top_mlp: Sizes = Field([200, 80])
    """Hidden sizes between all vectors side by side and logit."""

    def check(self, schema: Schema) -> None:
        self.check_dims(schema)


@model("dien", "raytrec.models.dien:DIEN")
class DienSection(TargetedSection):
    """Deep Interest Evolution Network: interests as they change towards the target (models/dien.py)."""

    name: Literal["dien"]
    negatives: str | None = None
    """A feature of ids that a sequence's are held against, one for each, such as data.transforms makes by do:
    sample: the auxiliary loss; default: there is none."""
    auxiliary_weight: PositiveFloat = 1.0
    """Factor of the auxiliary loss."""
    top_mlp: Sizes = Field([200, 80])
    """Hidden sizes between all vectors side by side and logit."""

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


def _check_heads(heads: int, width: int, what: str) -> None:
    """Check that a width is a multiple of the heads of attention.

    Args:
        heads: Number of heads.
        width: Width that the heads share.
        what: Clause about the width, for errors: "the dim of table item is 8".

    Raises:
        ConfigError: The width is not a multiple.
    """
    if width % heads:
        raise ConfigError(
            f"{what}, and model.heads is {heads}",
            where="model.heads",
            expected="a divisor of it: each head has an equal part",
            do="set model.heads=1, or another divisor",
        )


@model("bst", "raytrec.models.targeted:BST")
class BstSection(TargetedSection):
    """Behavior Sequence Transformer: attention between a sequence and its target (models/targeted.py)."""

    name: Literal["bst"]
    blocks: Annotated[Few, Field(le=1000)] = 1
    """Transformer layers, one after the other."""
    heads: Annotated[Few, Field(le=1000)] = 2
    """Heads of attention in each of them."""
    feedforward: Size = 64
    """Hidden size between attention and a layer's result."""
    attention_dropout: Dropout = 0.0
    """Dropout of what a layer adds, while training."""
    top_mlp: Sizes = Field([256, 128])
    """Hidden sizes between all vectors side by side and logit."""

    def check(self, schema: Schema) -> None:
        self.check_dims(schema)
        for sequence in self.targets(schema):
            dim = schema.dim_of(sequence)
            _check_heads(self.heads, dim, f"the vectors of {sequence} have dim {dim}")


class NextItemSection(SampledSection):
    """A causal model of a history of items (models/next_item.py)."""

    gives_vectors: ClassVar[bool | None] = True
    retrieves: ClassVar[bool] = True
    history: str = "history"
    """The sequence of items so far, the most recent last."""
    item: str = "item"
    """The feature of the item that comes next, or might."""
    max_length: Few = 50
    """The most recent so many items of the history are read."""
    blocks: Annotated[Few, Field(le=1000)] = 2
    """Layers, one after the other."""
    heads: Annotated[Few, Field(le=1000)] = 1
    """Heads of attention in each of them."""
    dropout: Dropout = 0.2
    """Dropout of what a layer adds, and of its input, in training."""
    positions: Literal["recency", "order"] = "recency"
    """Positions are counted from the most recent item of a history, or from its oldest."""
    normalize: bool = False
    """Vectors of length 1: scores are cosines instead of dot products."""
    temperature: PositiveFloat = 1.0
    """What scores are divided by."""

    def sequence_lengths(self, schema: Schema) -> dict[str, int]:
        """The history, too, is read id by id."""
        return {self.history: self.max_length} | super().sequence_lengths(schema)

    def reads_ids(self, schema: Schema) -> list[str]:
        return self._with_ids(self.history, self.item)

    def tower_members(self, schema: Schema) -> dict[str, set[str]]:
        return {"query": {self.history}, "item": {self.item}}

    def check(self, schema: Schema) -> None:
        feature_of(schema, self.history, "model.history", sequence=True)
        feature_of(schema, self.item, "model.item")
        same_table(schema, self.history, self.item, "model.history")
        self.check_negatives(schema, self.item)

    def check_heads(self, schema: Schema, width: int | None = None) -> None:
        """Check that the heads share out model.width, or the dim of the items' table by default.

        Raises:
            ConfigError: The width is not a multiple of the heads.
        """
        what = f"the dim of table {schema.sparse[self.item].table}" if width is None else "model.width"
        width = width or schema.dim_of(self.item)
        _check_heads(self.heads, width, f"{what} is {width}")


@model("sasrec", "raytrec.models.next_item:SASRec")
class SasrecSection(NextItemSection):
    """Self-attention over a history, for the next item."""

    name: Literal["sasrec"]
    feedforward: Size | None = None
    """Width between the two layers of a block's network; default: the table's dim."""
    attention_dropout: Dropout = 0.0
    """Dropout of attention weights in training; more than 0 is slow on CPU."""

    def check(self, schema: Schema) -> None:
        super().check(schema)
        self.check_heads(schema)


@model("hstu", "raytrec.models.next_item:HSTU")
class HstuSection(NextItemSection):
    """Pointwise aggregated attention over a history, for the next item."""

    name: Literal["hstu"]
    width: Size | None = None
    """Width of u, v, queries and keys over all heads; default: the table's dim."""
    time: str | None = None
    """A column of times of the history's ids (schema: sparse.HISTORY.side_features): attention knows how long
    lies between two items; default: only how many items do."""
    normalize: bool = True
    """Vectors of length 1: scores are cosines instead of dot products."""
    temperature: PositiveFloat = 0.05
    """What scores are divided by."""

    def check(self, schema: Schema) -> None:
        super().check(schema)
        self.check_heads(schema, self.width)
        if self.time is not None:
            self.time_place(schema)

    def time_place(self, schema: Schema) -> int | None:
        """Which of the history's side features the times are; None: no times are read."""
        if self.time is None:
            return None
        return side_feature_place(schema, self.history, self.time, "model.time")
