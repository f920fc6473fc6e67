"""Plots and tables that show how faults affect a run."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from faults import GOES_ON
from harness import Grid
from watched import Run

TAKEN_APART, MOMENTS = "worker killed", ("failed", "started", "start")
PARTS = ("notice", "restart", "build and restore", "first step")  # before, between and after the moments


@dataclass
class Fault:
    """Injected fault, and the time and steps that the run needed to recover from it.

    Attributes:
        kind: Kind of fault, a key of FAULTS.
        unix_s: Time of the fault, in seconds since 1970.
        step: Last step before the fault.
        notice_s: Seconds until the run recorded the fault in events.jsonl; None if the run did not record it.
        again_s: Seconds until the first step of the next worker group (or next step if the run continues).
        pause_s: Seconds between the last step before the restart and the first step after it; None without
            a restart.
        steps_lost: Number of steps that were trained again.
        workers: Numbers of workers before the fault and after the recovery.
        parts: Name in PARTS → seconds of this part of again_s; {} unless `kind` is TAKEN_APART.
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


def measure(run: Run, fault: Fault, event_names: tuple[str, ...]) -> None:
    """Record the run's reaction in `fault`."""
    attempts, at = run.record.look(), fault.unix_s
    events = run.events(at)
    if fault.kind in GOES_ON:
        events = [event for event in events if event.get("error")]
        fault.again_s = min(t for attempt in attempts for t in attempt.times.values() if t > at) - at
    when = {event["event"]: event["unix_s"] - at for event in reversed(events)}  # the first of each
    fault.notice_s = next((when[event] for event in event_names if event in when), None)
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
    """Print every fault, the medians for each kind, the parts of a recovery, and the outcome."""
    names = ("noticed", "training again", "pause", "steps lost")
    every, kinds = [], []
    for f in faults:
        workers, lost = f"{f.workers[0]} → {f.workers[1]}", str(f.steps_lost)
        every.append([f.kind, str(f.step), workers, *map(_seconds, (f.notice_s, f.again_s, f.pause_s)), lost])
    for kind, m in medians(faults).items():
        times = map(_seconds, (m["notice_s"], m["again_s"], m["pause_s"]))
        kinds.append([kind, str(m["times"]), *times, f"{m['steps_lost']:g}"])
    Grid(("fault", "step", "workers", *names), every, f"{len(faults)} faults in {seconds} s").show(110)
    Grid(("kind", "times", *names), kinds, "medians").show(110)
    if parts := recovery(faults):
        pieces = ", ".join(f"{part} {value:.1f} s" for part, value in parts.items())
        print(f"after a killed worker (medians): {pieces}")
    for name, value in outcome.items():
        print(f"{name}: {value:.6g}" if isinstance(value, float) else f"{name}: {value:,}")


def medians(faults: list[Fault]) -> dict[str, dict]:
    """Return a mapping from kind of fault to the number of faults and medians."""
    out = {}
    for kind in sorted({fault.kind for fault in faults}):
        each = [fault for fault in faults if fault.kind == kind]
        out[kind] = {"times": len(each)}
        for name in ("notice_s", "again_s", "pause_s", "steps_lost"):
            values = [v for f in each if (v := getattr(f, name)) is not None]
            out[kind][name] = statistics.median(values) if values else None
    return out


def recovery(faults: list[Fault]) -> dict[str, float]:
    """Return the median seconds of each part of the time between SIGKILL and the next step; {} if unknown."""
    each = [fault.parts for fault in faults if fault.parts]
    return {part: statistics.median(parts[part] for parts in each) for part in PARTS} if each else {}


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f} s"
