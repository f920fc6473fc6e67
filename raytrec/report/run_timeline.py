"""Timeline of a run, reconstructed from its events. Long pauses between two drivers of the run are left out."""

from __future__ import annotations

from dataclasses import dataclass, replace

from raytrec.common.formatting import is_step
from raytrec.common.messages import Event, RunEvent, Saved, Start
from raytrec.tracking.run_folder import RunFolder

DOWN_EVENTS = ("failed", "hang", "stopped")  # events after which no worker is running
PAUSE_S = 300.0  # longer pauses between two drivers are left out of the timeline


@dataclass(frozen=True)
class Group:
    """Group of workers and its interval in the timeline.

    Attributes:
        begin_s: Start of the group, in seconds since the start of the run; omitted pauses do not count.
        end_s: Failure, hang or stop of the group, or else its last recorded message; in seconds as in `begin_s`.
        workers: Number of workers; 0 if unknown.
        resumed_after_s: Length in seconds of the omitted pause before the group; None if no pause is omitted.
    """

    begin_s: float
    end_s: float
    workers: int
    resumed_after_s: float | None = None


@dataclass(frozen=True)
class Mark:
    """Event in the timeline of a run.

    Attributes:
        at_s: Time of the event, in seconds as in `Group.begin_s`.
        kind: Name of the event; "saved" for a save, and "not saved" for a failed save.
        text: Error, cause or reason; "" if none is recorded.
        step: Step of the event; None if none is recorded.
        bad: True for failures, hangs and failed saves.
    """

    at_s: float
    kind: str
    text: str
    step: int | None
    bad: bool


@dataclass(frozen=True)
class RunTimeline:
    """Timeline of a run.

    Attributes:
        groups: Groups of workers, in the order of their starts.
        marks: Events other than starts, in the order of writing.
        progress: (seconds as in `Group.begin_s`, step) pairs by time; steps can decrease after a failure.
    """

    groups: list[Group]
    marks: list[Mark]
    progress: list[tuple[float, int]]

    @property
    def restarts(self) -> int:
        """Return the number of groups that were started after the first group."""
        return max(0, len(self.groups) - 1)

    def count(self, kind: str) -> int:
        """Return the number of marks of a kind."""
        return sum(mark.kind == kind for mark in self.marks)


def build_timeline(run: RunFolder) -> RunTimeline:
    """Return the timeline of a run; empty if no message with a time was recorded."""
    timed = [event for event in run.events if event.unix_s is not None]
    events, trained = _make_times_monotonic(timed, run.progress)
    records = sorted([event.unix_s for event in events] + [t for t, _ in trained])
    if not records:
        return RunTimeline([], [], [])
    clock = _Clock(records[0])
    groups = _build_groups(events, records, clock)
    progress = [(clock(t), step) for t, step in trained]
    progress += [(clock(event.unix_s), event.step) for event in events if isinstance(event, (Start, Saved))]
    marks = [_build_mark(event, clock) for event in events if _get_kind(event) not in ("start", "started")]
    return RunTimeline(groups, marks, sorted(progress))


def _get_kind(event: RunEvent) -> str:
    return event.event if isinstance(event, Event) else event.KIND


def _make_times_monotonic(
    events: list[RunEvent], trained: list[tuple[float, int]]
) -> tuple[list[RunEvent], list[tuple[float, int]]]:
    """Return events and (time, step) pairs, shifted so that no group of workers begins before an earlier event.

    The clock of a new group can be behind the clock of the previous group. The times of the new group are then
    shifted as if no time had passed between the groups.
    """
    shifts, latest = [0.0], 0.0  # shift in seconds after each backward jump of the clock
    moved = []
    for event in events:
        if _get_kind(event) == "started" and event.unix_s + shifts[-1] < latest:
            shifts.append(latest - event.unix_s)
        moved.append(replace(event, unix_s=event.unix_s + shifts[-1]))
        latest = max(latest, moved[-1].unix_s)
    jump, previous, steps = 0, 0.0, []
    for at, step in trained:
        jump = min(jump + (at < previous), len(shifts) - 1)
        previous = at
        steps.append((at + shifts[jump], step))
    return moved, steps


class _Clock:
    """Converter from Unix times to seconds since `begin`, without the pauses passed to `cut`."""

    def __init__(self, begin: float):
        self._begin = begin
        self._pauses: list[tuple[float, float]] = []  # (end of a pause, length of the pause in seconds)

    def cut(self, begin: float, end: float) -> None:
        """Leave the pause between the Unix times `begin` and `end` out of later conversions."""
        self._pauses.append((end, end - begin))

    def __call__(self, unix_s: float) -> float:
        return unix_s - self._begin - sum(length for end, length in self._pauses if unix_s >= end)


def _build_groups(events: list[RunEvent], records: list[float], clock: _Clock) -> list[Group]:
    starts = [event for event in events if _get_kind(event) == "started"]
    groups = []
    for index, start in enumerate(starts):
        begin = start.unix_s
        previous = max((t for t in records if t < begin), default=begin)
        first = index and start.values().get("attempt") == 1  # first group of another driver
        pause = begin - previous if first and begin - previous > PAUSE_S else None
        if pause:
            clock.cut(previous, begin)
        following = starts[index + 1].unix_s if index + 1 < len(starts) else float("inf")
        down = [e.unix_s for e in events if _get_kind(e) in DOWN_EVENTS and begin < e.unix_s <= following]
        last = max((t for t in records if begin < t < following), default=begin)
        workers = start.values().get("workers")
        end = clock(min(down, default=last))
        groups.append(Group(clock(begin), end, workers if is_step(workers) else 0, pause))
    return groups


def _build_mark(event: RunEvent, clock: _Clock) -> Mark:
    kind, values = _get_kind(event), event.values()
    step, failed_save = values.get("step"), kind == "saved" and bool(values.get("error"))
    text = next((str(value) for key in ("error", "cause", "reason") if (value := values.get(key))), "")
    return Mark(
        clock(event.unix_s),
        "not saved" if failed_save else kind,
        text,
        step if is_step(step) else None,
        failed_save or kind in ("failed", "hang"),
    )
