"""The figures of result.json: their names for people, and how they are written."""

from __future__ import annotations

from collections.abc import Mapping
from math import isnan
from typing import Any

from raytrec.common.formatting import number

LABELS = {
    "eval.auc": ("AUC", "{:.4f}"),
    "eval.ne": ("NE (normalised entropy)", "{:.4f}"),
    "eval.logloss": ("log loss (nats)", "{:.4f}"),
    "eval.calibration": ("calibration (predicted ÷ real)", "{:.4f}"),
    "eval.rows": ("rows evaluated", "{:,}"),
    "eval.skipped_rows": ("rows left out of it", "{:,}"),
    "train.rows": ("rows trained", "{:,}"),
    "train.skipped_rows": ("rows left out of training", "{:,}"),
    "skipped_files": ("files left out", "{:,}"),
    "train.nan_steps": ("steps left out for their loss", "{:,}"),
    "train.steps": ("steps", "{:,}"),
    "train.samples_per_s": ("rows/s in training", "{:,.0f}"),
    "train.checks_passed": ("checks passed", "{:,}"),
    "train.checks_failed": ("checks failed", "{:,}"),
    "world_size": ("workers", "{}"),
    "seconds": ("seconds in all", "{:.1f}"),
}
WHEN_ANY = (  # 0 is not worth a line
    "eval.skipped_rows",
    "train.skipped_rows",
    "skipped_files",
    "train.nan_steps",
    "train.checks_passed",
    "train.checks_failed",
)


def shown(result: Mapping[str, Any]) -> dict[str, str]:
    """The figures worth a line: key → text, in the order of LABELS; "–" for what is not defined."""
    present = [key for key in LABELS if key in result and (result[key] or key not in WHEN_ANY)]
    return {key: as_text(key, result[key]) for key in present}


def as_text(key: str, value: Any) -> str:
    """A figure as it is written; what is no number, as it is."""
    if value is None:
        return "–"
    return str(value) if isnan(number(value)) else LABELS[key][1].format(value)
