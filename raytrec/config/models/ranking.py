"""Sections of models that read pooled embeddings, such as DLRM, DCN-V2 and DeepFM."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Literal

from pydantic import Field

from raytrec.common.errors import ConfigError
from raytrec.config.base import PositiveFloat, SmallCount
from raytrec.config.models.base import Dropout, ModelSection, OneDimSection, Size, Sizes, match_names, model
from raytrec.config.schema import Schema


@model("dlrm", "raytrec.models.interactions:DLRM")
class DlrmSection(OneDimSection):
    """Dot products of all pairs of embeddings (models/interactions.py)."""

    name: Literal["dlrm"] = "dlrm"
    bottom_mlp: Sizes = Field([128])
    """Hidden sizes of the MLP from the dense columns to their embedding."""
    top_mlp: Sizes = Field([128, 64])
    """Hidden sizes of the MLP from the interactions to the logit."""
    dropout: Dropout = 0.0
    """Dropout in the top MLP during training."""


@model("dcn", "raytrec.models.interactions:DCN")
class DcnSection(ModelSection):
    """Cross layers over all concatenated embeddings: DCN-V2 (models/interactions.py)."""

    name: Literal["dcn"]
    bottom_mlp: Sizes = Field([])
    """Sizes of layers over the dense columns. []: the columns are used unchanged."""
    cross_layers: Annotated[SmallCount, Field(le=1000)] = 3
    """Number of cross layers, applied in sequence."""
    cross_rank: Size | None = None
    """Rank of the product U V that replaces each cross layer's matrix; default: a full matrix."""
    deep: Literal["stacked", "parallel"] = "stacked"
    """stacked: top_mlp reads the output of the cross layers. parallel: top_mlp reads their input, and the
    logit combines both outputs."""
    top_mlp: Sizes = Field([128, 64])
    """Hidden sizes of the deep layers."""
    dropout: Dropout = 0.0
    """Dropout in the top MLP during training."""

    def check(self, schema: Schema) -> None:
        """Raise a ConfigError if bottom_mlp has layers, but the schema has no dense columns for them to read."""
        if self.bottom_mlp and not schema.dense:
            raise ConfigError(
                f"model.bottom_mlp is {self.bottom_mlp}, but the schema has no dense columns",
                where="model.bottom_mlp",
                expected="[] if the schema has no dense columns",
                do="set model.bottom_mlp=[]",
            )


def _check_first_order(schema: Schema, model: str, tasks: Mapping[str, int], features: Collection[str]) -> None:
    """Check that a table row has room for one first-order weight per logit column and a vector.

    Args:
        schema: Schema of the run.
        model: Name of the model, for errors.
        tasks: Task → number of its logit columns.
        features: Features with first-order weights.

    Raises:
        ConfigError: The dim of a table is not larger than the number of outputs.
    """
    outputs = sum(tasks.values())
    for feature in features:
        table = schema.sparse[feature].table
        if (dim := schema.tables[table].dim) <= outputs:
            raise ConfigError(
                f"table {table} has dim {dim}, but the tasks have {outputs} columns of logits",
                where="schema.yaml, tables",
                expected=f"a dim above {outputs}, because in {model}, a row contains a first-order weight for each "
                "column of logits and the vector of the id",
                do=f"give {table}, and any other table whose dim is too small, a dim of {(outputs // 4 + 1) * 4}",
            )


Names = Annotated[list[str], Field(min_length=1)]


@model("wide_deep", "raytrec.models.first_order:WideDeep")
class WideDeepSection(ModelSection):
    """A linear model of ids and columns, and an MLP over their embeddings."""

    name: Literal["wide_deep"]
    wide: Names = Field(["*"])
    """Sparse features and dense columns (or patterns) of the linear part, such as crosses of columns."""
    deep: Names = Field(["*"])
    """Sparse features and dense columns (or patterns) of the MLP. Each name must be in wide, deep or both."""
    cross_layers: Annotated[SmallCount, Field(le=1000)] | Literal[0] = 0
    """Number of DCN-V2 cross layers before the MLP."""
    top_mlp: Sizes = Field([128, 64])
    """Hidden sizes of the MLP."""
    dropout: Dropout = 0.0
    """Dropout in the MLP during training."""
    deep_dropout: Dropout = 0.0
    """Share of training rows whose logit comes only from the linear part. If above 0, held-out rows
    (data.valid or data.holdout) determine after training how much of the deep part is kept."""
    slope_rate: PositiveFloat = 1.0
    """Factor by which the learning rate of the dense columns' weights in the linear part is multiplied."""

    def check(self, schema: Schema) -> None:
        """Raise a ConfigError unless each pattern matches, and each feature and column is in the wide or deep part."""
        self.parts(schema)

    def check_tasks(self, schema: Schema, tasks: Mapping[str, int]) -> None:
        """Raise a ConfigError unless the tables of wide features have room for first-order weights."""
        wide = self.parts(schema)["wide"]
        _check_first_order(schema, self.name, tasks, [f for f in schema.sparse if f in wide])

    def parts(self, schema: Schema) -> dict[str, set[str]]:
        """Return {"wide": …, "deep": …}, the features and dense columns of each part.

        Raises:
            ConfigError: A pattern matches nothing, or a feature is in neither part.
        """
        names = [*schema.dense, *schema.sparse]
        parts = {part: match_names(getattr(self, part), names, f"model.{part}") for part in ("wide", "deep")}
        if neither := set(names) - parts["wide"] - parts["deep"]:
            raise ConfigError(
                f"neither model.wide nor model.deep contains {', '.join(sorted(neither))}",
                where="model.wide, model.deep",
                expected="each feature and dense column in wide, deep or both",
                do="add the names to model.wide or model.deep, or remove them from the schema",
            )
        return parts


class FirstOrderSection(OneDimSection):
    """Section of a model with first-order weights, products of vectors, and an MLP over the same vectors."""

    top_mlp: Sizes = Field([128, 64])
    """Hidden sizes of the MLP."""
    dropout: Dropout = 0.0
    """Dropout in the MLP during training."""

    def check_tasks(self, schema: Schema, tasks: Mapping[str, int]) -> None:
        """Raise a ConfigError unless the tables have room for first-order weights."""
        _check_first_order(schema, self.name, tasks, schema.sparse)


@model("deepfm", "raytrec.models.first_order:DeepFM")
class DeepFMSection(FirstOrderSection):
    """A factorization machine, and an MLP over the same vectors."""

    name: Literal["deepfm"]


@model("xdeepfm", "raytrec.models.first_order:XDeepFM")
class XDeepFMSection(FirstOrderSection):
    """A compressed interaction network, an MLP and a linear model."""

    name: Literal["xdeepfm"]
    cin: Annotated[Sizes, Field(min_length=1)] = Field([32, 32])
    """Number of feature maps in each layer of the compressed interaction network. Layer k contains products
    of k + 1 features."""


Stream = Annotated[Sizes, Field(min_length=1)]


@model("final_mlp", "raytrec.models.gates:FinalMLP")
class FinalMLPSection(ModelSection):
    """Two MLPs over gated inputs, whose outputs a bilinear form combines (models/gates.py)."""

    name: Literal["final_mlp"]
    mlp1: Stream = Field([128, 64])
    """Sizes of the first stream's layers."""
    mlp2: Stream = Field([128, 64])
    """Sizes of the second stream's layers."""
    gating: bool = True
    """Weight the inputs of each stream (feature selection in the paper)."""
    gate1: list[str] = Field([])
    """Sparse features and dense columns (or patterns), such as the user's, from which the input weights of
    the first stream are computed. []: weights are the same for all rows."""
    gate2: list[str] = Field([])
    """Sparse features and dense columns (or patterns) for the second stream, such as the item's; see gate1."""
    gate_mlp: Sizes = Field([64])
    """Hidden sizes of the network that computes the weights."""
    heads: SmallCount = 1
    """Number of equal parts of the streams, each with its own bilinear form."""
    dropout: Dropout = 0.0
    """Dropout in both streams during training."""

    def check(self, schema: Schema) -> None:
        """Check the gates and the heads.

        Raises:
            ConfigError: gate1 or gate2 is set without gating, a pattern in them matches nothing, or the last size of
                mlp1 or mlp2 is not a multiple of the heads.
        """
        if not self.gating and (self.gate1 or self.gate2):
            raise ConfigError(
                f"model.{'gate1' if self.gate1 else 'gate2'} is set, but model.gating is false",
                where="model.gating",
                expected="gating: true, or neither gate1 nor gate2",
                do="set model.gating=true",
            )
        for stream in ("gate1", "gate2"):
            self.context(schema, stream)
        for name, sizes in (("mlp1", self.mlp1), ("mlp2", self.mlp2)):
            if sizes[-1] % self.heads:
                raise ConfigError(
                    f"the last size of model.{name}, {sizes[-1]}, is not a multiple of model.heads={self.heads}",
                    where=f"model.{name}, model.heads",
                    expected=f"a last size that is a multiple of {self.heads}",
                    do=f"set the last size of model.{name} to {-(-sizes[-1] // self.heads) * self.heads}",
                )

    def context(self, schema: Schema, stream: str) -> set[str]:
        """Return the features and dense columns that compute a stream's input weights; `stream` is gate1 or gate2.

        Raises:
            ConfigError: A pattern matches nothing.
        """
        return match_names(getattr(self, stream), [*schema.dense, *schema.sparse], f"model.{stream}")


@model("masknet", "raytrec.models.gates:MaskNet")
class MaskNetSection(OneDimSection):
    """Layers whose inputs are multiplied by masks computed from each row's embeddings (models/gates.py)."""

    name: Literal["masknet"]
    arrangement: Literal["parallel", "serial"] = "parallel"
    """parallel: all blocks read the embeddings. serial: each block reads the output of the previous block."""
    blocks: Annotated[Sizes, Field(min_length=1)] = Field([64, 64])
    """Output width of each mask block."""
    reduction: PositiveFloat = 2.0
    """Hidden width of a block's mask network, as a multiple of the mask's width."""
    top_mlp: Sizes = Field([64])
    """Hidden sizes of the MLP from the blocks to the logit; [] gives the paper's serial model."""
    dropout: Dropout = 0.0
    """Dropout in the top MLP during training."""


@model("wukong", "raytrec.models.interactions:Wukong")
class WukongSection(OneDimSection):
    """Stacked factorization machines over the vectors of all features (models/interactions.py)."""

    name: Literal["wukong"]
    bottom_mlp: Sizes = Field([128])
    """Hidden sizes of the MLP from the dense columns to their vector."""
    layers: Annotated[SmallCount, Field(le=1000)] = 2
    """Number of interaction layers; layer i models interactions of up to 2^i features."""
    fmb_vectors: Size = 8
    """Number of vectors that a layer's factorization machine block returns."""
    lcb_vectors: Size = 8
    """Number of vectors that a layer's linear compress block returns."""
    rank: Size = 8
    """Number of columns to which the matrix of a layer's dot products is projected."""
    fmb_mlp: Sizes = Field([128])
    """Hidden sizes of the MLP in a factorization machine block."""
    top_mlp: Sizes = Field([128, 64])
    """Hidden sizes of the MLP from the last layer to the logit."""
    dropout: Dropout = 0.0
    """Dropout in the top MLP and the blocks' MLPs during training."""
