"""The messages of a run, in memory; of steps that were trained again, the later ones."""

from __future__ import annotations

from typing import Any

from raytrec.common.messages import Check, Measured, Message, RankLine, RunEvent, Start, Train
from raytrec.metrics.selection import EVAL, Figure, figures_of
from raytrec.tracking.intervals import Intervals


class History:
    """The messages of a run; of steps that were trained again, the later ones.

    Attributes:
        failures: all failed checks, those of steps that were trained again, too.
        events: messages of events.jsonl, as they were written.
        progress: (unix_s, step) of all training figures as they were written, going back included.
        result: the content of result.json; empty until the run has finished.
    """

    def __init__(self) -> None:
        self.failures: list[Check] = []
        self.events: list[RunEvent] = []
        self.progress: list[tuple[float, int]] = []
        self.result: dict[str, Any] = {}
        self._metrics: dict[str, list[Measured]] = {}
        self._checks: dict[str, list[Check]] = {}
        self._intervals = Intervals()

    def add(self, message: Message) -> None:
        """Takes a message in the order in which messages were written."""
        if isinstance(message, RankLine):
            self._intervals.add(message)
        elif isinstance(message, Check):
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
    def checks(self) -> list[Check]:
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
