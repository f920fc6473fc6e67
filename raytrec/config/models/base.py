"""The base of all model sections, and their registry."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import Field

from raytrec.common.errors import ConfigError, unknown
from raytrec.common.registry import Registry
from raytrec.config.base import Few, NonNegativeFloat, Number, Section
from raytrec.config.schema import Schema

Size = Annotated[int, Field(strict=True, gt=0, le=2**20)]
Sizes = Annotated[list[Size], Field(max_length=1000)]
Lengths = Few | dict[str, Few]  # of all sequences, or of each that is read id by id
Dropout = Annotated[Number, Field(ge=0, lt=1)]


class ModelSection(Section):
    """The `model` section of one model, which is built from (Schema, this section).

    Attributes:
        path: the model's class as module:Class; the module is imported by workers only.
        gives_vectors: whether it can give vectors of query and item, too; None: not known before it is
            made.
        retrieves: whether it has methods `query` and `item`, whose vectors' dot product orders the items for
            a query as its scores do; each reads only the features of its tower (`tower_members`).
        own_loss_of_last: whether its own loss, if it gives one, is of the score that is its last
            output.
    """

    path: ClassVar[str]
    gives_vectors: ClassVar[bool | None] = False
    retrieves: ClassVar[bool] = False
    own_loss_of_last: ClassVar[bool] = False
    name: str
    """The model."""
    lookup_l2: NonNegativeFloat | dict[str, NonNegativeFloat] = 0.0
    """λ of an L2 penalty: λ ÷ 2 · ‖v‖² of every vector v that a row looks up is added to the row's loss; one
    for all tables, or table: λ. Unlike with weight_decay, an id is penalized as often as it is looked up."""

    @property
    def own_loss(self) -> bool:
        """Whether the model gives its own loss: one more column, after its outputs and before vectors,
        of what each row adds to it; 0 in evaluations."""
        return False

    def sequence_lengths(self, schema: Schema) -> dict[str, int]:
        """Sequence features that the model reads id by id → the most ids of each; of others it is given the
        mean."""
        length = getattr(self, "max_length", None)
        found = [f for f, spec in schema.sparse.items() if spec.pooling == "sequence"]
        if isinstance(length, dict):
            return {feature: length[feature] for feature in found if feature in length}
        return dict.fromkeys(found, length) if length else {}

    def l2_factors(self, schema: Schema) -> dict[str, float]:
        """Feature → its λ of lookup_l2, where that is above 0.

        Raises:
            ConfigError: no such table; a feature with weights.
        """
        named = (
            self.lookup_l2
            if isinstance(self.lookup_l2, dict)
            else dict.fromkeys(schema.tables, self.lookup_l2)
        )
        for table in named:
            if table not in schema.tables:
                raise unknown(f"'{table}' is not a table", table, schema.tables, f"model.lookup_l2.{table}")
        found = {f: named[spec.table] for f, spec in schema.sparse.items() if named.get(spec.table)}
        for feature in found:
            if schema.sparse[feature].weights:
                raise ConfigError(
                    f"the ids of {feature} have weights, by which their vectors are multiplied",
                    where="model.lookup_l2",
                    expected="tables whose features have none",
                    do="name the other tables: model.lookup_l2={TABLE: …}, or take weight_decay for this one",
                )
        return found

    def reads_ids(self, schema: Schema) -> list[str]:
        """Features whose ids the model is given, too, next to what they look up (models/inputs.py)."""
        return []

    def tower_members(self, schema: Schema) -> dict[str, set[str]]:
        """query and item → the sparse features and dense columns that its vector is made from; only of one
        that `retrieves`."""
        raise NotImplementedError(self.name)

    def check(self, schema: Schema) -> None:
        """Whether the model can be made for a schema; asked before anything starts, and when it is made.

        Raises:
            ConfigError: it cannot.
        """

    def check_tasks(self, schema: Schema, tasks: Mapping[str, int]) -> None:
        """Whether it can be made for these tasks, too; asked after `check`.

        Args:
            tasks: task → its columns of logits, in the order of the configuration.

        Raises:
            ConfigError: it cannot.
        """


MODELS: Registry[type[ModelSection]] = Registry("model", __package__)
S = TypeVar("S", bound=type[ModelSection])


def model(name: str, path: str) -> Callable[[S], S]:
    """Decorator: registers the section of a model.

    Args:
        name: the value of model.name.
        path: module:Class of the model.
    """

    def register(section: Any) -> Any:
        section.path = path
        return MODELS(name)(section)

    return register


def one_dim(schema: Schema, model: str) -> int:
    """The dim of all tables.

    Raises:
        ConfigError: they have different ones.
    """
    dims = {table.dim for table in schema.tables.values()}
    if len(dims) > 1:
        raise ConfigError(
            f"the tables have dims {', '.join(map(str, sorted(dims)))}",
            where="schema.yaml, tables",
            expected=f"one dim for all tables: {model} stacks their vectors",
            do="give every table the same dim",
        )
    return dims.pop()


class OneDimSection(ModelSection):
    """A model that stacks the vectors of all tables, which therefore have one dim."""

    def check(self, schema: Schema) -> None:
        one_dim(schema, self.name)


def check_same_dim(schema: Schema, features: Sequence[str], expected: str, do: str) -> None:
    """Check that the tables of two features have the same dim.

    Raises:
        ConfigError: The dims differ.
    """
    one, other = features
    dims = [schema.dim_of(feature) for feature in features]
    if dims[0] != dims[1]:
        raise ConfigError(
            f"vectors of {one} have dim {dims[0]}, and those of {other} {dims[1]}",
            where="schema.yaml, tables",
            expected=expected,
            do=do,
        )


def matching(patterns: Sequence[str], names: Sequence[str], where: str) -> set[str]:
    """The features and dense columns that patterns such as 'user*' name.

    Args:
        where: the configuration's key, for errors.

    Raises:
        ConfigError: a pattern that matches nothing.
    """
    found: set[str] = set()
    for pattern in patterns:
        of_pattern = {name for name in names if fnmatchcase(name, pattern)}
        if not of_pattern:
            what = f"no feature or dense column is named, or matches, '{pattern}'"
            raise unknown(what, pattern, names, where, f"names or patterns of {', '.join(names)}")
        found |= of_pattern
    return found


def check_lengths(schema: Schema, config: ModelSection) -> None:
    """Looks whether the features that model.max_length names are sequences.

    Raises:
        ConfigError: one is not.
    """
    lengths = getattr(config, "max_length", None)
    known = [feature for feature, spec in schema.sparse.items() if spec.pooling == "sequence"]
    for name in lengths if isinstance(lengths, dict) else ():
        if name not in known:
            expected = f"features of pooling: sequence, of {', '.join(known) or 'which there are none'}"
            raise unknown(
                f"'{name}' is not a sequence feature", name, known, f"model.max_length.{name}", expected
            )


def feature_of(schema: Schema, feature: str, key: str, *, sequence: bool = False) -> None:
    """Looks whether a feature can be read as a key wants it.

    Args:
        key: that names it: model.item.
        sequence: whether it has to be one that is read id by id.

    Raises:
        ConfigError: it cannot.
    """
    if feature not in schema.sparse:
        raise unknown(f"'{feature}' is not a feature", feature, schema.sparse, key)
    pooling = schema.sparse[feature].pooling
    if sequence and pooling != "sequence":
        raise ConfigError(
            f"'{feature}' is pooled by its {pooling}, and is to be read id by id",
            where=f"schema.yaml, sparse.{feature}.pooling",
            expected="sequence",
            do=f"set pooling: sequence on {feature}, or name another feature",
        )


def side_feature_place(schema: Schema, feature: str, column: str, where: str) -> int:
    """Which of a feature's side features a column is.

    Args:
        where: the configuration's key, for errors.

    Raises:
        ConfigError: none.
    """
    columns = schema.sparse[feature].side_features
    if column not in columns:
        expected = f"a side feature of {feature}: {', '.join(columns) or 'there are none'}"
        do = f"set side_features: [{column}] on {feature} in schema.yaml"
        raise unknown(f"'{column}' is not a side feature of {feature}", column, columns, where, expected, do)
    return columns.index(column)


def same_table(schema: Schema, feature: str, item: str, key: str) -> None:
    """Looks whether a feature's ids are those of the item.

    Raises:
        ConfigError: they look up different tables.
    """
    tables = schema.sparse[feature].table, schema.sparse[item].table
    if tables[0] != tables[1]:
        raise ConfigError(
            f"'{feature}' looks up table {tables[0]}, and '{item}' table {tables[1]}",
            where=key,
            expected="one table: their ids are of the same things, whose vectors are compared",
            do=f"set table: {tables[1]} on {feature}, or name another feature",
        )
