"""The parts of a run's time, and the largest of them.

The time of a run, from its start to its result, is divided into five parts (docs/monitoring.md defines them).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from raytrec.common.formatting import duration, percent
from raytrec.common.messages import RankLine, recorded_ranks

INGEST, START = "ingest", "start"
PHASES_OF = {
    "dense model": ("forward", "backward", "optimizer"),
    "tables": ("tables",),
    "exchange": ("input_exchange", "collectives"),
    INGEST: ("data", "copy"),
}


@dataclass
class Times:
    """Where the time of a run's steps went: means over the ranks.

    Attributes:
        seconds: phase → seconds; without the first step of each group of workers, which sets everything up.
        steps: that these were; a step that was trained twice counts twice.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    steps: float = 0.0

    def add(self, line: RankLine) -> None:
        """Adds a line of ranks.jsonl."""
        ranks = max(1, len(recorded_ranks(line.world)))
        for phase, seconds in line.phases_s.items():
            own = max(0.0, seconds - line.first_s.get(phase, 0.0))
            self.seconds[phase] = self.seconds.get(phase, 0.0) + own / ranks
        self.steps += (line.steps - bool(line.first_s)) / ranks


def find_bound(times: Times, wall_s: float, rows_per_s: float | None) -> dict[str, Any]:
    """The figures `bound.…` of result.json; empty where no step was timed.

    Args:
        wall_s: of the run, from its start to its result.
        rows_per_s: in training.
    """
    if not times.steps:
        return {}
    seconds = {
        part: sum(times.seconds.get(phase, 0.0) for phase in phases) for part, phases in PHASES_OF.items()
    }
    in_steps = sum(seconds.values())
    seconds[START] = max(0.0, wall_s - in_steps)
    whole = max(wall_s, in_steps, 1e-9)
    by = max(seconds, key=lambda part: seconds[part])
    return {
        "bound.by": by,
        "bound.share": seconds[by] / whole,
        "bound.sentence": _sentence(seconds, by, whole, rows_per_s),
        "bound.parts": {part: {"seconds": s, "share": s / whole} for part, s in seconds.items()},
    }


def _sentence(seconds: Mapping[str, float], by: str, whole: float, rows_per_s: float | None) -> str:
    """The bound in words; where it is the start, with that of the steps themselves."""
    if by != START:
        return f"bound by {_words(seconds, by, whole, rows_per_s)}"
    text = f"bound by start: {percent(seconds[START] / whole)} of the time, {duration(seconds[START])}, "
    text += "went into start-up, restarts, checkpoints and evaluation"
    steps = {part: s for part, s in seconds.items() if part != START}
    if not (whole := sum(steps.values())):
        return text
    return f"{text}; steps by {_words(steps, max(steps, key=lambda part: steps[part]), whole, rows_per_s)}"


def _words(seconds: Mapping[str, float], part: str, whole: float, rows_per_s: float | None) -> str:
    text = f"{part}: {percent(seconds[part] / whole)} of the time"
    if part != INGEST:
        return text
    return f"{text}, waiting for batches" + (f", at {rows_per_s:,.0f} rows/s" if rows_per_s else "")
