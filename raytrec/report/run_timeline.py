"""What happened to a run, put together from its events: groups of workers, faults, saves, pauses."""

from __future__ import annotations

from dataclasses import dataclass
from math import isnan
from typing import Any

from raytrec.common.formatting import is_step, number
from raytrec.report.history import History, when

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
    """A run as it went.

    Attributes:
        progress: (second of the run, step), going back included.
    """

    groups: list[Group]
    marks: list[Mark]
    progress: list[tuple[float, int]]

    @property
    def restarts(self) -> int:
        """How often a group was started again."""
        return max(0, len(self.groups) - 1)

    def count(self, kind: str) -> int:
        """How often something happened."""
        return sum(mark.kind == kind for mark in self.marks)


def story(history: History) -> Story:
    """The story of a run; empty where nothing was recorded."""
    events = [e for e in history.events if not isnan(when(e))]
    trained = [(t, step) for t, step in history.progress if not isnan(t)]
    events, trained = _forward(events, trained)
    records = sorted([e["unix_s"] for e in events] + [t for t, _ in trained])
    if not records:
        return Story([], [], [])
    clock = _Clock(records[0])
    groups = _groups(events, records, clock)
    known = [e for e in events if e.get("event") in ("start", "saved") and is_step(e.get("step"))]
    progress = [(clock(t), step) for t, step in trained] + [(clock(e["unix_s"]), e["step"]) for e in known]
    marks = [_mark(e, clock) for e in events if e.get("event") not in ("start", "started")]
    return Story(groups, marks, sorted(progress))


def _forward(
    events: list[dict[str, Any]], trained: list[tuple[float, int]]
) -> tuple[list[dict[str, Any]], list[tuple[float, int]]]:
    """Both with times that never go back. Where the clock of a new group of workers is behind that of the
    group before, later times are moved as if no time had passed in between."""
    later, latest = [0.0], 0.0  # seconds by which times are moved, up to each place where the clock went back
    moved = []
    for event in events:
        if event.get("event") == "started" and event["unix_s"] + later[-1] < latest:
            later.append(latest - event["unix_s"])
        moved.append({**event, "unix_s": event["unix_s"] + later[-1]})
        latest = max(latest, moved[-1]["unix_s"])
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


def _groups(events: list[dict], records: list[float], clock: _Clock) -> list[Group]:
    starts = [e for e in events if e.get("event") == "started"]
    groups = []
    for index, start in enumerate(starts):
        begin = start["unix_s"]
        before = max((t for t in records if t < begin), default=begin)
        pause = begin - before if index and start.get("attempt") == 1 and begin - before > PAUSE_S else None
        if pause:
            clock.cut(before, begin)
        following = starts[index + 1]["unix_s"] if index + 1 < len(starts) else float("inf")
        down = [e["unix_s"] for e in events if e.get("event") in DOWN and begin < e["unix_s"] <= following]
        last = max((t for t in records if begin < t < following), default=begin)
        workers = number(start.get("workers"))
        groups.append(
            Group(clock(begin), clock(min(down, default=last)), int(0 if isnan(workers) else workers), pause)
        )
    return groups


def _mark(event: dict[str, Any], clock: _Clock) -> Mark:
    kind, step = str(event.get("event")), event.get("step")
    failed_save = kind == "saved" and bool(event.get("error"))
    text = next((str(event[key]) for key in ("error", "cause", "reason") if event.get(key)), "")
    return Mark(
        clock(event["unix_s"]),
        "not saved" if failed_save else kind,
        text,
        step if is_step(step) else None,
        failed_save or kind in ("failed", "hang"),
    )
