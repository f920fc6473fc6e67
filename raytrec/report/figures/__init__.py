"""Figures of a run: functions from RunFolder to Figure, or None without data; GALLERY lists them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from matplotlib.figure import Figure

from raytrec.report.figures import learning, tables, timeline
from raytrec.tracking.run_folder import RunFolder


@dataclass(frozen=True)
class Picture:
    """Entry of the gallery.

    Attributes:
        name: Name of the file.
        section: Section of the report.
        label: Description for screen readers.
        draw: Function that returns the Figure, or None without data.
        missing: Reason shown if there is no data.
    """

    name: str
    section: str
    label: str
    draw: Callable[[RunFolder], Figure | None]
    missing: str


NO_METRICS = "metrics.jsonl has no figure of training or evaluation at two steps: see the result"
NO_RANKS = "ranks.jsonl has no intervals: too short a run, or tracking is off"
NO_CURVES = "no evaluation in metrics.jsonl has this curve (labels must be both 0 and 1)"
NO_TABLES = "ranks.jsonl has no such figures of tables, or of one interval: see the table below"

GALLERY = (
    Picture("curves", "learning", "Metrics over steps", learning.curves, NO_METRICS),
    Picture("ratios", "learning", "Metrics that should be 1, over steps", learning.ratios, NO_METRICS),
    Picture("reliability", "learning", "Predicted and actual rates", learning.reliability, NO_CURVES),
    Picture("roc", "learning", "ROC curve", learning.roc, NO_CURVES),
    Picture("speed", "speed", "Rows a second over steps", timeline.throughput, NO_METRICS),
    Picture("phases", "speed", "Time in each phase, by rank", timeline.in_total, NO_RANKS),
    Picture("phases_over_steps", "speed", "Time in each phase, over steps", timeline.over_steps, NO_RANKS),
    Picture("memory_map", "tables", "Memory of tables by rank", tables.by_memory, NO_TABLES),
    Picture("load_map", "tables", "Lookups of tables by rank", tables.by_load, NO_TABLES),
    Picture("row_norms", "tables", "Norms of rows over steps", tables.row_norms, NO_TABLES),
    Picture("health", "tables", "Dead rows, distinct ids, gradients, updates", tables.health, NO_TABLES),
    Picture("checks", "checks", "Checks over steps", timeline.checks, "checks.jsonl has no checks"),
    Picture(
        "timeline", "timeline", "Workers and steps over time", timeline.elastic, "events.jsonl has no events"
    ),
)
