"""Messages of a run in memory. If a step is trained again, its new messages replace the earlier messages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from raytrec.common.messages import PHASES, Measured, Message, Outcome, RankLine, RunEvent, Start, Train
from raytrec.metrics.selection import EVAL_PREFIX, MetricDisplay, read_metric_displays

MAX_INTERVALS = 600  # maximum number of intervals kept; beyond it, neighboring intervals are summed
MAX_RECORDED_RANKS = 64  # maximum number of ranks whose lines are recorded; plots do not show more
LOAD_KEYS = ("lookups", "lookup_bytes")  # table statistics that are summed over intervals


def select_recorded_ranks(world: int) -> list[int]:
    """Return the ranks, of `world`, whose lines are recorded: all, or MAX_RECORDED_RANKS evenly spaced ones.

    Example:
        >>> select_recorded_ranks(3), len(select_recorded_ranks(1024)), select_recorded_ranks(1024)[:3]
        ([0, 1, 2], 64, [0, 16, 32])
    """
    return sorted({at * world // MAX_RECORDED_RANKS for at in range(MAX_RECORDED_RANKS)})


class Restarts:
    """Detector of the first line of each worker group in ranks.jsonl.

    A line belongs to a new group if its attempt differs from that of the previous line, or if its interval begins
    before the end of the rank's previous interval. In the second case, the run went back to the beginning of the new
    interval, and all later steps are trained again, possibly by fewer ranks.
    """

    def __init__(self) -> None:
        self._attempt: int | None = None
        self._last: dict[int, int] = {}  # rank → last step

    def is_first(self, line: RankLine) -> bool:
        """Return True if a line, passed in the order of writing, is the first of a new worker group."""
        first = line.attempt != self._attempt or line.first_step < self._last.get(line.rank, 0)
        if first:
            self._attempt, self._last = line.attempt, {}
        self._last[line.rank] = line.step
        return first


class StepBuffer:
    """Buffer that holds the lines of ranks.jsonl for a step until the lines of all recorded ranks are present."""

    def __init__(self) -> None:
        self._waiting: dict[int, dict[int, tuple[RankLine, int]]] = {}  # step → rank → (line, offset of the line)
        self._restarts = Restarts()

    def add(self, line: RankLine, begin: int = 0) -> list[RankLine] | None:
        """Add a line; if its step is complete, return the lines of all recorded ranks, ordered by rank, else None.

        `begin` is the byte offset of the line in its file. Lines of incomplete steps are discarded when a later step is
        complete, or when a new worker group begins.
        """
        if self._restarts.is_first(line):
            self._waiting = {}
        group = self._waiting.setdefault(line.step, {})
        group[line.rank] = line, begin
        if len(group) < len(select_recorded_ranks(line.world)):
            return None
        self._waiting = {later: lines for later, lines in self._waiting.items() if later > line.step}
        return [group[rank][0] for rank in sorted(group)]

    def find_pending_offset(self) -> int | None:
        """Return the byte offset of the first line that waits for other ranks; None if no line is waiting."""
        return min((begin for group in self._waiting.values() for _, begin in group.values()), default=None)


class IntervalBuffer:
    """Buffer of a run's lines of ranks.jsonl; if a step is trained again, its new lines replace the earlier lines.

    If there are more than MAX_INTERVALS intervals, neighboring intervals of the same ranks are summed.
    """

    def __init__(self) -> None:
        self._steps: dict[int, dict[int, RankLine]] = {}
        self._restarts = Restarts()

    def add(self, line: RankLine) -> None:
        """Add a line; lines must be added in the order in which they were written."""
        if self._restarts.is_first(line):
            self._steps = {s: lines for s, lines in self._steps.items() if s <= line.first_step}
        self._steps.setdefault(line.step, {})[line.rank] = line
        if len(self._steps) > MAX_INTERVALS:
            self._halve()

    def lines(self) -> list[RankLine]:
        """Return the buffered lines, ordered by step and rank."""
        return [self._steps[step][rank] for step in sorted(self._steps) for rank in sorted(self._steps[step])]

    def _halve(self) -> None:
        """Sum pairs of neighboring intervals, except the newest two or three, which may receive more lines.

        A pair is not summed if the later interval has a rank without a line that ends where that interval begins.
        """
        steps = sorted(self._steps)
        for earlier, later in zip(steps[:-2:2], steps[1:-2:2], strict=False):
            one, other = self._steps[earlier], self._steps[later]
            if all(rank in one and line.first_step == earlier for rank, line in other.items()):
                self._steps[later] = {rank: sum_intervals([one[rank], line]) for rank, line in other.items()}
                del self._steps[earlier]


def sum_intervals(lines: list[RankLine]) -> RankLine:
    """Return a rank's line in which seconds, steps, phases and lookups are summed over intervals.

    `first_step` is from the first line, and all remaining values are from the last line.

    Args:
        lines: Lines of one rank, ordered by step; at least one.
    """
    tables = {}
    for name in dict.fromkeys(name for line in lines for name in line.tables):
        entries = [line.tables.get(name, {}) for line in lines]
        tables[name] = entries[-1] | {key: sum(entry.get(key) or 0.0 for entry in entries) for key in LOAD_KEYS}
    return replace(
        lines[-1],
        first_step=lines[0].first_step,
        steps=sum(line.steps for line in lines),
        seconds=sum(line.seconds for line in lines),
        phases_s={phase: sum(line.phases_s.get(phase, 0.0) for line in lines) for phase in PHASES},
        tables=tables,
    )


class History:
    """Messages of a run. If a step is trained again, its new messages replace the earlier messages.

    Attributes:
        failures: All failed checks, including checks of steps that were trained again.
        events: Messages of events.jsonl, in the order of writing.
        progress: (unix_s, step) of all Train messages with a time, in the order of writing; steps can decrease.
        result: Content of result.json, set by subclasses; empty until the run has finished.
    """

    def __init__(self) -> None:
        self.failures: list[Outcome] = []
        self.events: list[RunEvent] = []
        self.progress: list[tuple[float, int]] = []
        self.result: dict[str, Any] = {}
        self._metrics: dict[str, list[Measured]] = {}
        self._checks: dict[str, list[Outcome]] = {}
        self._intervals = IntervalBuffer()

    def add(self, message: Message) -> None:
        """Add a message; messages must be added in the order in which they were written.

        Messages of classes that are not written to the run folder, such as Phase, are ignored.
        """
        if isinstance(message, RankLine):
            self._intervals.add(message)
        elif isinstance(message, Outcome):
            _replace_later(self._checks.setdefault(message.check, []), message)
            if not message.passed:
                self.failures.append(message)
        elif isinstance(message, Measured):
            _replace_later(self._metrics.setdefault(message.KIND, []), message)
            if isinstance(message, Train) and message.unix_s is not None:
                self.progress.append((message.unix_s, message.step))
        elif isinstance(message, RunEvent):
            self.events.append(message)

    def figures(self, *kinds: type[Measured]) -> list[Measured]:
        """Return the messages of the given classes, such as messages.Train or Eval, ordered by step."""
        lines = [line for kind in kinds for line in self._metrics.get(kind.KIND, [])]
        return sorted(lines, key=lambda line: line.step)

    @property
    def ranks(self) -> list[RankLine]:
        """Return the lines of ranks.jsonl by step and rank; in long runs, neighboring intervals are summed."""
        return self._intervals.lines()

    @property
    def checks(self) -> list[Outcome]:
        """Return the messages of checks.jsonl, grouped by check and ordered by step within each check."""
        return [line for lines in self._checks.values() for line in lines]

    @property
    def starts(self) -> list[Start]:
        """Return the start messages of all worker groups."""
        return [event for event in self.events if isinstance(event, Start)]

    @property
    def restarts(self) -> list[int]:
        """Return the number of completed steps at each restart: after a failure, after a resize, or with --resume."""
        return [start.step for start in self.starts[1:]]

    @property
    def step(self) -> int:
        """Return the last step with a message in metrics.jsonl; 0 without such messages."""
        return max((lines[-1].step for lines in self._metrics.values()), default=0)

    @property
    def total_steps(self) -> int:
        """Return the number of steps in the complete run; 0 before training starts."""
        return self.starts[-1].total if self.starts else 0

    @property
    def recorded_metrics(self) -> list[MetricDisplay]:
        """Return the display properties of all recorded metrics, as described by the start messages or result.json."""
        described = [start.line() for start in reversed(self.starts)]
        keys = {key for lines in self._metrics.values() for line in lines for key in line.figures}
        keys |= {key.removeprefix(EVAL_PREFIX) for key in self.result}
        return [figure for figure in read_metric_displays(*described, self.result) if figure.key in keys]


def _replace_later(lines: list[Any], line: Any) -> None:
    """Append a line after removing all lines of the same or later steps."""
    while lines and lines[-1].step >= line.step:
        lines.pop()
    lines.append(line)
