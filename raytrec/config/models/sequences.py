"""Sections of sequence models: DIN, DIEN, BST, SASRec, HSTU."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from raytrec.common.errors import ConfigError, make_unknown_word_error
from raytrec.config.base import PositiveFloat, SmallCount
from raytrec.config.models.base import (
    Dropout,
    ModelSection,
    Size,
    Sizes,
    check_feature,
    check_same_dim,
    check_same_table,
    find_side_feature,
    get_common_dim,
    model,
)
from raytrec.config.models.retrieval import SampledSection
from raytrec.config.schema import Schema


class TargetedSection(ModelSection):
    """Section of a model that reads each sequence with respect to a target feature, such as a possible next item."""

    max_length: SmallCount = 50
    """Maximum number of most recent ids read from each sequence feature, whose last id is the newest."""
    target: str | None = None
    """Feature with respect to which sequences are read; default: the feature that shares their table."""
    dropout: Dropout = 0.0
    """Dropout in the top MLP during training."""

    def sequences(self, schema: Schema) -> list[str]:
        """Return the sequences that are read with respect to a target, in the schema's order."""
        return [f for f, spec in schema.sparse.items() if spec.pooling == "sequence"]

    def targets(self, schema: Schema) -> dict[str, str]:
        """Return a mapping from sequence to its target feature.

        Raises:
            ConfigError: There is no sequence, the target does not exist or is a sequence, or no unique default exists.
        """
        sequences = self.sequences(schema)
        if not sequences:
            besides = " besides model.negatives" if getattr(self, "negatives", None) else ""
            raise ConfigError(
                f"the schema has no sequence feature{besides}",
                where="schema.yaml, sparse",
                expected=f"a feature with pooling: sequence for model.name={self.name}",
                do="set pooling: sequence on a feature with ids in the order of time, or use dlrm",
            )
        return {sequence: self._target(schema, sequence) for sequence in sequences}

    def check_dims(self, schema: Schema) -> None:
        """Check that the tables of each sequence and its target have the same dim.

        Raises:
            ConfigError: The dims differ, or a sequence has no target (see `targets`).
        """
        for pair in self.targets(schema).items():
            expected = "the same dim for both tables, because ids of a sequence are compared with its target"
            do = "give both tables the same dim, or set model.target to another feature"
            check_same_dim(schema, pair, expected, do)

    def _target(self, schema: Schema, sequence: str) -> str:
        bags = [feature for feature, spec in schema.sparse.items() if spec.pooling != "sequence"]
        same = [feature for feature in bags if schema.sparse[feature].table == schema.sparse[sequence].table]
        if self.target in bags:
            return self.target
        if self.target is not None:
            kind = "a sequence" if self.target in schema.sparse else "not a feature"
            what = f"model.target is '{self.target}', which is {kind}"
            raise make_unknown_word_error(what, self.target, bags, "model.target")
        if len(same) != 1:
            raise ConfigError(
                f"sequence {sequence} has no default target: {len(same)} features other than sequences use its table",
                where="model.target",
                expected="exactly one feature that shares the sequence's table, or an explicit target",
                do=f"set model.target to one of {', '.join(same or bags)}" if bags else "add such a feature to sparse",
            )
        return same[0]


@model("sequence", "raytrec.models.target_attention:SequenceModel")
class SequenceSection(TargetedSection):
    """Attention over sequences with respect to the target, before DLRM's dot products (models/interactions.py)."""

    name: Literal["sequence"]
    attention_mlp: Sizes = Field([32])
    """Hidden sizes of the MLP that scores an id's vector against its target's."""
    bottom_mlp: Sizes = Field([128])
    """Hidden sizes of the MLP from the dense columns to their embedding."""
    top_mlp: Sizes = Field([128, 64])
    """Hidden sizes of the MLP from the interactions to the logit."""

    def check(self, schema: Schema) -> None:
        """Raise a ConfigError unless all tables have the same dim and each sequence has a target."""
        get_common_dim(schema, self.name)
        self.targets(schema)


@model("din", "raytrec.models.target_attention:DIN")
class DinSection(TargetedSection):
    """Deep Interest Network: sequences are summed with weights that depend on the target."""

    name: Literal["din"]
    attention_mlp: Sizes = Field([36])
    """Hidden sizes of the MLP that computes an id's weight from its vector and its target's."""
    top_mlp: Sizes = Field([200, 80])
    """Hidden sizes of the MLP from all concatenated vectors to the logit."""

    def check(self, schema: Schema) -> None:
        """Raise a ConfigError as `check_dims` does."""
        self.check_dims(schema)


@model("dien", "raytrec.models.dien:DIEN")
class DienSection(TargetedSection):
    """Deep Interest Evolution Network, which models how interests evolve towards the target (models/dien.py)."""

    name: Literal["dien"]
    negatives: str | None = None
    """Feature whose ids are compared one to one with the ids of a sequence, such as a column written by do:
    sample in data.transforms. Enables the auxiliary loss; default: no auxiliary loss."""
    auxiliary_weight: PositiveFloat = 1.0
    """Factor of the auxiliary loss."""
    top_mlp: Sizes = Field([200, 80])
    """Hidden sizes of the MLP from all concatenated vectors to the logit."""

    def sequences(self, schema: Schema) -> list[str]:
        """Return all sequences except the negatives."""
        return [feature for feature in super().sequences(schema) if feature != self.negatives]

    def get_supervised_sequences(self, schema: Schema) -> list[str]:
        """Return the sequences whose ids are compared with the negatives, because they share their table.

        The list is empty if `negatives` is not set.
        """
        if self.negatives is None:
            return []
        table = schema.sparse[self.negatives].table
        return [feature for feature in self.sequences(schema) if schema.sparse[feature].table == table]

    def check(self, schema: Schema) -> None:
        """Raise a ConfigError unless each sequence has a target and negatives, if any, share a sequence's table."""
        if self.negatives is not None:
            check_feature(schema, self.negatives, "model.negatives", sequence=True)
        self.targets(schema)
        if self.negatives is not None and not self.get_supervised_sequences(schema):
            table, first = schema.sparse[self.negatives].table, self.sequences(schema)[0]
            raise ConfigError(
                f"'{self.negatives}' looks up table {table}, but no other sequence does",
                where="model.negatives",
                expected="a feature that looks up the same table as a sequence, because their ids are compared",
                do=f"set sparse.{self.negatives}.table to {schema.sparse[first].table}, the table of {first}",
            )


def check_heads(heads: int, width: int, what: str) -> None:
    """Check that a width is a multiple of the number of attention heads.

    The error begins with `what`, a clause such as "model.width is 50".

    Raises:
        ConfigError: The width is not a multiple.
    """
    if width % heads:
        raise ConfigError(
            f"{what}, which is not a multiple of model.heads={heads}",
            where="model.heads",
            expected=f"a divisor of {width}, because all heads have the same width",
            do="set model.heads=1, or another divisor",
        )


@model("bst", "raytrec.models.target_attention:BST")
class BstSection(TargetedSection):
    """Behavior Sequence Transformer: attention between a sequence and its target."""

    name: Literal["bst"]
    blocks: Annotated[SmallCount, Field(le=1000)] = 1
    """Number of transformer layers, applied in sequence."""
    heads: Annotated[SmallCount, Field(le=1000)] = 2
    """Attention heads per layer."""
    feedforward: Size = 64
    """Hidden size of each layer's feedforward network."""
    attention_dropout: Dropout = 0.0
    """Dropout of each layer's residual branches during training."""
    top_mlp: Sizes = Field([256, 128])
    """Hidden sizes of the MLP from all concatenated vectors to the logit."""

    def check(self, schema: Schema) -> None:
        """Raise a ConfigError unless each sequence and its target share a dim that is a multiple of the heads."""
        self.check_dims(schema)
        for sequence in self.targets(schema):
            dim = schema.get_feature_dim(sequence)
            check_heads(self.heads, dim, f"the vectors of {sequence} have dim {dim}")


class NextItemSection(SampledSection):
    """Section of a model that attends causally to a history of items (models/next_item.py)."""

    gives_vectors: ClassVar[bool | None] = True
    retrieves: ClassVar[bool] = True
    history: str = "history"
    """Sequence of previous items, the most recent last."""
    item: str = "item"
    """Feature of the next item, or of a candidate."""
    max_length: SmallCount = 50
    """Maximum number of most recent items read from the history."""
    blocks: Annotated[SmallCount, Field(le=1000)] = 2
    """Number of layers, applied in sequence."""
    heads: Annotated[SmallCount, Field(le=1000)] = 1
    """Attention heads per layer."""
    dropout: Dropout = 0.2
    """Dropout of each layer's residual branches and of the model's input during training."""
    positions: Literal["recency", "order"] = "recency"
    """Count positions from the most recent item of a history (recency), or from the oldest item (order)."""
    normalize: bool = False
    """Normalize vectors to length 1: scores are cosines instead of dot products."""
    temperature: PositiveFloat = 1.0
    """Divisor of the scores."""

    def sequence_lengths(self, schema: Schema) -> dict[str, int]:
        """Return feature → maximum number of ids for the history and the negatives, which are read id by id."""
        return {self.history: self.max_length} | super().sequence_lengths(schema)

    def reads_ids(self, schema: Schema) -> list[str]:
        """Return the history, the item and the negatives if negatives are shared, else []."""
        return self._with_ids(self.history, self.item)

    def tower_members(self, schema: Schema) -> dict[str, set[str]]:
        """Return {"query": {history}, "item": {item}}, the feature of each tower."""
        return {"query": {self.history}, "item": {self.item}}

    def check(self, schema: Schema) -> None:
        """Check the features, the negatives and the heads.

        Raises:
            ConfigError: History or item does not exist, they look up different tables, the width is not a multiple of
                the heads, or as for `check_negatives`.
        """
        check_feature(schema, self.history, "model.history", sequence=True)
        check_feature(schema, self.item, "model.item")
        check_same_table(schema, self.history, self.item, "model.history")
        self.check_negatives(schema, self.item)
        width, what = getattr(self, "width", None), "model.width"  # a key of hstu
        if width is None:
            width, what = schema.get_feature_dim(self.item), f"the dim of table {schema.sparse[self.item].table}"
        check_heads(self.heads, width, f"{what} is {width}")


@model("sasrec", "raytrec.models.next_item:SASRec")
class SasrecSection(NextItemSection):
    """Self-attention over a history that predicts the next item."""

    name: Literal["sasrec"]
    feedforward: Size | None = None
    """Hidden size of each layer's feedforward network; default: the table's dim."""
    attention_dropout: Dropout = 0.0
    """Dropout of attention weights during training; values above 0 are slow on CPU."""


@model("hstu", "raytrec.models.next_item:HSTU")
class HstuSection(NextItemSection):
    """Pointwise aggregated attention over a history that predicts the next item."""

    name: Literal["hstu"]
    width: Size | None = None
    """Width of u, v, queries and keys over all heads; default: the table's dim."""
    time: str | None = None
    """Column with the times of the history's ids (schema: sparse.HISTORY.side_features). Attention then also
    depends on the time between two items; default: only on the number of items between them."""
    normalize: bool = True
    """Normalize vectors to length 1: scores are cosines instead of dot products."""
    temperature: PositiveFloat = 0.05
    """Divisor of the scores."""

    def check(self, schema: Schema) -> None:
        """Raise a ConfigError as NextItemSection does, or if `time` is set and is not a side feature of the history."""
        super().check(schema)
        self.find_time_index(schema)

    def find_time_index(self, schema: Schema) -> int | None:
        """Return the index of model.time among the history's side features, or None if model.time is null.

        Raises:
            ConfigError: model.time is not one of the history's side features.
        """
        if self.time is None:
            return None
        return find_side_feature(schema, self.history, self.time, "model.time")
