"""Display forms of the metrics, counts and slice tables in result.json. This module does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from math import isnan
from typing import Any, NamedTuple

from raytrec.common.formatting import as_dict, as_list, parse_number
from raytrec.metrics.registry import BOUND_SUFFIX, COUNTED_ROWS, GROUPS, NO_POSITIVE, ONE_CLASS
from raytrec.metrics.selection import EVAL_PREFIX, RANKING_COUNT_KEYS, MetricDisplay, read_metric_displays

BRIEF, IF_NONZERO = "brief", "when any"  # shown also in a brief summary; shown only if the value is not 0
RANKED_ROWS, RANKED_ITEMS, UNKNOWN_ITEMS, UNKNOWN_SEEN = (EVAL_PREFIX + key for key in RANKING_COUNT_KEYS)
RESULT_TITLES = {  # values listed after the metrics: key → title, format, BRIEF or IF_NONZERO
    RANKED_ROWS: ("ranked rows", "{:,}", ""),
    RANKED_ITEMS: ("items in the ranking", "{:,}", ""),
    UNKNOWN_ITEMS: ("right items outside the ranking (never found)", "{:,}", IF_NONZERO),
    UNKNOWN_SEEN: ("seen items outside the ranking (not excluded)", "{:,}", IF_NONZERO),
    "eval.rows": ("rows evaluated", "{:,}", ""),
    "eval.skipped_rows": ("rows skipped in evaluation", "{:,}", IF_NONZERO),
    "train.rows": ("rows trained", "{:,}", ""),
    "train.skipped_rows": ("rows skipped in training", "{:,}", IF_NONZERO),
    "skipped_files": ("files skipped", "{:,}", IF_NONZERO),
    "train.nan_steps": ("steps skipped because of a non-finite loss", "{:,}", IF_NONZERO),
    "train.steps": ("steps", "{:,}", ""),
    "train.ended": ("training ended", "{}", ""),
    "train.samples_per_s": ("rows/s in training", "{:,.0f}", BRIEF),
    "train.flops_per_s": ("FLOP/s of matrix products in training", "{:.3g}", BRIEF),
    "train.mfu": ("share of the GPUs' peak FLOP/s (MFU)", "{:.1%}", BRIEF),
    "train.checks_passed": ("checks passed", "{:,}", IF_NONZERO),
    "train.checks_failed": ("checks failed", "{:,}", IF_NONZERO),
    "world_size": ("workers", "{}", ""),
    "seconds": ("total seconds", "{:.1f}", BRIEF),
    "bound.by": ("bound by", "{}", ""),
    "bound.share": ("share of the time", "{:.0%}", ""),
}
COUNT_TITLES = {  # counts listed with a task's metrics
    COUNTED_ROWS: "counted rows",
    GROUPS: "groups",
    NO_POSITIVE: "groups without a positive row (excluded)",
    ONE_CLASS: "groups with only one class (excluded)",
}
SLICES = "eval.slices"  # task → column → slices, largest, worst
SLICE_COLUMNS = {  # key in a slice record → title, format
    "slice": ("value", "{}"),
    "rows": ("rows", "{:,.0f}"),
    "auc": ("AUC", "{:.4f}"),
    "auc_bound": ("maximum error", "{:.1e}"),
    "calibration": ("calibration", "{:.4f}"),
}


class Row(NamedTuple):
    """Row in a table of results: one value of result.json in display form.

    Attributes:
        title: Title of the value.
        text: Value as text; "–" if the value is undefined.
        form: Format string of the value, as for str.format.
        brief: True if the value is also shown in a brief summary.
    """

    title: str
    text: str
    form: str
    brief: bool

    def difference(self, value: float, other: float) -> str:
        """Return the difference `value - other` of two numbers as text with a sign, in the format of this row."""
        form = self.form.replace("{:", "{:+") if "{:" in self.form else "{:+}"
        return form.format(value - other)


def format_result(result: Mapping[str, Any]) -> dict[str, Row]:
    """Return key → Row for each value in result.json to display: metrics with their counts, then RESULT_TITLES.

    Undefined values and 0 are omitted if their entry in RESULT_TITLES contains IF_NONZERO.
    """
    rows: dict[str, tuple[str, str, str]] = {}
    for figure in read_metric_displays(result):
        rows[EVAL_PREFIX + figure.key] = figure.title, figure.format, BRIEF if figure.is_directed else ""
        rows |= _list_metric_counts(figure)
    return {
        key: Row(title, as_text(result[key], form), form, when == BRIEF)
        for key, (title, form, when) in (rows | RESULT_TITLES).items()
        if key in result and (result[key] or when != IF_NONZERO)
    }


def _list_metric_counts(figure: MetricDisplay) -> dict[str, tuple[str, str, str]]:
    """Return the counts and error bound that can accompany a metric: key → (title, format, "")."""
    metric_key, of_task = EVAL_PREFIX + figure.key, figure.title.rpartition(": ")[0]
    counts = {metric_key + BOUND_SUFFIX: (f"{figure.title}: maximum error", "{:.1e}", "")}
    task = figure.key.rpartition(".")[0]
    for name, title in COUNT_TITLES.items():
        key = f"{EVAL_PREFIX}{task}.{name}" if task else EVAL_PREFIX + name
        counts[key] = (f"{of_task}: {title}" if task and of_task else title), "{:,}", ""
    return counts


def as_text(value: Any, form: str) -> str:
    """Return a value as text: numbers (parse_number) formatted with `form`, "–" for None, str(value) for other values.

    `form` is a format string with one replacement field, such as "{:,}".
    """
    if value is None:
        return "–"
    return str(value) if isnan(parse_number(value)) else form.format(value)


class Cell(NamedTuple):
    """Table cell: its text and the number by which the column is sorted (None: the column is sorted by text)."""

    text: str
    value: float | None = None


class DataTable(NamedTuple):
    """Table with column names and rows of cells."""

    columns: list[str]
    rows: list[list[Cell]]


def build_slice_tables(result: Mapping[str, Any]) -> list[tuple[str, DataTable]]:
    """Return (title, table) for the largest and the worst slices of each task and column in a result.

    Invalid entries of the result and empty lists of slices are skipped.
    """
    tasks = as_dict(result.get(SLICES))
    return [
        (
            f"{task}: {name} slices of {column} ({parse_number(slices.get('slices')):,.0f} values)",
            _build_slice_table(records),
        )
        for task, columns in tasks.items()
        for column, found in as_dict(columns).items()
        for slices in [as_dict(found)]
        for name in ("largest", "worst")
        if (records := [each for each in as_list(slices.get(name)) if isinstance(each, dict)])
    ]


def _build_slice_table(records: list[dict[str, Any]]) -> DataTable:
    columns = {key: column for key, column in SLICE_COLUMNS.items() if any(key in record for record in records)}
    rows = [[_build_cell(record.get(key), form) for key, (_, form) in columns.items()] for record in records]
    return DataTable([title for title, _ in columns.values()], rows)


def _build_cell(value: Any, form: str) -> Cell:
    if form == "{}" and isinstance(value, str):
        return Cell(value)
    as_number = parse_number(value)
    return Cell("–" if isnan(as_number) else form.format(as_number), as_number)
