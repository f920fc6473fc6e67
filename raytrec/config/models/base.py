"""What the sections of all models have in common, and the registry that they are in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import Field

from raytrec.common.errors import ConfigError
from raytrec.common.registry import Registry
from raytrec.config.base import Number, Section
from raytrec.config.schema import Schema

Size = Annotated[int, Field(strict=True, gt=0, le=2**20)]
Sizes = Annotated[list[Size], Field(max_length=1000)]
Dropout = Annotated[Number, Field(ge=0, lt=1)]


class ModelSection(Section):
    """The `model` section of one model, which is built from (Schema, this section).

    Attributes:
        path: the model's class as module:Class; the module is imported by workers only.
        gives_vectors: whether it can give vectors of query and item, too; None: nobody knows before it is
            made.
        retrieves: whether it has methods `query` and `item`, whose vectors' dot product orders the items for
            a query as its scores do; each looks at the features of its own side alone (`sides`).
    """

    path: ClassVar[str]
    gives_vectors: ClassVar[bool | None] = False
    retrieves: ClassVar[bool] = False
    name: str

    @property
    def own_loss(self) -> bool:
        """Whether the model gives a loss of its own: one more column, after its outputs and before vectors,
        of what each row adds to it; 0 in evaluations."""
        return False

    def sequence_lengths(self, schema: Schema) -> dict[str, int]:
        """Sequence features that the model reads id by id → the most ids of each; of others it is given the
        mean."""
        length = getattr(self, "max_length", None)
        found = (f for f, spec in schema.sparse.items() if spec.pooling == "sequence")
        return dict.fromkeys(found, length) if length else {}

    def sides(self, schema: Schema) -> dict[str, set[str]]:
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
        name: what model.name says.
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
            expected=f"one dim for all tables: {model} takes dot products between them",
            do="give every table the same dim",
        )
    return dims.pop()
