"""Sections of models that score an item for a query."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from raytrec.common.errors import ConfigError
from raytrec.config.base import NonNegativeInt, Number, PositiveFloat, Section, SmallCount
from raytrec.config.models.base import (
    Dropout,
    ModelSection,
    Sizes,
    check_feature,
    check_same_dim,
    check_same_table,
    find_side_feature,
    match_names,
    model,
)
from raytrec.config.schema import Schema


class SampledSection(ModelSection):
    """Section of a model that can compare each row's item with negatives drawn for the row."""

    own_loss_of_last: ClassVar[bool] = True
    negatives: str | None = None
    """Feature whose ids a row's item is compared with, such as a column written by do: sample in data.transforms.
    Enables the model's own loss (tasks: [{loss: from_model}]); default: the model has no such loss."""
    max_negatives: SmallCount = 100
    """Maximum number of ids of `negatives` per row; shorter lists are padded."""
    loss: Literal["softmax", "bce", "bpr"] = "softmax"
    """Loss of an item and its negatives. softmax: cross-entropy of the softmax over all of them. bce: sum of the
    binary cross-entropies of the item (label 1) and each negative (label 0). bpr: mean of the pairwise losses that
    favor a higher score of the item than of each negative."""
    share_negatives: bool = False
    """Compare a row's item with the negatives of all rows of the global batch, except negatives that equal the item."""
    log_share: str | None = None
    """Side feature of `negatives` that is subtracted from scores, with share_negatives and loss: softmax. do:
    sample writes this column for draws by frequency; the loss then corresponds to uniform draws."""
    gbce: Annotated[Number, Field(ge=0, le=1)] = 0.0
    """Strength, from 0 to 1, of gBCE's calibration of scores as log-odds of an item among all items; requires
    loss: bce. Without calibration, scores are too high if few negatives are drawn from many items."""

    def sequence_lengths(self, schema: Schema) -> dict[str, int]:
        """Return {negatives: max_negatives}, because negatives are read id by id; {} if `negatives` is not set."""
        return {} if self.negatives is None else {self.negatives: self.max_negatives}

    def check_negatives(self, schema: Schema, item: str) -> None:
        """Check the keys of the model's own loss, and that `negatives`, if set, is a sequence over the item's table.

        Raises:
            ConfigError: The feature does not exist, is not a sequence or looks up another table; share_negatives,
                log_share or gbce is set without a loss that uses the key; or log_share is not one of the feature's
                side features.
        """
        has_negatives = self.negatives is not None
        if has_negatives:
            check_feature(schema, self.negatives, "model.negatives", sequence=True)
            check_same_table(schema, self.negatives, item, "model.negatives")
        is_softmax = has_negatives and self.share_negatives and self.loss == "softmax"
        for key, needed, is_met in (
            ("share_negatives", "model.negatives", has_negatives),
            ("log_share", "model.share_negatives and model.loss=softmax", is_softmax),
            ("gbce", "model.negatives and model.loss=bce", has_negatives and self.loss == "bce"),
        ):
            if getattr(self, key) and not is_met:
                what, do = f"model.{key} is set without {needed}", f"set {needed}, or remove {key}"
                raise ConfigError(what, where=f"model.{key}", expected=needed, do=do)
        self.find_log_share_index(schema)

    def find_log_share_index(self, schema: Schema) -> int | None:
        """Return the index of log_share among the negatives' side features, or None if scores are not corrected.

        Raises:
            ConfigError: The column is not a side feature of the negatives.
        """
        if self.log_share is None or self.negatives is None:
            return None
        return find_side_feature(schema, self.negatives, self.log_share, "model.log_share")

    def _with_ids(self, *features: str) -> list[str]:
        """Return `features` and model.negatives if rows share their negatives, else []."""
        if not self.share_negatives or self.negatives is None:
            return []
        return [*features, self.negatives]


class PairSection(SampledSection):
    """Section of a model that scores an item for a user."""

    user: str = "user"
    """Feature of the user."""
    item: str = "item"
    """Feature of the recommended item."""

    def check(self, schema: Schema) -> None:
        """Raise a ConfigError unless the user and item features exist and `check_negatives` succeeds."""
        check_feature(schema, self.user, "model.user")
        check_feature(schema, self.item, "model.item")
        self.check_negatives(schema, self.item)


@model("mf", "raytrec.models.pairs:MatrixFactorization")
class MfSection(PairSection):
    """Dot product of the embeddings of a user and an item."""

    gives_vectors: ClassVar[bool | None] = True
    retrieves: ClassVar[bool] = True
    name: Literal["mf"]
    bias: bool = True
    """Use the last element of each embedding as the bias of the user or item, not as a factor."""

    def check(self, schema: Schema) -> None:
        """Raise a ConfigError as PairSection does, or if the user and item tables have different dims."""
        super().check(schema)
        expected = "the same dim for both tables, because mf computes their dot products"
        check_same_dim(schema, (self.user, self.item), expected, "give both tables the same dim")

    def reads_ids(self, schema: Schema) -> list[str]:
        """Return the item and the negatives if negatives are shared, else []."""
        return self._with_ids(self.item)

    def tower_members(self, schema: Schema) -> dict[str, set[str]]:
        """Return the feature of each tower: the user for the query tower, and the item for the item tower."""
        return {"query": {self.user}, "item": {self.item}}


@model("ncf", "raytrec.models.pairs:NeuMF")
class NcfSection(PairSection):
    """Products of the embeddings of a user and an item, and an MLP over the embeddings: NeuMF."""

    name: Literal["ncf"]
    gmf_dim: NonNegativeInt | None = None
    """Number of leading elements of each embedding that are used for the products; the others are used for
    the MLP. 0: MLP only. All elements: products only. Default: half of the smaller dim."""
    shared: bool = False
    """Use the whole embeddings for both products and MLP; cannot be combined with gmf_dim."""
    mlp: Annotated[Sizes, Field(min_length=1)] = Field([64, 32, 16])
    """Sizes of the MLP's layers."""
    dropout: Dropout = 0.0
    """Dropout in the MLP during training."""

    def check(self, schema: Schema) -> None:
        """Raise a ConfigError as PairSection and `widths` do, or if share_negatives is set."""
        super().check(schema)
        self.widths(schema)
        if self.share_negatives:
            raise ConfigError(
                "ncf does not support share_negatives, because its MLP reads user and item together",
                where="model.share_negatives",
                expected="a model whose scores are dot products, which can be computed for many rows at once",
                do="remove share_negatives, or use the model mf or two_tower",
            )

    def widths(self, schema: Schema) -> tuple[int, int, int]:
        """Return (width of the products, width of the user vector for the MLP, width of the item vector for the MLP).

        Raises:
            ConfigError: gmf_dim is larger than a table's dim or set together with shared, or the dims differ with
                shared.
        """
        dims = [schema.get_feature_dim(feature) for feature in (self.user, self.item)]
        if self.shared and self.gmf_dim is not None:
            raise ConfigError(
                f"model.shared is true, but model.gmf_dim is {self.gmf_dim}",
                where="model.gmf_dim",
                expected="either model.shared or model.gmf_dim, because embeddings are either shared or split",
                do="remove gmf_dim, or set model.shared=false",
            )
        if self.shared:
            expected = "the same dim for both tables, because model.shared multiplies whole vectors"
            check_same_dim(schema, (self.user, self.item), expected, "change a dim, or set model.shared=false")
            return dims[0], dims[0], dims[1]
        products = min(dims) // 2 if self.gmf_dim is None else self.gmf_dim
        if products > min(dims):
            raise ConfigError(
                f"gmf_dim is {products}, but {self.user} has dim {dims[0]} and {self.item} has dim {dims[1]}",
                where="schema.yaml, tables; model.gmf_dim",
                expected=f"a dim of at least {products} (model.gmf_dim) for both tables",
                do="increase the tables' dims, or lower model.gmf_dim",
            )
        return products, dims[0] - products, dims[1] - products


class Towers(Section):
    """Features and dense columns of the query and item towers."""

    query: list[str] = Field(min_length=1)
    """Sparse features and dense columns (or patterns) of the query, such as the user's."""
    item: list[str] = Field(min_length=1)
    """Sparse features and dense columns (or patterns) of the recommended item."""

    def members(self, names: list[str]) -> dict[str, set[str]]:
        """Return the features and dense columns among `names` that match the patterns of each tower.

        Raises:
            ConfigError: A pattern matches nothing.
        """
        return {tower: match_names(getattr(self, tower), names, f"model.towers.{tower}") for tower in ("query", "item")}


@model("two_tower", "raytrec.models.pairs:TwoTower")
class TwoTowerSection(SampledSection):
    """One vector for the query, one for the item, and their dot product (models/pairs.py)."""

    gives_vectors: ClassVar[bool | None] = True
    retrieves: ClassVar[bool] = True
    name: Literal["two_tower"]
    towers: Towers
    """Features of each tower, as names or patterns such as 'user*'. Each feature belongs to exactly one tower."""
    tower_mlp: Annotated[Sizes, Field(min_length=1)] = Field([128, 64])
    """Sizes of each tower's layers; the last size is the width of the tower's vectors."""
    normalize: bool = False
    """Normalize vectors to length 1: retrieval by cosine instead of dot product."""
    temperature: PositiveFloat | None = None
    """Divisor of the scores, or its initial value if learned; default: 0.2 for cosines, the square root of
    the vectors' width for dot products."""
    learn_temperature: bool = True
    """Learn the temperature instead of keeping it constant."""
    dropout: Dropout = 0.0
    """Dropout after each tower's hidden layers during training."""

    def check(self, schema: Schema) -> None:
        """Check the towers and the negatives.

        Raises:
            ConfigError: As for `tower_members` and `check_negatives`; or negatives are set, but the item tower does not
                consist of a single sparse feature.
        """
        of_item = self.tower_members(schema)["item"]
        if self.negatives is not None and (len(of_item) > 1 or not of_item <= set(schema.sparse)):
            raise ConfigError(
                f"the item tower reads {', '.join(sorted(of_item))}, but only the ids of negatives are known",
                where="model.towers.item, model.negatives",
                expected="a single sparse feature in the item tower, with the same ids as the negatives",
                do="remove negatives (in_batch_softmax needs none), or leave only such a feature in the item tower",
            )
        self.check_negatives(schema, next(iter(of_item)))

    def reads_ids(self, schema: Schema) -> list[str]:
        """Return the features of the item tower and the negatives if negatives are shared, else [].

        Raises:
            ConfigError: As for `tower_members`.
        """
        return self._with_ids(*self.tower_members(schema)["item"])

    def tower_members(self, schema: Schema) -> dict[str, set[str]]:
        """Return {"query": …, "item": …}, the features and dense columns of each tower, without the negatives.

        Raises:
            ConfigError: A feature is in neither or both towers, or a pattern matches nothing.
        """
        names = [name for name in [*schema.dense, *schema.sparse] if name != self.negatives]
        towers = self.towers.members(names)
        both = towers["query"] & towers["item"]
        neither = set(names) - towers["query"] - towers["item"]
        if both or neither:
            what, which = ("both towers contain", both) if both else ("neither tower contains", neither)
            raise ConfigError(
                f"{what} {', '.join(sorted(which))}",
                where="model.towers",
                expected="each feature and dense column in one tower, because a query's vector does not "
                "depend on the item",
                do="list each name under either query or item, or remove it from the schema",
            )
        return towers
