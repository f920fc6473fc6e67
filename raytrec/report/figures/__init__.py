"""Plots of a run. GALLERY lists the functions that draw them from a RunFolder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from matplotlib.figure import Figure

from raytrec.report.figures import learning, tables, timeline
from raytrec.tracking.run_folder import RunFolder


@dataclass(frozen=True)
class GalleryEntry:
    """Plot in a report, and the function that draws it.

    Attributes:
        name: Name of the file, without a suffix.
        section: Section of the report that shows the plot.
        label: Description for screen readers.
        draw: Function that draws the plot of a run, or returns None without data.
        missing: Reason that the report shows if there is no data.
    """

    name: str
    section: str
    label: str
    draw: Callable[[RunFolder], Figure | None]
    missing: str


NO_METRICS = "metrics.jsonl contains none of these metrics at two or more steps; see the result"
NO_RANKS = "ranks.jsonl contains no intervals: the first is not complete, or tracking.every_steps is null"
NO_CURVES = "metrics.jsonl contains no such curve, which requires labels 0 and 1, and metric auc (ROC) or calibration"
NO_MAP = "ranks.jsonl contains no sizes or lookups of tables for the last group of workers"
NO_TABLES = "ranks.jsonl contains these table statistics for fewer than two intervals; see the table below"

GALLERY = (
    GalleryEntry("curves", "learning", "Metrics over steps", learning.curves, NO_METRICS),
    GalleryEntry("ratios", "learning", "Metrics that should be 1, over steps", learning.ratios, NO_METRICS),
    GalleryEntry("reliability", "learning", "Predicted and actual rates", learning.reliability, NO_CURVES),
    GalleryEntry("roc", "learning", "ROC curve", learning.roc, NO_CURVES),
    GalleryEntry("speed", "speed", "Rows per second over steps", timeline.draw_throughput, NO_METRICS),
    GalleryEntry("phases", "speed", "Time in each phase, by rank", timeline.draw_phase_totals, NO_RANKS),
    GalleryEntry(
        "phases_over_steps", "speed", "Time in each phase, over steps", timeline.draw_phases_over_steps, NO_RANKS
    ),
    GalleryEntry("memory_map", "tables", "Table memory by rank", tables.draw_memory, NO_MAP),
    GalleryEntry("load_map", "tables", "Table lookups by rank", tables.draw_load, NO_MAP),
    GalleryEntry("row_norms", "tables", "Row norms over steps", tables.draw_row_norms, NO_TABLES),
    GalleryEntry("health", "tables", "Dead rows, distinct ids, gradients, updates", tables.health, NO_TABLES),
    GalleryEntry("checks", "checks", "Checks over steps", timeline.checks, "checks.jsonl contains no checks"),
    GalleryEntry(
        "timeline",
        "timeline",
        "Workers and steps over time",
        timeline.draw_elastic_timeline,
        "events.jsonl contains no start of workers",
    ),
)
