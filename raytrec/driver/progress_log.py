"""Plain progress lines, as they stand in a log: written by the console, read by whoever follows a job.

movielens-20261122-101500  step 120/550 (22%)  80,000 rows/s  loss 0.5123  NE 0.9101  ETA 0:42
movielens-20261122-101500  step 550: AUC 0.7885  NE 0.8093  logloss 0.5534  calibration 0.9992
movielens-20261122-101500  run folder /shared/runs/movielens-20261122-101500
"""

from __future__ import annotations

import re
from math import isfinite
from typing import Any

FOLDER = "run folder "
GAP = "  "  # between the parts of a line
EVALUATED = ("auc", "ne", "logloss", "calibration")
CAPITALS = ("auc", "ne")

_NUMBER = r"(nan|[-+]?[\d,.]+(?:e[-+]?\d+)?)"
_STEP = re.compile(r"step (\d+)/(\d+) \(\d+%\)")
_EVALUATION = re.compile(r"step (\d+): (?=\w+ [\d.+-])")
_FIGURES = {
    "rows_per_s": re.compile(rf"\b{_NUMBER} rows/s"),
    "logloss": re.compile(rf"\b(?:loss|logloss) {_NUMBER}"),
    "ne": re.compile(rf"\bNE {_NUMBER}"),
    "auc": re.compile(rf"\bAUC {_NUMBER}"),
    "calibration": re.compile(rf"\bcalibration {_NUMBER}"),
}


def progress(step: int, total: int, rows_per_s: float | None, logloss: float, ne: float) -> str:
    """How far training has got."""
    parts = [f"step {step}/{total} ({100 * step // max(1, total)}%)"]
    parts += [f"{rows_per_s:,.0f} rows/s"] if rows_per_s else []
    return GAP.join([*parts, f"loss {logloss:.4f}", f"NE {ne:.4f}"])


def remaining(seconds: float) -> str:
    """The time that is left: ETA 0:42, ETA 1:02:03."""
    hours, rest = divmod(max(0, round(seconds)), 3600)
    minutes, rest = divmod(rest, 60)
    return f"ETA {hours}:{minutes:02}:{rest:02}" if hours else f"ETA {minutes}:{rest:02}"


def evaluation(step: int, figures: dict[str, Any]) -> str:
    """The figures of an evaluation."""
    known = [(name, figures[name]) for name in EVALUATED if figures.get(name) is not None]
    text = GAP.join(f"{name.upper() if name in CAPITALS else name} {value:.4f}" for name, value in known)
    return f"step {step}: {text}"


def parse(line: str) -> tuple[str, dict[str, Any]] | None:
    """What a line of a log says.

    Args:
        line: any line, also of somebody else.

    Returns:
        ("train", {step, total, rows_per_s, logloss, ne}), ("eval", {step, auc, ne, logloss, calibration}),
        ("folder", {name, folder}), or None. Figures that the line does not have are missing; those that are
        not defined are None, as in metrics.jsonl.
    """
    name, gap, text = line.strip().partition(GAP)
    if not gap or " " in name:
        return None
    if text.startswith(FOLDER):
        return "folder", {"name": name, "folder": text.removeprefix(FOLDER)}
    if found := _STEP.match(text):
        return "train", {"step": int(found[1]), "total": int(found[2]), **_figures(text)}
    if found := _EVALUATION.match(text):
        return "eval", {"step": int(found[1]), **_figures(text)}
    return None


def _figures(text: str) -> dict[str, float | None]:
    """The figures that there are in a line."""
    found = {name: pattern.search(text) for name, pattern in _FIGURES.items()}
    values = {name: float(match[1].replace(",", "")) for name, match in found.items() if match}
    return {name: value if isfinite(value) else None for name, value in values.items()}
