"""Messages between processes, which are lines of a run folder.

A message is a dataclass of JSON values. In the run folder it is `line()`, in the file FILE of its class;
documents.from_line has the way back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import Annotated, Any, ClassVar

from pydantic import Field, StrictBool

from raytrec.common.errors import ErrorParts
from raytrec.common.formatting import LARGEST, number

BEAT_S = 0.5  # between two heartbeats of a rank
MOST_BEATS = 512  # a second, of all ranks together: one actor answers them
METRICS, RANKS, CHECKS, EVENTS = "metrics.jsonl", "ranks.jsonl", "checks.jsonl", "events.jsonl"

Figures = Mapping[str, Any]
Count = Annotated[int, Field(strict=True, ge=0, lt=2**53)]
Real = Annotated[float, Field(strict=True, gt=-LARGEST, lt=LARGEST)]
UnixTime = Annotated[float, Field(strict=True, ge=0, lt=1e11)]  # seconds, up to the year 5138
PROFILED = "profiled"  # the Event of a run whose profile has been written
ENDED_EARLY = "ended early"  # the Event of a run whose evaluations have ended training
FLAT = {"flat": True}  # of a field whose keys are next to those of the other fields
MOST_RECORDED = 64  # ranks whose lines are recorded: pictures show no more


def recorded_ranks(world: int) -> list[int]:
    """The ranks whose lines are recorded: all, or of a larger group MOST_RECORDED at equal distances.

    Example:
        >>> recorded_ranks(3), len(recorded_ranks(1024)), recorded_ranks(1024)[:3]
        ([0, 1, 2], 64, [0, 16, 32])
    """
    return sorted({at * world // MOST_RECORDED for at in range(MOST_RECORDED)})


def beat_s(world: int) -> float:
    """Seconds between two heartbeats of each of `world` ranks."""
    return max(BEAT_S, world / MOST_BEATS)


class Command(IntEnum):
    """Commands to ranks; a larger one overrides a smaller one."""

    GO = 0
    SAVE = 1
    RESTART = 2  # save, then end, so that Ray Train starts the group again with what nodes there are
    STOP = 3  # save, then end
    ABORT = 9  # end the process at once


class Restart(Exception):
    """Raised by all ranks when the state is saved and the group is to be started again: no failure."""


PHASES = (  # of a training step, into which a rank's time is divided
    "data",  # waiting for the next batch
    "copy",  # bringing it to the device
    "input_exchange",  # ids on their way to the ranks that hold their rows
    "tables",  # lookups, and what backward does in them: fused kernels update their tables there
    "forward",  # of the dense model
    "backward",  # of the dense model
    "optimizer",  # of dense layers and data-parallel tables
    "collectives",  # waiting for other ranks anywhere else: pooled embeddings, gradients
    "other",
)


@dataclass(frozen=True, kw_only=True)
class Message:
    """The base of all messages.

    Attributes:
        KIND: its name in lines, and of the method that shows it (driver.console.RunConsole).
        FILE: where the run folder keeps it; None: nowhere.
        TAG: the key of the kind in its line there; None: the file determines it.
        LEFT_OUT: fields that are not in the line.
    """

    KIND: ClassVar[str]
    FILE: ClassVar[str | None] = None
    TAG: ClassVar[str | None] = None
    LEFT_OUT: ClassVar[tuple[str, ...]] = ()

    def values(self) -> dict[str, Any]:
        """Field → value; those of `figures` or `details` next to the others."""
        out: dict[str, Any] = {}
        for each in fields(self):
            value = getattr(self, each.name)
            out |= dict(value) if each.metadata.get("flat") else {each.name: value}
        return out

    def line(self) -> dict[str, Any]:
        """As the run folder has it."""
        tag = {self.TAG: self.KIND} if self.TAG else {}
        return {**tag, **{k: v for k, v in self.values().items() if k not in self.LEFT_OUT}}


@dataclass(frozen=True, kw_only=True)
class Phase(Message):
    """The phase that rank 0 enters, for people."""

    KIND = "phase"
    text: str


@dataclass(frozen=True, kw_only=True)
class Warn(Message):
    """Something that people should know."""

    KIND = "warn"
    text: str


@dataclass(frozen=True, kw_only=True)
class RunEvent(Message):
    """A line of events.jsonl, with its time (seconds since 1970)."""

    FILE, TAG = EVENTS, "event"
    unix_s: UnixTime | None = None


@dataclass(frozen=True, kw_only=True)
class Start(RunEvent):
    """A group of workers begins to train.

    Attributes:
        total: steps of the whole run; `step` of them have been trained before.
        plan: a description of each table (embeddings.sharding.describe); kept in plan.json.
        metrics: descriptions of the figures of training and evaluation (metrics.selection.Figure.record).
    """

    KIND, LEFT_OUT = "start", ("plan",)
    total: Count
    step: Count
    workers: Count
    plan: list[dict[str, Any]] = field(default_factory=list)
    metrics: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Saved(RunEvent):
    """A checkpoint has been written, or (error) has not.

    Attributes:
        blocked_s, seconds: that training stood still for it, and that it took in all.
    """

    KIND = "saved"
    step: Count
    folder: str
    error: str | None
    blocked_s: Real
    seconds: Real


@dataclass(frozen=True, kw_only=True)
class Stopped(RunEvent):
    """The state is saved and the run ends, because a user or the cluster asked for it."""

    KIND = "stopped"
    step: Count


@dataclass(frozen=True, kw_only=True)
class Event(RunEvent):
    """An event that the coordinator saw: started, asked, waiting, failed, hang.

    Attributes:
        details: attempt and workers; command and reason; cause, rank, step, again.
    """

    KIND, TAG = "event", None
    event: str
    details: Figures = field(default_factory=dict, metadata=FLAT)


@dataclass(frozen=True, kw_only=True)
class Measured(Message):
    """Figures at a step; of metrics.jsonl.

    Attributes:
        figures: name → value; None (or NaN, on the way) where it is not defined.
    """

    FILE, TAG = METRICS, "kind"
    unix_s: UnixTime | None = None
    step: Count
    figures: Figures = field(default_factory=dict, metadata=FLAT)

    def figure(self, name: str) -> float:
        """One of the figures; NaN where it is not defined."""
        return number(self.figures.get(name))


@dataclass(frozen=True, kw_only=True)
class Train(Measured):
    """Figures of training since the last such message."""

    KIND = "train"


@dataclass(frozen=True, kw_only=True)
class Eval(Measured):
    """Figures of an evaluation while training.

    Attributes:
        curves: curve → its points (worker.evaluate); None where there is none.
    """

    KIND = "eval"
    curves: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Final(Eval):
    """Figures of the last evaluation."""

    KIND = "final"


@dataclass(frozen=True, kw_only=True)
class Result(Measured):
    """The figures of result.json, as section.name.

    Attributes:
        unsaved: the parts of the error for which the trained model could not be saved; None: it was.
    """

    KIND, LEFT_OUT = "result", ("unsaved",)
    unsaved: ErrorParts | None = None


@dataclass(frozen=True, kw_only=True)
class Compared(Measured):
    """Findings of `raytrec check`, under its own names."""

    KIND = "compared"


@dataclass(frozen=True, kw_only=True)
class Outcome(Message):
    """The outcome of a live check, at a step.

    Attributes:
        figure, limit: what was measured, and the largest that passes; None: there is none, or no number.
    """

    KIND, FILE = "check", CHECKS
    unix_s: UnixTime | None = None
    check: str
    step: Count
    passed: StrictBool
    figure: Real | None
    limit: Real | None
    text: str


@dataclass(frozen=True, kw_only=True)
class RankLine(Message):
    """One rank's interval of tracking.every_steps steps (docs/monitoring.md).

    Attributes:
        first_step: the step before the interval's first one; `steps` after it, at `step`, it ends.
        seconds: that it took; phases_s: of these in each of PHASES.
        first_s: of phases_s, those of the group's first step, which sets everything up; in its first line.
        system: a sample of worker.process.System.
        tables: table → figures of this rank's shards (worker.statistics).
    """

    KIND, FILE = "rank", RANKS
    step: Count
    first_step: Count
    unix_s: UnixTime
    rank: Count
    world: Count
    attempt: Count
    steps: Count
    seconds: Real
    phases_s: dict[str, Real]
    system: dict[str, Real | None]
    tables: dict[str, dict[str, Any]]
    first_s: dict[str, Real] = field(default_factory=dict)

    def phase_s(self, phase: str) -> float:
        """Seconds in one of PHASES; 0 where it was not measured."""
        return self.phases_s.get(phase, 0.0)

    def added(self, figure: str) -> float:
        """A figure of tables, over all tables of the rank."""
        return sum(entry.get(figure) or 0.0 for entry in self.tables.values())
