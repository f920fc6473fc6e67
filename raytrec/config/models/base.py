"""Base class and registry of model sections, and checks shared by several sections."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import Field

from raytrec.common.errors import ConfigError, make_unknown_word_error
from raytrec.common.registry import Registry
from raytrec.config.base import NonNegativeFloat, Number, Section, SmallCount
from raytrec.config.schema import Schema

Size = Annotated[int, Field(strict=True, gt=0, le=2**20)]
Sizes = Annotated[list[Size], Field(max_length=1000)]
Lengths = SmallCount | dict[str, SmallCount]  # one for all sequences, or one for each sequence read id by id
Dropout = Annotated[Number, Field(ge=0, lt=1)]


class ModelSection(Section):
    """Base class of `model` sections, from which models are built (contract: raytrec/models/__init__.py).

    Attributes:
        path: Class of the model as module:Class; only workers import the module.
        gives_vectors: True if the model can also return query and item vectors; None if unknown until the model
            is built.
        retrieves: True if the model defines methods `query` and `item`. The dot products of their vectors rank the
            items of a query as the model's scores do. Each vector depends only on the features of its tower
            (`tower_members`).
        own_loss_of_last: True if the model's own loss, if any, refers to the score in its last output column.
    """

    path: ClassVar[str]
    gives_vectors: ClassVar[bool | None] = False
    retrieves: ClassVar[bool] = False
    own_loss_of_last: ClassVar[bool] = False
    name: str
    """Name of the model."""
    lookup_l2: NonNegativeFloat | dict[str, NonNegativeFloat] = 0.0
    """Factor λ of an L2 penalty for all tables, or a mapping {table: λ}. Each row's loss includes λ ÷ 2 · ‖v‖² for
    every vector v that the row looks up. Unlike with weight_decay, an id is penalized once per lookup."""

    @property
    def own_loss(self) -> bool:
        """Return True if the model returns its own loss, which models with the key `negatives` do if it is set.

        An additional column, after the outputs and before any vectors, contains each row's share of the loss;
        the share is 0 in evaluations.
        """
        return getattr(self, "negatives", None) is not None

    def sequence_lengths(self, schema: Schema) -> dict[str, int]:
        """Return a mapping from sequence feature to maximum number of ids, for features that the model reads id by id.

        Other sequence features are averaged.
        """
        length = getattr(self, "max_length", None)
        sequences = [f for f, spec in schema.sparse.items() if spec.pooling == "sequence"]
        if isinstance(length, dict):
            return {feature: length[feature] for feature in sequences if feature in length}
        return dict.fromkeys(sequences, length) if length else {}

    def l2_factors(self, schema: Schema) -> dict[str, float]:
        """Return a mapping from feature to the λ of `lookup_l2`, for features with λ > 0.

        Raises:
            ConfigError: A table does not exist, or one of these features has weights.
        """
        factors = self.lookup_l2 if isinstance(self.lookup_l2, dict) else dict.fromkeys(schema.tables, self.lookup_l2)
        for table in factors:
            if table not in schema.tables:
                where = f"model.lookup_l2.{table}"
                raise make_unknown_word_error(f"'{table}' is not a table", table, schema.tables, where)
        result = {f: factors[spec.table] for f, spec in schema.sparse.items() if factors.get(spec.table)}
        for feature in result:
            if schema.sparse[feature].weights:
                raise ConfigError(
                    f"the ids of {feature} have weights, which lookup_l2 does not support",
                    where="model.lookup_l2",
                    expected="tables whose features have no weights",
                    do="list only other tables in model.lookup_l2={TABLE: …}, or use optim.embeddings.weight_decay",
                )
        return result

    def reads_ids(self, schema: Schema) -> list[str]:
        """Return the sparse features whose ids the model reads in addition to embeddings (models/inputs.py)."""
        return []

    def tower_members(self, schema: Schema) -> dict[str, set[str]]:
        """Return the sparse features and dense columns on which the vector of each tower (query and item) depends.

        Only models with `retrieves` implement this method; of other models, it raises NotImplementedError.
        """
        raise NotImplementedError(self.name)

    def request_members(self, schema: Schema) -> set[str]:
        """Return the features and dense columns that the model encodes once per request instead of per candidate.

        Raises:
            ConfigError: Their names in the section are invalid for this schema; `check` reports the same error.
        """
        return self.tower_members(schema)["query"] if self.retrieves else set()

    def check(self, schema: Schema) -> None:
        """Check that the model can be built for a schema.

        This method is called before a run starts and when the model is built.

        Raises:
            ConfigError: The model cannot be built for this schema.
        """

    def check_tasks(self, schema: Schema, tasks: Mapping[str, int]) -> None:
        """Check that the model can be built for these tasks. Called after `check`.

        Args:
            schema: Schema of the run.
            tasks: Task → number of its logit columns, in the order of the configuration.

        Raises:
            ConfigError: The model cannot be built for these tasks.
        """


MODELS: Registry[type[ModelSection]] = Registry("model", __package__)
S = TypeVar("S", bound=type[ModelSection])


def model(name: str, path: str) -> Callable[[S], S]:
    """Return a class decorator that registers a model's section in MODELS.

    Args:
        name: Value of model.name.
        path: Class of the model as module:Class.
    """

    def register(section: Any) -> Any:
        section.path = path
        return MODELS(name)(section)

    return register


def get_common_dim(schema: Schema, model: str) -> int:
    """Return the dim that all tables share; `model` is the model's name, for errors.

    Raises:
        ConfigError: The tables have different dims.
    """
    dims = {table.dim for table in schema.tables.values()}
    if len(dims) > 1:
        raise ConfigError(
            f"the tables have different dims {', '.join(map(str, sorted(dims)))}",
            where="schema.yaml, tables",
            expected=f"the same dim for all tables, because {model} stacks their vectors",
            do="give every table the same dim",
        )
    return dims.pop()


class OneDimSection(ModelSection):
    """Section of a model that stacks the vectors of all tables, which must therefore have the same dim."""

    def check(self, schema: Schema) -> None:
        """Raise a ConfigError unless all tables have the same dim."""
        get_common_dim(schema, self.name)


def check_same_dim(schema: Schema, features: Sequence[str], expected: str, do: str) -> None:
    """Check that the tables of two features have the same dim.

    Args:
        schema: Schema of the run.
        features: Names of the two features.
        expected: Part `expected` of the error.
        do: Part `do` of the error.

    Raises:
        ConfigError: The dims differ.
    """
    one, other = features
    dims = [schema.get_feature_dim(feature) for feature in features]
    if dims[0] != dims[1]:
        raise ConfigError(
            f"vectors of {one} have dim {dims[0]}, but vectors of {other} have dim {dims[1]}",
            where="schema.yaml, tables",
            expected=expected,
            do=do,
        )


def match_names(patterns: Sequence[str], names: Sequence[str], where: str) -> set[str]:
    """Return the features and dense columns that match names or patterns such as 'user*'.

    Args:
        patterns: Names or patterns.
        names: All features and dense columns.
        where: Key of the configuration, for errors.

    Raises:
        ConfigError: A pattern matches nothing.
    """
    matches: set[str] = set()
    for pattern in patterns:
        new_matches = {name for name in names if fnmatchcase(name, pattern)}
        if not new_matches:
            what = f"'{pattern}' matches no feature or dense column that this key accepts"
            raise make_unknown_word_error(what, pattern, names, where, f"one of {', '.join(names)}, or a pattern")
        matches |= new_matches
    return matches


def check_lengths(schema: Schema, config: ModelSection) -> None:
    """Check that model.max_length, if it is a mapping, names only sequence features.

    Raises:
        ConfigError: A name is not a sequence feature.
    """
    lengths = getattr(config, "max_length", None)
    sequences = [feature for feature, spec in schema.sparse.items() if spec.pooling == "sequence"]
    for name in lengths if isinstance(lengths, dict) else ():
        if name not in sequences:
            expected = f"a feature with pooling: sequence ({', '.join(sequences) or 'the schema has none'})"
            raise make_unknown_word_error(
                f"'{name}' is not a sequence feature", name, sequences, f"model.max_length.{name}", expected
            )


def check_feature(schema: Schema, feature: str, key: str, *, sequence: bool = False) -> None:
    """Check that a feature exists and, if required, can be read id by id.

    Args:
        schema: Schema of the run.
        feature: Name of the feature.
        key: Key of the configuration that names the feature, such as model.item.
        sequence: True if the feature must be a sequence that is read id by id.

    Raises:
        ConfigError: The feature does not exist, or is not a sequence although it must be one.
    """
    if feature not in schema.sparse:
        raise make_unknown_word_error(f"'{feature}' is not a feature", feature, schema.sparse, key)
    pooling = schema.sparse[feature].pooling
    if sequence and pooling != "sequence":
        raise ConfigError(
            f"'{feature}' has pooling: {pooling}, but the model reads it id by id",
            where=f"schema.yaml, sparse.{feature}.pooling",
            expected="sequence",
            do=f"set pooling: sequence on {feature}, or name another feature in {key}",
        )


def find_side_feature(schema: Schema, feature: str, column: str, where: str) -> int:
    """Return the index of a column among the side features of a sequence feature.

    Args:
        schema: Schema of the run.
        feature: Name of the sequence feature.
        column: Name of the side feature.
        where: Key of the configuration, for errors.

    Raises:
        ConfigError: The column is not one of the feature's side features.
    """
    columns = schema.sparse[feature].side_features
    if column not in columns:
        expected = f"a side feature of {feature} ({', '.join(columns) or 'none is configured'})"
        do = f"correct the name, or add {column} to side_features of {feature} in schema.yaml"
        what = f"'{column}' is not a side feature of {feature}"
        raise make_unknown_word_error(what, column, columns, where, expected, do)
    return columns.index(column)


def check_same_table(schema: Schema, feature: str, item: str, key: str) -> None:
    """Check that a feature and the feature `item` look up the same table; `key` names the former in the error.

    Raises:
        ConfigError: The features look up different tables.
    """
    tables = schema.sparse[feature].table, schema.sparse[item].table
    if tables[0] != tables[1]:
        raise ConfigError(
            f"'{feature}' looks up table {tables[0]}, but '{item}' looks up table {tables[1]}",
            where=key,
            expected="the same table for both features, because their vectors are compared",
            do=f"set table: {tables[1]} on {feature}, or name another feature in {key}",
        )
