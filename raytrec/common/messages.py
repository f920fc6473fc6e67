"""Messages from ranks and the coordinator to the driver, most of which become lines of a run folder.

`line()` is a message's line in the file FILE of the run folder; documents.from_line reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import Annotated, Any, ClassVar

from pydantic import Field, StrictBool

from raytrec.common.errors import ErrorParts
from raytrec.common.formatting import MAX_ABSOLUTE_VALUE, parse_number

HEARTBEAT_INTERVAL_S = 0.5  # shortest time between two heartbeats of a rank
MAX_HEARTBEATS_PER_S = 512  # heartbeats per second of all ranks together, which one actor answers
METRICS, RANKS, CHECKS, EVENTS = "metrics.jsonl", "ranks.jsonl", "checks.jsonl", "events.jsonl"

Figures = Mapping[str, Any]
Count = Annotated[int, Field(strict=True, ge=0, lt=2**53)]
Real = Annotated[float, Field(strict=True, gt=-MAX_ABSOLUTE_VALUE, lt=MAX_ABSOLUTE_VALUE)]
UnixTime = Annotated[float, Field(strict=True, ge=0, lt=1e11)]  # seconds since 1970, up to the year 5138
PROFILED = "profiled"  # the Event of a run whose profile has been written
ENDED_EARLY = "ended early"  # the Event of a run whose evaluations have ended training
FLATTENED = {"flat": True}  # metadata of a field whose keys are written next to the other fields
MAX_RECORDED_RANKS = 64  # ranks whose lines are recorded, because pictures show no more


def select_recorded_ranks(world: int) -> list[int]:
    """Return the ranks whose lines are recorded: all, or MAX_RECORDED_RANKS at equal distances.

    Example:
        >>> select_recorded_ranks(3), len(select_recorded_ranks(1024)), select_recorded_ranks(1024)[:3]
        ([0, 1, 2], 64, [0, 16, 32])
    """
    return sorted({at * world // MAX_RECORDED_RANKS for at in range(MAX_RECORDED_RANKS)})


def compute_heartbeat_interval(world: int) -> float:
    """Return the seconds between two heartbeats of each of `world` ranks."""
    return max(HEARTBEAT_INTERVAL_S, world / MAX_HEARTBEATS_PER_S)


class Command(IntEnum):
    """Commands to ranks; a larger one overrides a smaller one."""

    GO = 0
    SAVE = 1
    RESTART = 2  # save, then end, so that Ray Train starts the group again on the present nodes
    STOP = 3  # save, then end
    ABORT = 9  # end the process at once


class Restart(Exception):
    """Raised by all ranks when the state is saved and the group must be started again; not a failure."""


PHASES = (  # phases of a training step, into which a rank's time is divided
    "data",  # waiting for the next batch
    "copy",  # copying the batch to the device
    "input_exchange",  # sending ids to the ranks that hold their rows
    "tables",  # lookups and their backward pass, in which fused kernels update their tables
    "forward",  # forward pass of the dense model
    "backward",  # backward pass of the dense model
    "optimizer",  # update of dense layers and data-parallel tables
    "collectives",  # waiting for other ranks in other exchanges: pooled embeddings, gradients
    "other",
)


@dataclass(frozen=True, kw_only=True)
class Message:
    """Base class of all messages.

    Attributes:
        KIND: Name of the class in lines, and of the method that shows it (driver.console.RunConsole).
        FILE: File of the run folder that contains the message; None if it is not written.
        TAG: Key of the kind in its line; None if the file determines the kind.
        LEFT_OUT: Fields that the line does not contain.
    """

    KIND: ClassVar[str]
    FILE: ClassVar[str | None] = None
    TAG: ClassVar[str | None] = None
    LEFT_OUT: ClassVar[tuple[str, ...]] = ()

    def values(self) -> dict[str, Any]:
        """Return the values of all fields; those of `figures` or `details` are next to the others."""
        out: dict[str, Any] = {}
        for each in fields(self):
            value = getattr(self, each.name)
            out |= dict(value) if each.metadata.get("flat") else {each.name: value}
        return out

    def line(self) -> dict[str, Any]:
        """Return the values of the message's line in the run folder."""
        tag = {self.TAG: self.KIND} if self.TAG else {}
        return {**tag, **{k: v for k, v in self.values().items() if k not in self.LEFT_OUT}}


@dataclass(frozen=True, kw_only=True)
class Phase(Message):
    """Phase of the run that rank 0 enters, as text for people."""

    KIND = "phase"
    text: str


@dataclass(frozen=True, kw_only=True)
class Warn(Message):
    """Warning for people."""

    KIND = "warn"
    text: str


@dataclass(frozen=True, kw_only=True)
class RunEvent(Message):
    """Line of events.jsonl, with its time."""

    FILE, TAG = EVENTS, "event"
    unix_s: UnixTime | None = None


@dataclass(frozen=True, kw_only=True)
class Start(RunEvent):
    """Start of training by a group of workers.

    Attributes:
        total: Steps of the whole run; `step` of them have been trained before.
        plan: Description of each table (embeddings.sharding.describe), written to plan.json.
        metrics: Descriptions of the figures of training and evaluation (metrics.selection.Figure).
    """

    KIND, LEFT_OUT = "start", ("plan",)
    total: Count
    step: Count
    workers: Count
    plan: list[dict[str, Any]] = field(default_factory=list)
    metrics: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Saved(RunEvent):
    """End of a save.

    Attributes:
        error: Reason if the checkpoint could not be written; else None.
        blocked_s: Seconds during which training waited.
        seconds: Seconds of the whole save.
    """

    KIND = "saved"
    step: Count
    folder: str
    error: str | None
    blocked_s: Real
    seconds: Real


@dataclass(frozen=True, kw_only=True)
class Stopped(RunEvent):
    """End of a run at the request of a user or the cluster; its state is saved."""

    KIND = "stopped"
    step: Count


@dataclass(frozen=True, kw_only=True)
class Event(RunEvent):
    """Event that the coordinator observed: started, asked, waiting, failed, hang.

    Attributes:
        details: Attempt and workers; or command and reason; or cause, rank, step and again.
    """

    KIND, TAG = "event", None
    event: str
    details: Figures = field(default_factory=dict, metadata=FLATTENED)


@dataclass(frozen=True, kw_only=True)
class Measured(Message):
    """Figures at a step, a line of metrics.jsonl.

    Attributes:
        figures: Values by name. A value that is not defined is None in the file, and may be NaN before.
    """

    FILE, TAG = METRICS, "kind"
    unix_s: UnixTime | None = None
    step: Count
    figures: Figures = field(default_factory=dict, metadata=FLATTENED)

    def figure(self, name: str) -> float:
        """Return a figure; NaN if it is not defined."""
        return parse_number(self.figures.get(name))


@dataclass(frozen=True, kw_only=True)
class Train(Measured):
    """Figures of training since the previous Train message."""

    KIND = "train"


@dataclass(frozen=True, kw_only=True)
class Eval(Measured):
    """Figures of an evaluation during training.

    Attributes:
        curves: Points of each curve (worker.evaluate); None without curves.
    """

    KIND = "eval"
    curves: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Final(Eval):
    """Figures of the last evaluation."""

    KIND = "final"


@dataclass(frozen=True, kw_only=True)
class Result(Measured):
    """Figures of result.json, named section.name.

    Attributes:
        unsaved: Parts of the error that prevented saving the trained model; None if it is saved.
    """

    KIND, LEFT_OUT = "result", ("unsaved",)
    unsaved: ErrorParts | None = None


@dataclass(frozen=True, kw_only=True)
class Compared(Measured):
    """Figures of `raytrec check`."""

    KIND = "compared"


@dataclass(frozen=True, kw_only=True)
class Outcome(Message):
    """Outcome of a live check at a step.

    Attributes:
        figure: Measured value; None if the check measures nothing, or the value is not a number.
        limit: Largest value that passes; None if there is no limit.
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
    """Interval of tracking.every_steps steps of one rank (docs/monitoring.md).

    Attributes:
        first_step: Step before the first step of the interval, which has `steps` steps and ends at `step`.
        seconds: Duration of the interval.
        phases_s: Seconds in each of PHASES.
        first_s: Share of phases_s of the group's first step, which sets everything up; in one line.
        system: Sample of worker.process.SystemMonitor.
        tables: Figures of this rank's shards by table (worker.statistics).
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
        """Return the seconds in one of PHASES; 0 if they were not measured."""
        return self.phases_s.get(phase, 0.0)

    def added(self, figure: str) -> float:
        """Return the sum of a figure over all tables of the rank."""
        return sum(entry.get(figure) or 0.0 for entry in self.tables.values())
