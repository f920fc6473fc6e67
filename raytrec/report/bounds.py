"""What bounds a run: where its time went, and how near that came to what the machine can do.

The time of a run, from its start to its result, is divided into five parts (docs/monitoring.md defines them).
Of those that are work the ranks have measured how long a step's share takes at the best rate of their machine
(worker/limits.py). That time ÷ the time it took is the share of the limit that was reached.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from raytrec.common.formatting import duration, or_0, percent
from raytrec.tracking.aggregate import phases_of

DENSE, TABLES, EXCHANGE = "dense arithmetic", "table bandwidth", "exchange"
INGEST, START = "ingest", "start"
PHASES_OF = {
    DENSE: ("forward", "backward", "optimizer"),
    TABLES: ("tables",),
    EXCHANGE: ("input_exchange", "collectives"),
    INGEST: ("data", "copy"),
}
LIMITS = {
    DENSE: "this machine's matrix rate",
    TABLES: "this machine's rate for random rows",
    EXCHANGE: "the speed of its collectives by themselves",
}


@dataclass
class Times:
    """Where the time of a run's steps went: means over the ranks that there were.

    Attributes:
        seconds: phase → seconds; without the first step of each group of workers, which sets everything up.
        steps: that these were; a step that was trained twice counts twice.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    steps: float = 0.0

    def add(self, line: Mapping[str, Any]) -> None:
        """Adds a line of ranks.jsonl."""
        ranks, first = max(1.0, or_0(line.get("world"))), line.get("first_s")
        first = first if isinstance(first, dict) else {}
        for phase, seconds in phases_of(dict(line)).items():
            own = max(0.0, seconds - or_0(first.get(phase)))
            self.seconds[phase] = self.seconds.get(phase, 0.0) + own / ranks
        self.steps += (or_0(line.get("steps")) - bool(first)) / ranks


@dataclass(frozen=True)
class Part:
    """A part of the time.

    Attributes:
        seconds: of the run. share: of its whole time.
        at_limit_s: that the same work takes at the machine's limit; None: none was measured.
    """

    seconds: float
    share: float
    at_limit_s: float | None = None

    @property
    def of_limit(self) -> float | None:
        """The share of the limit that was reached; above 1 where what was measured is slower."""
        return self.at_limit_s / self.seconds if self.at_limit_s and self.seconds else None

    def record(self) -> dict[str, float | None]:
        """As JSON."""
        return {"seconds": self.seconds, "share": self.share, "of_limit": self.of_limit}


def find_bound(
    times: Times, limits: Mapping[str, Any], wall_s: float, rows_per_s: float | None
) -> dict[str, Any]:
    """The figures `bound.…` of result.json; empty where no step was timed.

    Args:
        limits: of worker.limits.Limits.measure.
        wall_s: of the run, from its start to its result.
        rows_per_s: in training.
    """
    if not times.steps:
        return {}
    parts = divide(times, limits, wall_s)
    by = max(parts, key=lambda name: parts[name].seconds)
    return {
        "bound.by": by,
        "bound.share": parts[by].share,
        "bound.of_limit": parts[by].of_limit,
        "bound.sentence": say(parts, by, rows_per_s),
        "bound.parts": {name: part.record() for name, part in parts.items()},
        "bound.limits": dict(limits),
    }


def divide(times: Times, limits: Mapping[str, Any], wall_s: float) -> dict[str, Part]:
    """The five parts of a run's time."""
    seconds = {
        part: sum(times.seconds.get(phase, 0.0) for phase in phases) for part, phases in PHASES_OF.items()
    }
    moved = times.seconds.get("optimizer", 0.0) * or_0(limits.get("optimizer_table_share"))
    seconds[DENSE] -= moved
    seconds[TABLES] += moved
    seconds[START] = max(0.0, wall_s - sum(seconds.values()))
    of_a_step = {
        DENSE: _quotient(limits, "dense_flop", "matrix_flop_per_s"),
        TABLES: _quotient(limits, "table_bytes", "gather_bytes_per_s"),
        EXCHANGE: or_0(limits.get("exchange_s")),
    }
    whole = max(wall_s, sum(seconds.values()), 1e-9)
    return {
        name: Part(spent, spent / whole, of_a_step.get(name, 0.0) * times.steps or None)
        for name, spent in seconds.items()
    }


def say(parts: Mapping[str, Part], by: str, rows_per_s: float | None) -> str:
    """The bound as a sentence; where it is the start, with that of the steps themselves."""
    if by != START:
        return f"bound by {_words(parts, by, parts[by].share, rows_per_s)}"
    steps = {name: part for name, part in parts.items() if name != START}
    inner = max(steps, key=lambda name: steps[name].seconds)
    whole = sum(part.seconds for part in steps.values())
    text = f"bound by start: {percent(parts[START].share)} of the time, {duration(parts[START].seconds)}, "
    text += "went into start-up, restarts, checkpoints and evaluation"
    if not whole:
        return text
    return f"{text}; steps by {_words(parts, inner, steps[inner].seconds / whole, rows_per_s)}"


def _words(parts: Mapping[str, Part], name: str, share: float, rows_per_s: float | None) -> str:
    text = f"{name}: {percent(share)} of the time"
    if name == INGEST:
        return f"{text}, waiting for batches" + (f", at {rows_per_s:,.0f} rows/s" if rows_per_s else "")
    reached = parts[name].of_limit
    return text if reached is None else f"{text}, at {percent(reached)} of {LIMITS[name]}"


def _quotient(limits: Mapping[str, Any], work: str, rate: str) -> float:
    return or_0(limits.get(work)) / rate_ if (rate_ := or_0(limits.get(rate))) else 0.0
