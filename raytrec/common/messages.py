"""Messages from ranks and the coordinator to the driver, most of which become lines in a run folder.

The coordinator is an actor that watches a run's ranks. documents.from_line parses the lines.
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
MAX_HEARTBEATS_PER_S = 512  # maximum total of all ranks, because the coordinator replies to all heartbeats
METRICS, RANKS, CHECKS, EVENTS = "metrics.jsonl", "ranks.jsonl", "checks.jsonl", "events.jsonl"
DELTA_STREAM = "deltas.json"  # file of the run folder that identifies the run's deltas (export.deltas)

Figures = Mapping[str, Any]
Count = Annotated[int, Field(strict=True, ge=0, lt=2**53)]
Real = Annotated[float, Field(strict=True, gt=-MAX_ABSOLUTE_VALUE, lt=MAX_ABSOLUTE_VALUE)]
UnixTime = Annotated[float, Field(strict=True, ge=0, lt=1e11)]  # seconds since 1970, up to the year 5138
PROFILED = "profiled"  # name of the Event that reports a written profile
ENDED_EARLY = "ended early"  # name of the Event that reports the end of training by early stopping
FLATTENED = {"flat": True}  # metadata of a mapping whose items are written like fields of the message


def compute_heartbeat_interval(world: int) -> float:
    """Return the seconds between two heartbeats of each of `world` ranks."""
    return max(HEARTBEAT_INTERVAL_S, world / MAX_HEARTBEATS_PER_S)


class Command(IntEnum):
    """Command from the coordinator to all ranks; a command with a larger value overrides the others."""

    GO = 0  # continue
    DELTA = 1  # write a delta (export.deltas)
    SAVE = 2  # save a checkpoint
    RESTART = 3  # save, then end, so that Ray Train restarts the group on the current nodes
    STOP = 4  # save, then end
    ABORT = 9  # end the process immediately


class Restart(Exception):
    """Signal that all ranks raise after saving a checkpoint, so that Ray Train restarts the group; not a failure."""


PHASES = (  # phases of a training step, into which a rank's time is divided
    "data",  # waiting for the next batch
    "copy",  # copying the batch to the device
    "input_exchange",  # sending ids to the ranks that hold their rows
    "tables",  # lookups and their backward pass, in which fused kernels update their tables
    "forward",  # forward pass of the dense model
    "backward",  # backward pass of the dense model
    "optimizer",  # update of dense layers and data-parallel tables
    "collectives",  # waiting for other ranks in all other exchanges: pooled embeddings, gradients
    "other",  # all remaining time
)


@dataclass(frozen=True, kw_only=True)
class Message:
    """Base class of the messages that ranks and the coordinator send to the driver.

    Attributes:
        KIND: Name of the class in lines, and of the method of driver.console.RunConsole that shows the message, if any.
        FILE: File of the run folder to which the message is appended; None if the message is not written.
        TAG: Key of KIND in the line; None if the line does not contain KIND.
        LEFT_OUT: Names of fields that the line omits.
    """

    KIND: ClassVar[str]
    FILE: ClassVar[str | None] = None
    TAG: ClassVar[str | None] = None
    LEFT_OUT: ClassVar[tuple[str, ...]] = ()

    def values(self) -> dict[str, Any]:
        """Return the values of all fields by name; the items of a FLATTENED field are merged into the result."""
        out: dict[str, Any] = {}
        for each in fields(self):
            value = getattr(self, each.name)
            out |= dict(value) if each.metadata.get("flat") else {each.name: value}
        return out

    def line(self) -> dict[str, Any]:
        """Return the content of the message's line in the run folder, without the fields in LEFT_OUT."""
        tag = {self.TAG: self.KIND} if self.TAG else {}
        return {**tag, **{k: v for k, v in self.values().items() if k not in self.LEFT_OUT}}


@dataclass(frozen=True, kw_only=True)
class Phase(Message):
    """Start of a phase of the run, such as sharding, with a description for the user."""

    KIND = "phase"
    text: str


@dataclass(frozen=True, kw_only=True)
class Warn(Message):
    """Warning that the driver shows to the user."""

    KIND = "warn"
    text: str


@dataclass(frozen=True, kw_only=True)
class RunEvent(Message):
    """Message that is appended to events.jsonl with its time `unix_s`, which the driver sets if it is None."""

    FILE, TAG = EVENTS, "event"
    unix_s: UnixTime | None = None


@dataclass(frozen=True, kw_only=True)
class Start(RunEvent):
    """Start of training by a group of `workers` ranks.

    Attributes:
        total: Number of training steps in the whole run, of which `step` are already complete.
        plan: Description of each table (embeddings.sharding.describe_plan), written to plan.json.
        metrics: Descriptions of training and evaluation metrics (metrics.selection.describe_metrics).
    """

    KIND, LEFT_OUT = "start", ("plan",)
    total: Count
    step: Count
    workers: Count
    plan: list[dict[str, Any]] = field(default_factory=list)
    metrics: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Saved(RunEvent):
    """Completion or failure of a checkpoint save.

    Attributes:
        folder: Path or URI of the checkpoint of `step`.
        error: Reason why the checkpoint could not be written; None if the save succeeded.
        blocked_s: Seconds for which training waited.
        seconds: Duration of the whole save in seconds.
        delta: Number of the delta that leads to the checkpoint's state; None if no such delta was written.
    """

    KIND, LEFT_OUT = "saved", ("delta",)
    step: Count
    folder: str
    error: str | None
    blocked_s: Real
    seconds: Real
    delta: Count | None = None


@dataclass(frozen=True, kw_only=True)
class Stopped(RunEvent):
    """End of a run at the request of a user or the cluster, after a checkpoint was saved at `step`."""

    KIND = "stopped"
    step: Count


@dataclass(frozen=True, kw_only=True)
class Event(RunEvent):
    """Any other event of a run.

    Attributes:
        event: Name, such as started, asked (restart or stop requested), waiting (for nodes), failed or hang.
        details: Details by name, which depend on the event: for example, attempt and workers for `started`, or
            cause, rank, step and again for `failed`.
    """

    KIND, TAG = "event", None
    event: str
    details: Figures = field(default_factory=dict, metadata=FLATTENED)


@dataclass(frozen=True, kw_only=True)
class Measured(Message):
    """Metrics at a step, written as a line in metrics.jsonl with their time; the driver sets `unix_s` if it is None.

    Attributes:
        figures: Values by name at `step`. An undefined value is None in the file; in a new message, it can be NaN.
    """

    FILE, TAG = METRICS, "kind"
    unix_s: UnixTime | None = None
    step: Count
    figures: Figures = field(default_factory=dict, metadata=FLATTENED)

    def figure(self, name: str) -> float:
        """Return the value of a metric, or NaN if it is missing or undefined."""
        return parse_number(self.figures.get(name))


@dataclass(frozen=True, kw_only=True)
class Train(Measured):
    """Metrics of training since the previous Train message."""

    KIND = "train"


@dataclass(frozen=True, kw_only=True)
class Eval(Measured):
    """Metrics of an evaluation during training.

    Attributes:
        curves: Name of each curve → its points (worker.evaluate); None if no curves were computed.
    """

    KIND = "eval"
    curves: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Final(Eval):
    """Metrics of the evaluation after training, on data.test if it is set, else on the validation data."""

    KIND = "final"


@dataclass(frozen=True, kw_only=True)
class Result(Measured):
    """Metrics in result.json, under names of the form section.name.

    Attributes:
        unsaved: Parts of the error that prevented saving the trained model; None if the model is saved.
    """

    KIND, LEFT_OUT = "result", ("unsaved",)
    unsaved: ErrorParts | None = None


@dataclass(frozen=True, kw_only=True)
class Compared(Measured):
    """Metrics of `raytrec check`, which compares sharded training with a single process."""

    KIND = "compared"


@dataclass(frozen=True, kw_only=True)
class Outcome(Message):
    """Outcome of a live check at a step.

    Attributes:
        check: Name of the check, which ran at `step`.
        figure: Measured value; None if the check measures no value, or the value is not finite.
        limit: Largest value that passes; None if the check has no limit.
        text: Description of the outcome for the user.
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
    """Measurements of one rank over an interval of at most tracking.every_steps training steps (docs/monitoring.md).

    Attributes:
        first_step: Number of training steps before the interval, which has `steps` steps and ends at `step`.
        attempt: Number of worker groups that the driver started before this one.
        seconds: Duration of the interval in seconds.
        phases_s: Seconds spent in each of PHASES.
        first_s: Seconds of phases_s spent in the group's first step, which includes setup; {} if the interval does not
            contain this step.
        system: Use of the machine, sampled by worker.process.SystemMonitor.
        tables: Metrics of this rank's shards by table (worker.statistics).
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
        """Return the seconds spent in one of PHASES, or 0 if they were not measured."""
        return self.phases_s.get(phase, 0.0)

    def added(self, figure: str) -> float:
        """Return the sum of a metric over the rank's tables; tables without a value count as 0."""
        return sum(entry.get(figure) or 0.0 for entry in self.tables.values())
