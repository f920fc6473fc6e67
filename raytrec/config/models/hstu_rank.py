"""Section of the ranking form of HSTU."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from raytrec.common.errors import ConfigError
from raytrec.config.base import Number, SmallCount
from raytrec.config.models.base import Dropout, Size, Sizes, find_side_feature, match_names, model
from raytrec.config.models.sequences import TargetedSection, check_heads
from raytrec.config.schema import Schema


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
        """Return the first sequence, which defines the events and whose side features describe them."""
        return next(iter(self.targets(schema)))

    def candidate_members(self, schema: Schema) -> set[str]:
        """Return the features and dense columns of candidates, including the targets."""
        names = [*schema.dense, *(f for f, spec in schema.sparse.items() if spec.pooling != "sequence")]
        return match_names(self.candidate, names, "model.candidate") | {*self.targets(schema).values()}

    def request_members(self, schema: Schema) -> set[str]:
        """Return the features and dense columns of the context and the history."""
        return {*schema.dense, *schema.sparse} - self.candidate_members(schema)

    def check(self, schema: Schema) -> None:
        """Check the dims, the heads, the side features, the request's time, and the features of candidates."""
        self.check_dims(schema)
        check_heads(self.heads, self.width or self.dim, f"model.width is {self.width or self.dim}")
        for column in self.actions:
            find_side_feature(schema, self.history(schema), column, f"model.actions.{column}")
        if self.time is not None:
            find_side_feature(schema, self.history(schema), self.time, "model.time")
        missing = [name for name in self.request_members(schema) if name in schema.candidates]
        if missing:
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
                do=f"remove {time} from model.candidate, or set model.request_time to another column",
            )
        if time is not None and (time in schema.scale or time not in schema.dense):
            raise ConfigError(
                f"'{time}' is not an unscaled dense column",
                where="model.request_time",
                expected="a dense column without scale",
                do=f"list {time} in `dense` of schema.yaml and remove it from `scale`",
            )
