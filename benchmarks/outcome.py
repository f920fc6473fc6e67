"""What faults did to a run, as figures and as a table."""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from faults import GOES_ON
from rich.console import Console
from rich.table import Table
from watched import Run

TAKEN_APART, MOMENTS = "worker killed", ("failed", "started", "start")
PARTS = ("notice", "restart", "build and restore", "first step")  # before, between and after the moments


@dataclass
class Fault:
    """What happened, and what the run made of it.

    Attributes:
        kind: a key of FAULTS.
        unix_s: when.
        step: the last that had been trained then.
        notice_s: until the run said so in events.jsonl.
        again_s: until the first step of the next worker group (or the next step, where it goes on).
        pause_s: between two steps, around the restart.
        steps_lost: steps that were trained again.
        workers: before, and when it was over.
        parts: again_s in pieces, PARTS.
    """

    kind: str
    unix_s: float
    step: int
    notice_s: float | None = None
    again_s: float | None = None
    pause_s: float | None = None
    steps_lost: int = 0
    workers: tuple[int, int] = (0, 0)
    parts: dict[str, float] = field(default_factory=dict)


def measure(run: Run, fault: Fault, seen: tuple[str, ...]) -> None:
    """Fills in what became of it."""
    attempts, at = run.record.look(), fault.unix_s
    events = run.events(at)
    if fault.kind in GOES_ON:
        events = [event for event in events if event.get("error")]
        fault.again_s = min(t for attempt in attempts for t in attempt.times.values() if t > at) - at
    when = {event["event"]: event["unix_s"] - at for event in reversed(events)}  # the first of each
    fault.notice_s = next((when[event] for event in seen if event in when), None)
    before = [attempt for attempt in attempts if attempt.began <= at]
    fault.workers = before[-1].world, attempts[-1].world
    for one, other in pairwise(attempts[len(before) - 1 :]):
        if fault.again_s is None:
            fault.again_s, fault.pause_s = other.began - at, other.began - max(one.times.values())
        fault.steps_lost += one.last + 1 - other.first
    if fault.kind == TAKEN_APART and when.keys() >= set(MOMENTS):
        pieces = np.diff([0.0, *(when[name] for name in MOMENTS), fault.again_s]).tolist()
        fault.parts = dict(zip(PARTS, pieces, strict=True))


def show(faults: list[Fault], outcome: dict, seconds: float) -> None:
    """Every fault, the kinds' medians, where the time after a killed worker goes, and what it came to."""
    console = Console(width=None if sys.stdout.isatty() else 110)
    names = ("noticed", "training again", "pause", "steps lost")
    every = _table(f"{len(faults)} faults in {seconds} s", "fault", "step", "workers", *names)
    for f in faults:
        where = str(f.step), f"{f.workers[0]} → {f.workers[1]}"
        every.add_row(f.kind, *where, *map(_seconds, (f.notice_s, f.again_s, f.pause_s)), str(f.steps_lost))
    kinds = _table("medians", "kind", "times", *names)
    for kind, m in medians(faults).items():
        times = map(_seconds, (m["notice_s"], m["again_s"], m["pause_s"]))
        kinds.add_row(kind, str(m["times"]), *times, f"{m['steps_lost']:g}")
    console.print(every, kinds)
    if parts := recovery(faults):
        pieces = ", ".join(f"{part} {value:.1f} s" for part, value in parts.items())
        console.print(f"after a killed worker (medians): {pieces}", highlight=False)
    for name, value in outcome.items():
        console.print(f"{name}: {value:.6g}" if isinstance(value, float) else f"{name}: {value:,}")


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title)
    for i, name in enumerate(columns):
        table.add_column(name, justify="right" if i else "left", no_wrap=True)
    return table


def medians(faults: list[Fault]) -> dict[str, dict]:
    """By kind."""
    out = {}
    for kind in sorted({fault.kind for fault in faults}):
        each = [fault for fault in faults if fault.kind == kind]
        out[kind] = {"times": len(each)}
        for name in ("notice_s", "again_s", "pause_s", "steps_lost"):
            values = [v for f in each if (v := getattr(f, name)) is not None]
            out[kind][name] = statistics.median(values) if values else None
    return out


def recovery(faults: list[Fault]) -> dict[str, float]:
    """Where the time between SIGKILL and the next step goes: the median of each part."""
    each = [fault.parts for fault in faults if fault.parts]
    return {part: statistics.median(parts[part] for parts in each) for part in PARTS} if each else {}


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f} s"
