"""The configuration of clicks and what follows from them, learned on all impressions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from raytrec.common.errors import ConfigError
from raytrec.config.models.base import Dropout, ModelSection, Sizes, check_task_name, model
from raytrec.config.schema import Schema


@model("esmm", "raytrec.models.esmm:ESMM")
class ESMMSection(ModelSection):
    """P(click), and P(click and conversion) = P(click) · P(conversion | click) (models/esmm.py)."""

    name: Literal["esmm"] = Field(description="The model.")
    click: str = Field(description="The task whose label is the click.")
    conversion: str = Field(
        description="The task whose label is the conversion, 0 where there was no click; all rows count."
    )
    tower_mlp: Sizes = Field([128, 64], description="Hidden sizes of the two towers.")
    dropout: Dropout = Field(0.0, description="Dropout in both towers while training.")

    def check_tasks(self, schema: Schema, tasks: Mapping[str, int]) -> None:
        for key in ("click", "conversion"):
            check_task_name(getattr(self, key), tasks, f"model.{key}")
        if self.click == self.conversion:
            raise ConfigError(
                f"{self.click} is both click and conversion",
                where="model.click, model.conversion",
                expected="two tasks",
            )
        if others := [name for name in tasks if name not in (self.click, self.conversion)]:
            raise ConfigError(
                f"esmm has a tower for clicks and one for conversions, and none for {', '.join(others)}",
                where="tasks, model.name",
                expected="two tasks",
                do="leave the others out, or take model.name=dbmtl, which relates any number of tasks",
            )
        if wide := [name for name, columns in tasks.items() if columns != 1]:
            raise ConfigError(
                f"the loss of task {wide[0]} has {tasks[wide[0]]} columns, and esmm gives one log-odds",
                where="tasks",
                expected="loss: bce, or another one of a probability",
            )
