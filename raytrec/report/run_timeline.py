"""The course of a run, from its events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from raytrec.common.formatting import is_step
from raytrec.common.messages import Event, RunEvent, Saved, Start
from raytrec.tracking.run_folder import RunFolder

DOWN = ("failed", "hang", "stopped")  # events after which no worker is left
PAUSE_S = 300.0  # between a driver that ended and the next one: a longer wait is cut out of the timeline


@dataclass(frozen=True)
class Group:
    """A group of workers, from its start to its end, in seconds of the run.

    Attributes:
        resumed_after_s: how long there was no driver before it, where that was cut out.
    """

    begin_s: float
    end_s: float
    workers: int
    resumed_after_s: float | None = None


@dataclass(frozen=True)
class Mark:
    """Something that happened, at a second of the run.

    Attributes:
        kind: the event.
        bad: whether it cost work.
    """

    at_s: float
    kind: str
    text: str
    step: int | None
    bad: bool


@dataclass(frozen=True)
class Story:
    """The course of a run.

    Attributes:
        progress: (second of the run, step), going back included.
    """

    groups: list[Group]
    marks: list[Mark]
    progress: list[tuple[float, int]]

    @property
    def restarts(self) -> int:
        """The number of times a group was started again."""
        return max(0, len(self.groups) - 1)

    def count(self, kind: str) -> int:
        """How often something happened."""
        return sum(mark.kind == kind for mark in self.marks)


def story(run: RunFolder) -> Story:
    """The story of a run; empty where nothing was recorded."""
    events = [_Timed(message.unix_s, message) for message in run.events if message.unix_s is not None]
    events, trained = _forward(events, run.progress)
    records = sorted([event.unix_s for event in events] + [t for t, _ in trained])
    if not records:
        return Story([], [], [])
    clock = _Clock(records[0])
    groups = _groups(events, records, clock)
    known = [event for event in events if isinstance(event.message, (Start, Saved))]
    progress = [(clock(t), step) for t, step in trained]
    progress += [(clock(event.unix_s), event.detail("step")) for event in known]
    marks = [_mark(event, clock) for event in events if event.kind not in ("start", "started")]
    return Story(groups, marks, sorted(progress))


class _Timed(NamedTuple):
    """A message of events.jsonl, and when it was, in seconds since 1970."""

    unix_s: float
    message: RunEvent

    @property
    def kind(self) -> str:
        """The event."""
        return self.message.event if isinstance(self.message, Event) else self.message.KIND

    def detail(self, name: str) -> Any:
        """One of the message's values; None where it has none of that name."""
        return self.message.values().get(name)


def _forward(
    events: list[_Timed], trained: list[tuple[float, int]]
) -> tuple[list[_Timed], list[tuple[float, int]]]:
    """Both with times that never go back. Where the clock of a new group of workers is behind that of the
    group before, later times are moved as if no time had passed in between."""
    later, latest = [0.0], 0.0  # seconds by which times are moved, up to each place where the clock went back
    moved = []
    for event in events:
        if event.kind == "started" and event.unix_s + later[-1] < latest:
            later.append(latest - event.unix_s)
        moved.append(event._replace(unix_s=event.unix_s + later[-1]))
        latest = max(latest, moved[-1].unix_s)
    place, before, steps = 0, 0.0, []
    for at, step in trained:
        place = min(place + (at < before), len(later) - 1)
        before = at
        steps.append((at + later[place], step))
    return moved, steps


class _Clock:
    """Seconds of the run, without the pauses in which there was no driver."""

    def __init__(self, begin: float):
        self._begin = begin
        self._pauses: list[tuple[float, float]] = []  # (where a pause ends, its seconds)

    def cut(self, begin: float, end: float) -> None:
        self._pauses.append((end, end - begin))

    def __call__(self, unix_s: float) -> float:
        return unix_s - self._begin - sum(length for end, length in self._pauses if unix_s >= end)


def _groups(events: list[_Timed], records: list[float], clock: _Clock) -> list[Group]:
    starts = [event for event in events if event.kind == "started"]
    groups = []
    for index, start in enumerate(starts):
        begin = start.unix_s
        before = max((t for t in records if t < begin), default=begin)
        first = index and start.detail("attempt") == 1  # of another driver
        pause = begin - before if first and begin - before > PAUSE_S else None
        if pause:
            clock.cut(before, begin)
        following = starts[index + 1].unix_s if index + 1 < len(starts) else float("inf")
        down = [event.unix_s for event in events if event.kind in DOWN and begin < event.unix_s <= following]
        last = max((t for t in records if begin < t < following), default=begin)
        workers = start.detail("workers")
        end = clock(min(down, default=last))
        groups.append(Group(clock(begin), end, workers if is_step(workers) else 0, pause))
    return groups


def _mark(event: _Timed, clock: _Clock) -> Mark:
    kind, step = event.kind, event.detail("step")
    failed_save = kind == "saved" and bool(event.detail("error"))
    text = next((str(value) for key in ("error", "cause", "reason") if (value := event.detail(key))), "")
    return Mark(
        clock(event.unix_s),
        "not saved" if failed_save else kind,
        text,
        step if is_step(step) else None,
        failed_save or kind in ("failed", "hang"),
    )
