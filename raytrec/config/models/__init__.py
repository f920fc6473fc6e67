"""The `model` section: one kind for each model. A key that a model does not read is refused.

A new model is its section here, in the file of its family and registered with the path of its class, and a
file in raytrec/models.
One of yours is a class alone: model.name: module:Class. No torch here: the driver reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field, JsonValue, field_validator

from raytrec.common.errors import ConfigError
from raytrec.common.registry import PYTHON_PATH
from raytrec.config.base import one_of
from raytrec.config.models.base import MODELS, Lengths, ModelSection, check_lengths
from raytrec.config.models.retrieval import Towers
from raytrec.config.schema import Schema

OWN = "module:Class"


class PythonSection(ModelSection):
    """A class of yours, built from (Schema, this section); its contract: raytrec/models/__init__.py."""

    gives_vectors: ClassVar[bool | None] = None
    name: str
    """module:Class, on Python's path or in the folder of the command."""
    options: dict[str, JsonValue] = Field(default_factory=dict)
    """Whatever the class reads from it."""
    max_length: Lengths | None = None
    """The most recent so many ids of a sequence feature are given to the model, one by one; or feature: ids,
    for each that is. Default: the mean of sequences."""
    gives_loss: bool = False
    """Whether its outputs are followed by one more column: a loss of the model's own."""

    towers: Towers | None = None
    """For retrieval, of a class with methods query and item: which features and dense columns (or patterns)
    the vectors of each tower are made from."""

    @property
    def retrieves(self) -> bool:  # type: ignore[override]
        """Whether the configuration assigns features to towers."""
        return self.towers is not None

    def tower_members(self, schema: Schema) -> dict[str, set[str]]:
        """As `towers` has them; a feature may be in both towers."""
        assert self.towers is not None
        return self.towers.members([*schema.dense, *schema.sparse])

    def check(self, schema: Schema) -> None:
        if self.retrieves:
            self.tower_members(schema)

    @property
    def own_loss(self) -> bool:
        """As configured: the class itself is imported by workers only."""
        return self.gives_loss

    @property
    def path(self) -> str:  # type: ignore[override]
        """The class."""
        return self.name

    @field_validator("name")
    @classmethod
    def _path(cls, value: str) -> str:
        if not PYTHON_PATH.fullmatch(value):
            raise ValueError("a class is named as module:Class")
        return value


SECTIONS: dict[str, type[ModelSection]] = {**MODELS.parts, OWN: PythonSection}


def check_model(
    schema: Schema, config: ModelSection, vectors: bool = False, tasks: Mapping[str, int] | None = None
) -> None:
    """Whether a model can be made for a schema and its tasks.

    Args:
        vectors: whether a task's loss reads vectors of query and item.
        tasks: task → its columns of logits; None: not known.

    Raises:
        ConfigError: it cannot.
    """
    if vectors and config.gives_vectors is False:
        with_vectors = [name for name, section in MODELS.parts.items() if section.gives_vectors]
        raise ConfigError(
            f"a loss of the tasks reads vectors of query and item, and model.name={config.name} gives none",
            where="tasks, model.name",
            expected=f"model.name={', '.join(with_vectors)}, or a class of yours that takes `vectors`",
            do="set model.name=two_tower and model.towers, or take another loss, such as bpr",
        )
    check_lengths(schema, config)
    config.l2_factors(schema)
    config.check(schema)
    if tasks is not None:
        config.check_tasks(schema, tasks)


if TYPE_CHECKING:
    AnyModel = ModelSection
else:
    AnyModel = one_of(SECTIONS, "name", OWN, "model", default="dlrm")
