"""The configuration of tasks that depend on each other."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Literal

from pydantic import Field

from raytrec.common.errors import ConfigError
from raytrec.config.models.base import Dropout, ModelSection, Sizes, check_task_name, model
from raytrec.config.schema import Schema


@model("dbmtl", "raytrec.models.dbmtl:DBMTL")
class DBMTLSection(ModelSection):
    """A tower for each task, which reads those of the tasks that it depends on, too (models/dbmtl.py)."""

    name: Literal["dbmtl"] = Field(description="The model.")
    relations: dict[str, list[str]] | None = Field(
        None,
        description="Task → the tasks that it depends on, as {bought: [clicked]}; default: each on all "
        "before it.",
    )
    bottom_mlp: Sizes = Field([128], description="Sizes of the layers that all tasks share.")
    tower_mlp: Annotated[Sizes, Field(min_length=1)] = Field(
        [64], description="Sizes of each task's own layers below the relations."
    )
    relation_mlp: Annotated[Sizes, Field(min_length=1)] = Field(
        [32], description="Sizes of each task's layers over its own and those that it depends on."
    )
    dropout: Dropout = Field(0.0, description="Dropout in all layers while training.")

    def check_tasks(self, schema: Schema, tasks: Mapping[str, int]) -> None:
        self.order(list(tasks))

    def order(self, tasks: Collection[str]) -> dict[str, list[str]]:
        """Task → the tasks that it depends on, those first that others depend on.

        Raises:
            ConfigError: no such task; tasks that depend on each other in a circle.
        """
        names = list(tasks)
        if self.relations is None:
            return {name: names[:place] for place, name in enumerate(names)}
        for name, parents in self.relations.items():
            check_task_name(name, names, "model.relations")
            for parent in parents:
                check_task_name(parent, names, f"model.relations.{name}")
        left = {name: list(dict.fromkeys(self.relations.get(name, []))) for name in names}
        ordered: dict[str, list[str]] = {}
        while left:
            ready = [name for name, parents in left.items() if set(parents) <= set(ordered)]
            if not ready:
                raise ConfigError(
                    f"tasks depend on each other in a circle, {' and '.join(left)} among them or behind it",
                    where="model.relations",
                    expected="tasks that depend on others which do not depend on them",
                    do="leave one of the relations out",
                )
            ordered |= {name: left.pop(name) for name in ready}
        return ordered
