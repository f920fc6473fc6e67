"""Sections of multi-task models, including the ranking form of HSTU."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Literal

from pydantic import Field

from raytrec.common.errors import ConfigError, make_unknown_word_error
from raytrec.config.base import Number, SmallCount
from raytrec.config.models.base import Dropout, ModelSection, Size, Sizes, find_side_feature, match_names, model
from raytrec.config.models.sequences import TargetedSection, check_heads
from raytrec.config.schema import Schema


@model("shared_bottom", "raytrec.models.multitask:SharedBottom")
class SharedBottomSection(ModelSection):
    """One MLP shared by all tasks, and one tower per task."""

    name: Literal["shared_bottom"]
    bottom_mlp: Annotated[Sizes, Field(min_length=1)] = Field([128])
    """Sizes of the layers shared by all tasks."""
    tower_mlp: Sizes = Field([64])
    """Hidden sizes of each task's tower."""
    dropout: Dropout = 0.0
    """Dropout in all layers during training."""


@model("mmoe", "raytrec.models.multitask:MMoE")
class MMoESection(ModelSection):
    """Experts shared by all tasks, with a gate and a tower per task."""

    name: Literal["mmoe"]
    experts: SmallCount = 4
    """Number of experts, each an MLP over all inputs."""
    expert_mlp: Annotated[Sizes, Field(min_length=1)] = Field([64])
    """Sizes of an expert's layers."""
    tower_mlp: Sizes = Field([32])
    """Hidden sizes of each task's tower."""
    dropout: Dropout = 0.0
    """Dropout in experts and towers during training."""


@model("ple", "raytrec.models.multitask:PLE")
class PLESection(ModelSection):
    """Levels of shared and task-specific experts with gates, and a tower per task."""

    name: Literal["ple"]
    levels: Annotated[SmallCount, Field(le=100)] = 2
    """Number of extraction levels, applied in sequence; 1 is CGC, the paper's single level."""
    shared_experts: SmallCount = 2
    """Number of shared experts per level, read by all tasks."""
    task_experts: SmallCount = 2
    """Number of experts per level and task, read by this task and, except in the last level, by the shared gate."""
    expert_mlp: Annotated[Sizes, Field(min_length=1)] = Field([64])
    """Sizes of an expert's layers."""
    tower_mlp: Sizes = Field([32])
    """Hidden sizes of each task's tower."""
    dropout: Dropout = 0.0
    """Dropout in experts and towers during training."""


def _check_task_name(name: str, tasks: Collection[str], where: str) -> None:
    """Check that a key of the section names a task.

    Raises:
        ConfigError: The task does not exist.
    """
    if name not in tasks:
        do = "use the name of an entry of tasks; the default name is the label"
        raise make_unknown_word_error(f"there is no task '{name}'", name, tasks, where, do=do)


@model("esmm", "raytrec.models.multitask:ESMM")
class ESMMSection(ModelSection):
    """Model of P(click) and P(click and conversion) = P(click) · P(conversion | click)."""

    name: Literal["esmm"]
    click: str
    """Task whose label is the click."""
    conversion: str
    """Task whose label is the conversion, which is 0 without a click. The task uses all rows."""
    tower_mlp: Sizes = Field([128, 64])
    """Hidden sizes of the two towers."""
    dropout: Dropout = 0.0
    """Dropout in both towers during training."""

    def check_tasks(self, schema: Schema, tasks: Mapping[str, int]) -> None:
        """Raise a ConfigError unless click and conversion are two different tasks of one column each, and no others."""
        for key in ("click", "conversion"):
            _check_task_name(getattr(self, key), tasks, f"model.{key}")
        if self.click == self.conversion:
            raise ConfigError(
                f"model.click and model.conversion are both {self.click}",
                where="model.click, model.conversion",
                expected="two different tasks",
            )
        if others := [name for name in tasks if name not in (self.click, self.conversion)]:
            raise ConfigError(
                f"esmm has towers for click and conversion only, not for {', '.join(others)}",
                where="tasks, model.name",
                expected="two tasks",
                do="remove the other tasks, or set model={name: dbmtl}, which relates any number of tasks",
            )
        if wide := [name for name, columns in tasks.items() if columns != 1]:
            raise ConfigError(
                f"the loss of task {wide[0]} reads {tasks[wide[0]]} columns of logits, but esmm returns one per task",
                where="tasks",
                expected="a loss that reads one logit per row, such as bce",
            )


@model("dbmtl", "raytrec.models.multitask:DBMTL")
class DBMTLSection(ModelSection):
    """A tower per task, which also reads the towers of the tasks on which its task depends."""

    name: Literal["dbmtl"]
    relations: dict[str, list[str]] | None = None
    """Task → tasks that it depends on, such as {bought: [clicked]}; default: each task depends on all
    previous tasks."""
    bottom_mlp: Sizes = Field([128])
    """Sizes of the layers shared by all tasks."""
    tower_mlp: Annotated[Sizes, Field(min_length=1)] = Field([64])
    """Sizes of each task's own layers below the relations."""
    relation_mlp: Annotated[Sizes, Field(min_length=1)] = Field([32])
    """Sizes of each task's layers above the relations, which read the task's lower layers and the upper layers of
    the tasks on which it depends."""
    dropout: Dropout = 0.0
    """Dropout in all layers during training."""

    def check_tasks(self, schema: Schema, tasks: Mapping[str, int]) -> None:
        """Raise a ConfigError unless the relations name tasks and contain no cycle."""
        self.order(list(tasks))

    def order(self, tasks: Collection[str]) -> dict[str, list[str]]:
        """Return a mapping from task to the tasks that it depends on; every task follows all of these tasks.

        Raises:
            ConfigError: A task does not exist, or tasks depend on each other in a cycle.
        """
        names = list(tasks)
        if self.relations is None:
            return {name: names[:place] for place, name in enumerate(names)}
        for name, parents in self.relations.items():
            _check_task_name(name, names, "model.relations")
            for parent in parents:
                _check_task_name(parent, names, f"model.relations.{name}")
        remaining = {name: list(dict.fromkeys(self.relations.get(name, []))) for name in names}
        ordered: dict[str, list[str]] = {}
        while remaining:
            ready = [name for name, parents in remaining.items() if set(parents) <= set(ordered)]
            if not ready:
                raise ConfigError(
                    f"model.relations contains a cycle that involves or precedes {', '.join(remaining)}",
                    where="model.relations",
                    expected="relations without cycles",
                    do="remove one of the relations in the cycle",
                )
            ordered |= {name: remaining.pop(name) for name in ready}
        return ordered


@model("pepnet", "raytrec.models.gates:PEPNet")
class PEPNetSection(ModelSection):
    """A tower per task, with inputs gated by domain features and hidden units gated by personal features."""

    name: Literal["pepnet"]
    domain: list[str] = Field([])
    """Sparse features and dense columns (or patterns) of the domain, such as the page, from which the
    weights of all inputs are computed. []: inputs are not weighted."""
    personal: Annotated[list[str], Field(min_length=1)]
    """Sparse features and dense columns (or patterns), such as ids of user, item and author, from which the
    weights of the towers' hidden units are computed."""
    gate_mlp: Sizes = Field([64])
    """Hidden sizes of the networks that compute weights."""
    tower_mlp: Annotated[Sizes, Field(min_length=1)] = Field([128, 64])
    """Hidden sizes of each task's tower."""
    dropout: Dropout = 0.0
    """Dropout in the towers during training."""

    def check(self, schema: Schema) -> None:
        """Raise a ConfigError unless each pattern matches a feature or dense column."""
        self.members(schema)

    def members(self, schema: Schema) -> dict[str, set[str]]:
        """Return {"domain": …, "personal": …}, the features and dense columns that match each key's patterns.

        Raises:
            ConfigError: A pattern matches nothing.
        """
        names = [*schema.dense, *schema.sparse]
        return {key: match_names(getattr(self, key), names, f"model.{key}") for key in ("domain", "personal")}


@model("hstu_rank", "raytrec.models.hstu_rank:HstuRank")
class HstuRankSection(TargetedSection):
    """DLRM-HSTU: a request's candidates attend to its context and to a history of items and actions."""

    name: Literal["hstu_rank"]
    max_length: SmallCount = 200
    """Maximum number of most recent events of the history. All sequences have one id per event; the first
    sequence of the schema defines the number of events."""
    candidate: list[str] = Field(default_factory=list)
    """Features and dense columns (or patterns) of candidates in addition to the targets. All other features and
    columns, except sequences, are the context of the request."""
    actions: dict[str, Annotated[SmallCount, Field(le=52)] | Annotated[list[Number], Field(min_length=1)]] = Field(
        default_factory=dict
    )
    """Side features of the first sequence that describe the user's actions: {COLUMN: n} for a bit mask of n
    actions (higher bits are ignored, and negative numbers mean no action), or {COLUMN: [2, 4]} for numbers, with
    one action per threshold that the number reaches."""
    interleave: bool = True
    """Alternate tokens of items and actions. false: one token per event, the sum of item and actions."""
    time: str | None = None
    """Side feature of the first sequence with the times of the events; default: times are not used."""
    request_time: str | None = None
    """Unscaled dense column with the time of the request, in seconds. The age of an event is then measured from this
    time, and candidates also depend on its hour and weekday; default: ages are measured from the newest event."""
    dim: Size = 64
    """Width of tokens."""
    width: Size | None = None
    """Width of u, v, queries and keys over all heads; default: dim."""
    blocks: Annotated[SmallCount, Field(le=1000)] = 2
    """Number of layers, applied in sequence."""
    heads: Annotated[SmallCount, Field(le=1000)] = 1
    """Attention heads per layer."""
    encoder: Size = 128
    """Hidden size of the MLPs that encode items, actions and candidates as tokens."""
    tower_mlp: Sizes = Field([64])
    """Hidden sizes of each task's tower."""
    input_dropout: Dropout = 0.0
    """Dropout of tokens of the context and the history during training."""
    dropout: Dropout = 0.1
    """Dropout in the towers and of each layer's residual branch during training."""

    def history(self, schema: Schema) -> str:
        """Return the first sequence of the schema, whose ids are the events and whose side features describe them.

        Raises:
            ConfigError: As for `targets`.
        """
        return next(iter(self.targets(schema)))

    def candidate_members(self, schema: Schema) -> set[str]:
        """Return the features and dense columns of candidates, including the targets.

        Raises:
            ConfigError: A pattern in `candidate` matches nothing, or as for `targets`.
        """
        names = [*schema.dense, *(f for f, spec in schema.sparse.items() if spec.pooling != "sequence")]
        return match_names(self.candidate, names, "model.candidate") | {*self.targets(schema).values()}

    def request_members(self, schema: Schema) -> set[str]:
        """Return the features and dense columns of the context and the history; raise as `candidate_members`."""
        return {*schema.dense, *schema.sparse} - self.candidate_members(schema)

    def check(self, schema: Schema) -> None:
        """Check the dims, the heads, the side features, request_time, and that candidate columns are in `candidate`.

        Raises:
            ConfigError: One of them is invalid, a pattern in `candidate` matches nothing, or a sequence has no target.
        """
        self.check_dims(schema)
        check_heads(
            self.heads, self.width or self.dim, f"model.{'width' if self.width else 'dim'} is {self.width or self.dim}"
        )
        for column in self.actions:
            find_side_feature(schema, self.history(schema), column, f"model.actions.{column}")
        if self.time is not None:
            find_side_feature(schema, self.history(schema), self.time, "model.time")
        if missing := [name for name in self.request_members(schema) if name in schema.candidates]:
            raise ConfigError(
                f"{missing[0]} is a column of candidates, but the model reads it as context of the request",
                where="model.candidate",
                expected="all features and dense columns in the schema's candidates",
                do=f"add {missing[0]} to model.candidate",
            )
        time = self.request_time
        if time is not None and time in self.candidate_members(schema):
            raise ConfigError(
                f"'{time}' is a column of candidates",
                where="model.request_time",
                expected="a dense column of the request",
                do=f"exclude {time} from the names in model.candidate, or set model.request_time to another column",
            )
        if time is not None and (time in schema.scale or time not in schema.dense):
            raise ConfigError(
                f"'{time}' is {'scaled' if time in schema.scale else 'not a dense column'}",
                where="model.request_time",
                expected=f"an unscaled dense column ({', '.join(sorted({*schema.dense} - {*schema.scale})) or 'none'})",
                do=f"{f'remove {time} from scale' if time in schema.scale else f'add {time} to dense'} in schema.yaml",
            )
