"""The `model` section: one class per model. Keys that the model does not read are rejected.

A new built-in model needs a file in raytrec/models, and a section in the file of its family, registered with the path
of the model class. A user-defined model needs only a class, set as model.name: module:Class. Torch is not imported,
because the driver reads these sections.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field, JsonValue

from raytrec.common.errors import ConfigError
from raytrec.config.base import build_section_union
from raytrec.config.models.base import MODELS, Lengths, ModelSection, check_lengths
from raytrec.config.models.retrieval import Towers
from raytrec.config.schema import Schema

OWN = "module:Class"


class PythonSection(ModelSection):
    """Section of a user-defined model class (contract: raytrec/models/__init__.py)."""

    gives_vectors: ClassVar[bool | None] = None
    name: str
    """Model class as module:Class, on Python's path or in the working directory of the command."""
    options: dict[str, JsonValue] = Field(default_factory=dict)
    """Options that the class reads."""
    max_length: Lengths | None = None
    """Maximum number of most recent ids that the model reads id by id from each sequence feature; or a
    mapping {feature: number} for these features only. Default: sequences are averaged."""
    gives_loss: bool = False
    """True if an additional column after the outputs contains the model's own loss."""

    towers: Towers | None = None
    """Features and dense columns (or patterns) of each tower's vectors, for retrieval with a class that
    defines methods query and item."""

    @property
    def retrieves(self) -> bool:  # type: ignore[override]
        """Return True if the configuration assigns features to towers."""
        return self.towers is not None

    def tower_members(self, schema: Schema) -> dict[str, set[str]]:
        """Return the features and columns of each tower in `towers`, which must be set; both may contain a feature.

        Raises:
            ConfigError: A pattern matches nothing.
        """
        assert self.towers is not None
        return self.towers.members([*schema.dense, *schema.sparse])

    def check(self, schema: Schema) -> None:
        """Raise a ConfigError unless each pattern in `towers`, if set, matches a feature or dense column."""
        if self.retrieves:
            self.tower_members(schema)

    @property
    def own_loss(self) -> bool:
        """Return `gives_loss`; the class is not inspected, because only workers import it."""
        return self.gives_loss

    @property
    def path(self) -> str:  # type: ignore[override]
        """Return the path of the class as module:Class."""
        return self.name


SECTIONS: dict[str, type[ModelSection]] = {**MODELS.parts, OWN: PythonSection}


def check_model(schema: Schema, config: ModelSection, vectors: bool, tasks: Mapping[str, int]) -> None:
    """Check that a model can be built for a schema and the tasks of a run.

    Args:
        schema: Schema of the run.
        config: Section of the model.
        vectors: True if a task's loss reads query and item vectors.
        tasks: Task → number of its logit columns.

    Raises:
        ConfigError: The model cannot be built.
    """
    if vectors and config.gives_vectors is False:
        with_vectors = [name for name, section in MODELS.parts.items() if section.gives_vectors]
        raise ConfigError(
            f"a task's loss reads query and item vectors, but model.name={config.name} returns none",
            where="tasks, model.name",
            expected=f"one of the models {', '.join(with_vectors)}, or your class with the argument `vectors`",
            do="set model={name: two_tower, towers: {query: [NAMES], item: [NAMES]}}, or use another loss, such as bce",
        )
    check_lengths(schema, config)
    config.l2_factors(schema)
    config.check(schema)
    config.check_tasks(schema, tasks)


if TYPE_CHECKING:
    AnyModel = ModelSection
else:
    AnyModel = build_section_union(SECTIONS, "name", OWN, "model", default="dlrm")
