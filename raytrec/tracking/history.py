"""The messages of a run, in memory. Of steps that were trained again, the later ones count."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from raytrec.common.messages import (
    PHASES,
    Measured,
    Message,
    Outcome,
    RankLine,
    RunEvent,
    Start,
    Train,
    recorded_ranks,
)
from raytrec.metrics.selection import EVAL, Figure, figures_of

MOST_INTERVALS = 600  # that are kept of a run; of a longer one, neighbours are put together, again and again
LOADS = ("lookups", "lookup_bytes")  # of a table, added up over intervals


class Restarts:
    """Notices lines of another group of workers.

    A line of another attempt, or one that begins before its rank's last one has ended, means that the run has
    gone back to where the line begins: all later steps are about to be trained again, maybe by fewer ranks.
    """

    def __init__(self) -> None:
        self._attempt: int | None = None
        self._last: dict[int, int] = {}  # rank → step

    def is_first(self, line: RankLine) -> bool:
        """Whether a line is the first of its group of workers."""
        first = line.attempt != self._attempt or line.first_step < self._last.get(line.rank, 0)
        if first:
            self._attempt, self._last = line.attempt, {}
        self._last[line.rank] = line.step
        return first


class StepGroups:
    """Gathers lines until there are those of all recorded ranks of a step."""

    def __init__(self) -> None:
        self._waiting: dict[int, dict[int, tuple[RankLine, int]]] = {}  # step → rank → line, its first byte
        self._restarts = Restarts()

    def add(self, line: RankLine, begin: int = 0) -> list[RankLine] | None:
        """The lines of all recorded ranks in their order, once the last has come.

        Where a new group of workers begins, the lines of the group before will never be complete.

        Args:
            begin: the line's first byte in its file.
        """
        if self._restarts.is_first(line):
            self._waiting = {}
        group = self._waiting.setdefault(line.step, {})
        group[line.rank] = line, begin
        if len(group) < len(recorded_ranks(line.world)):
            return None
        self._waiting = {later: lines for later, lines in self._waiting.items() if later > line.step}
        return [group[rank][0] for rank in sorted(group)]

    def begin_of_waiting(self) -> int | None:
        """The first byte of the lines that wait for other ranks' lines; None: none does."""
        return min((begin for group in self._waiting.values() for _, begin in group.values()), default=None)


class Intervals:
    """Keeps the lines that count; of more than MOST_INTERVALS steps, sums of neighbours."""

    def __init__(self) -> None:
        self._steps: dict[int, dict[int, RankLine]] = {}
        self._restarts = Restarts()

    def add(self, line: RankLine) -> None:
        """Takes a line in the order in which lines were written."""
        if self._restarts.is_first(line):
            self._steps = {s: lines for s, lines in self._steps.items() if s <= line.first_step}
        self._steps.setdefault(line.step, {})[line.rank] = line
        if len(self._steps) > MOST_INTERVALS:
            self._halve()

    def lines(self) -> list[RankLine]:
        """By step and rank."""
        return [self._steps[step][rank] for step in sorted(self._steps) for rank in sorted(self._steps[step])]

    def _halve(self) -> None:
        """Puts neighbours together, but not the newest, for which there may be lines to come."""
        steps = sorted(self._steps)
        for earlier, later in zip(steps[:-2:2], steps[1:-2:2], strict=False):
            one, other = self._steps[earlier], self._steps[later]
            if all(rank in one and line.first_step == earlier for rank, line in other.items()):
                self._steps[later] = {rank: sum_intervals([one[rank], line]) for rank, line in other.items()}
                del self._steps[earlier]


def sum_intervals(lines: list[RankLine]) -> RankLine:
    """One rank's intervals as one: seconds, steps, phases and lookups summed; the rest as of the last.

    Args:
        lines: of one rank, in the order of their steps.
    """
    tables = {}
    for name in dict.fromkeys(name for line in lines for name in line.tables):
        entries = [line.tables.get(name, {}) for line in lines]
        tables[name] = entries[-1] | {key: sum(entry.get(key) or 0.0 for entry in entries) for key in LOADS}
    return replace(
        lines[-1],
        first_step=lines[0].first_step,
        steps=sum(line.steps for line in lines),
        seconds=sum(line.seconds for line in lines),
        phases_s={phase: sum(line.phases_s.get(phase, 0.0) for line in lines) for phase in PHASES},
        tables=tables,
    )


class History:
    """The messages of a run; of steps that were trained again, the later ones.

    Attributes:
        failures: all failed checks, those of steps that were trained again, too.
        events: messages of events.jsonl, as they were written.
        progress: (unix_s, step) of all training figures as they were written, going back included.
        result: the content of result.json; empty until the run has finished.
    """

    def __init__(self) -> None:
        self.failures: list[Outcome] = []
        self.events: list[RunEvent] = []
        self.progress: list[tuple[float, int]] = []
        self.result: dict[str, Any] = {}
        self._metrics: dict[str, list[Measured]] = {}
        self._checks: dict[str, list[Outcome]] = {}
        self._intervals = Intervals()

    def add(self, message: Message) -> None:
        """Takes a message in the order in which messages were written."""
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
        """Lines of metrics.jsonl of these kinds (messages.Train, Eval, Final, …), by step."""
        found = [line for kind in kinds for line in self._metrics.get(kind.KIND, [])]
        return sorted(found, key=lambda line: line.step)

    @property
    def ranks(self) -> list[RankLine]:
        """Lines of ranks.jsonl, by step and rank; of a long run, neighbours are put together."""
        return self._intervals.lines()

    @property
    def checks(self) -> list[Outcome]:
        """Lines of checks.jsonl, by check and step."""
        return [line for lines in self._checks.values() for line in lines]

    @property
    def starts(self) -> list[Start]:
        """When groups of workers began to train."""
        return [event for event in self.events if isinstance(event, Start)]

    @property
    def restarts(self) -> list[int]:
        """Steps at which the run began again: after a failure, a resize, or with --resume."""
        return [start.step for start in self.starts[1:]]

    @property
    def step(self) -> int:
        """The last step that figures were recorded of; 0 before the first."""
        return max((lines[-1].step for lines in self._metrics.values()), default=0)

    @property
    def total_steps(self) -> int:
        """Of the whole run; 0 before it begins to train."""
        return self.starts[-1].total if self.starts else 0

    @property
    def metrics_of_tasks(self) -> list[Figure]:
        """The metrics that have been recorded, as the run has described them."""
        described = [start.line() for start in reversed(self.starts)]
        given = {key for lines in self._metrics.values() for line in lines for key in line.figures}
        given |= {key.removeprefix(EVAL) for key in self.result}
        return [figure for figure in figures_of(*described, self.result) if figure.key in given]


def _replace_later(lines: list[Any], line: Any) -> None:
    """Adds a line in the place of those of its step and of later steps."""
    while lines and lines[-1].step >= line.step:
        lines.pop()
    lines.append(line)
