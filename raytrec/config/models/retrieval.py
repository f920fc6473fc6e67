"""Models of a query and an item."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from raytrec.common.errors import ConfigError
from raytrec.config.base import Few, NonNegativeInt, Number, PositiveFloat, Section
from raytrec.config.models.base import (
    Dropout,
    ModelSection,
    Sizes,
    check_same_dim,
    feature_of,
    matching,
    model,
    same_table,
    side_feature_place,
)
from raytrec.config.schema import Schema


class SampledSection(ModelSection):
    """A model that can hold each row's item against others, drawn for it (models/parts/sampled.py)."""

    own_loss_of_last: ClassVar[bool] = True
    negatives: str | None = None
    """A feature of ids that a row's item is held against, such as data.transforms makes by do: sample: the
    model's own loss (tasks: [{loss: from_model}]); default: it has none."""
    max_negatives: Few = 100
    """The most ids of `negatives` that are read of a row; what is not there is padded."""
    loss: Literal["softmax", "bce", "bpr"] = "softmax"
    """What is learned from an item and its negatives: cross-entropy of the softmax over all of them; binary
    cross-entropy of each; or that it has a higher score than they, pair by pair."""
    share_negatives: bool = False
    """A row's item is held against the negatives of all rows of the global batch, those that are the item
    itself aside."""
    log_share: str | None = None
    """With share_negatives and loss: softmax, the side feature of `negatives` that a score is reduced by: do:
    sample writes it of draws by frequency, so that the loss is about that of uniform ones."""
    gbce: Annotated[Number, Field(ge=0, le=1)] = 0.0
    """With loss: bce, how far scores are log-odds of an item among all, from 0 to 1 (gBCE); with few
    negatives of many items they are too high otherwise."""

    @property
    def own_loss(self) -> bool:
        return self.negatives is not None

    def sequence_lengths(self, schema: Schema) -> dict[str, int]:
        """Negatives are read id by id."""
        return {} if self.negatives is None else {self.negatives: self.max_negatives}

    def check_negatives(self, schema: Schema, item: str) -> None:
        """Holds `negatives` to the item's feature.

        Raises:
            ConfigError: there is no such sequence, or it looks up another table.
        """
        if self.negatives is not None:
            feature_of(schema, self.negatives, "model.negatives", sequence=True)
            same_table(schema, self.negatives, item, "model.negatives")
        self.check_own_loss()
        self.log_share_place(schema)

    def log_share_place(self, schema: Schema) -> int | None:
        """Which of the negatives' side features log_share is; None: scores are as they are.

        Raises:
            ConfigError: none.
        """
        if self.log_share is None or self.negatives is None:
            return None
        return side_feature_place(schema, self.negatives, self.log_share, "model.log_share")

    def check_own_loss(self) -> None:
        """Looks whether there is a loss that share_negatives, log_share and gbce can change.

        Raises:
            ConfigError: there is none.
        """
        shared = self.negatives is not None and self.share_negatives
        for key, needed, there in (
            ("share_negatives", "model.negatives", self.negatives is not None),
            ("log_share", "model.share_negatives and model.loss=softmax", shared and self.loss == "softmax"),
            ("gbce", "model.negatives and model.loss=bce", self.negatives is not None and self.loss == "bce"),
        ):
            if getattr(self, key) and not there:
                raise ConfigError(
                    f"model.{key} is set without {needed}",
                    where=f"model.{key}",
                    expected=needed,
                    do=f"set {needed}, or leave {key} out",
                )

    def _with_ids(self, *features: str) -> list[str]:
        """These and the negatives, where a row's item has to be distinguished from those of other rows."""
        if not self.share_negatives or self.negatives is None:
            return []
        return [*features, self.negatives]


class PairSection(SampledSection):
    """A model of a user and an item."""

    user: str = "user"
    """The feature of who asks."""
    item: str = "item"
    """The feature of what is recommended."""

    def check(self, schema: Schema) -> None:
        feature_of(schema, self.user, "model.user")
        feature_of(schema, self.item, "model.item")
        self.check_negatives(schema, self.item)


@model("mf", "raytrec.models.pairs:MatrixFactorization")
class MfSection(PairSection):
    """The dot product of a user's and an item's embedding."""

    gives_vectors: ClassVar[bool | None] = True
    retrieves: ClassVar[bool] = True
    name: Literal["mf"]
    bias: bool = True
    """The last number of each embedding is the user's or the item's bias, no factor."""

    def check(self, schema: Schema) -> None:
        super().check(schema)
        expected = "one dim: mf takes dot products between them"
        check_same_dim(schema, (self.user, self.item), expected, "give both tables the same dim")

    def reads_ids(self, schema: Schema) -> list[str]:
        return self._with_ids(self.item)

    def tower_members(self, schema: Schema) -> dict[str, set[str]]:
        return {"query": {self.user}, "item": {self.item}}


@model("ncf", "raytrec.models.pairs:NeuMF")
class NcfSection(PairSection):
    """Products of a user's and an item's embeddings, and an MLP over them: NeuMF."""

    name: Literal["ncf"]
    gmf_dim: NonNegativeInt | None = None
    """The first so many numbers of each embedding are for the products, the others for the MLP; 0: an MLP
    alone; all: products alone. Default: half of them."""
    shared: bool = False
    """Products and MLP read the whole of the same embeddings; without gmf_dim."""
    mlp: Annotated[Sizes, Field(min_length=1)] = Field([64, 32, 16])
    """Sizes of the MLP's layers."""
    dropout: Dropout = 0.0
    """Dropout in the MLP while training."""

    def check(self, schema: Schema) -> None:
        super().check(schema)
        self.widths(schema)
        if self.share_negatives:
            raise ConfigError(
                "ncf puts user and item through an MLP together",
                where="model.share_negatives",
                expected="a model whose scores are dot products, which can be taken of many rows at once",
                do="leave share_negatives out, or take mf or two_tower",
            )

    def widths(self, schema: Schema) -> tuple[int, int, int]:
        """How many numbers the products have, and how many of user and item the MLP reads.

        Raises:
            ConfigError: the products would have different ones of user and item.
        """
        dims = [schema.dim_of(feature) for feature in (self.user, self.item)]
        if self.shared and self.gmf_dim is not None:
            raise ConfigError(
                f"model.shared is true, and model.gmf_dim is {self.gmf_dim}",
                where="model.gmf_dim",
                expected="one of the two: embeddings are shared, or parted",
                do="leave gmf_dim out, or set model.shared=false",
            )
        if self.shared:
            expected, do = (
                "one dim: model.shared takes products of whole vectors",
                "change a dim, or set gmf_dim",
            )
            check_same_dim(schema, (self.user, self.item), expected, do)
            return dims[0], dims[0], dims[1]
        products = min(dims) // 2 if self.gmf_dim is None else self.gmf_dim
        if products > min(dims):
            raise ConfigError(
                f"embeddings of {self.user} have {dims[0]} numbers, those of {self.item} {dims[1]}",
                where="schema.yaml, tables; model.gmf_dim",
                expected=f"{products} of each for their products",
                do="change the tables' dims, or set model.gmf_dim",
            )
        return products, dims[0] - products, dims[1] - products


class Towers(Section):
    query: list[str] = Field(min_length=1)
    """Sparse features and dense columns (or patterns) of who or what asks."""
    item: list[str] = Field(min_length=1)
    """Those of what is recommended."""

    def members(self, names: list[str]) -> dict[str, set[str]]:
        """query and item → those of some features and dense columns that their patterns name.

        Raises:
            ConfigError: a pattern that matches nothing.
        """
        return {
            tower: matching(getattr(self, tower), names, f"model.towers.{tower}")
            for tower in ("query", "item")
        }


@model("two_tower", "raytrec.models.pairs:TwoTower")
class TwoTowerSection(SampledSection):
    """One vector for the query, one for the item, and their dot product (models/pairs.py)."""

    gives_vectors: ClassVar[bool | None] = True
    retrieves: ClassVar[bool] = True
    name: Literal["two_tower"]
    towers: Towers
    """Which features belong to which tower: each to one. Patterns as 'user*'."""
    tower_mlp: Annotated[Sizes, Field(min_length=1)] = Field([128, 64])
    """Sizes of each tower's layers; the last is the width of its vectors."""
    normalize: bool = False
    """Vectors of length 1: retrieval by cosine instead of by dot product."""
    temperature: PositiveFloat | None = None
    """What scores are divided by, at first if it is learned; default: 0.2 of cosines, of dot products the
    root of the vectors' width."""
    learn_temperature: bool = True
    """The temperature is learned, or stays what it is."""
    dropout: Dropout = 0.0
    """Dropout after each tower's hidden layers while training."""

    def check(self, schema: Schema) -> None:
        of_item = self.members(schema)["item"]
        if self.negatives is None:
            return self.check_own_loss()
        if len(of_item) > 1 or not of_item <= set(schema.sparse):
            raise ConfigError(
                f"the item tower reads {', '.join(sorted(of_item))}, and of negatives only ids are known",
                where="model.towers.item, model.negatives",
                expected="one sparse feature in the item tower, whose ids negatives are",
                do="leave negatives out: in_batch_softmax needs none, or leave the other features out",
            )
        self.check_negatives(schema, *of_item)

    def reads_ids(self, schema: Schema) -> list[str]:
        return self._with_ids(*self.members(schema)["item"])

    def tower_members(self, schema: Schema) -> dict[str, set[str]]:
        return self.members(schema)

    def members(self, schema: Schema) -> dict[str, set[str]]:
        """Tower → its features and columns; each name of the schema but the negatives is in one.

        Raises:
            ConfigError: a feature of no or of two towers; a pattern that matches nothing.
        """
        names = [name for name in [*schema.dense, *schema.sparse] if name != self.negatives]
        found = self.towers.members(names)
        both = found["query"] & found["item"]
        neither = set(names) - found["query"] - found["item"]
        if both or neither:
            what, which = ("both towers", both) if both else ("neither tower", neither)
            raise ConfigError(
                f"in {what}: {', '.join(sorted(which))}",
                where="model.towers",
                expected="each feature and dense column in one tower: a query's vector knows nothing of the "
                "item",
                do="name it under query or item, or leave it out of the schema",
            )
        return found
