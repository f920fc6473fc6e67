"""Pictures of how well a run predicts: curves over steps, calibration, ROC."""

from __future__ import annotations

from math import isnan
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from raytrec.common.formatting import number
from raytrec.report.figures.style import (
    BLUE,
    GREEN,
    GREY,
    MUTED,
    ORANGE,
    PERCENT,
    PLAIN,
    WIDTH,
    few_ticks,
    new_figure,
    restart_lines,
    step_axis,
    styled,
    thinned,
)
from raytrec.report.history import History

LABELS = {"train": "training", "eval": "evaluation", "final": "final evaluation"}
NAMES = {"logloss": "log loss (nats)", "ne": "NE", "auc": "AUC"}


@styled
def curves(history: History) -> Figure | None:
    """Log loss, NE and AUC over steps: of training, of evaluations, of the final one."""
    found = [
        name for name in NAMES if any(points(history, kind, name)[0] for kind in ("train", "eval", "final"))
    ]
    if not found:
        return None
    made, axes = new_figure(_what_was_reached(history), 0.75 + 1.35 * len(found), len(found), sharex=True)
    for panel, name in zip(axes, found, strict=True):
        _draw(panel, history, name)
        panel.set_ylabel(NAMES[name])
    step_axis(axes[-1])
    made.legend(*axes[0].get_legend_handles_labels(), ncols=4, loc="outside lower left")
    return made


@styled
def calibration_over_steps(history: History) -> Figure | None:
    """Sum of predictions ÷ sum of labels over steps; 1 is right."""
    if not any(points(history, kind, "calibration")[0] for kind in ("train", "eval", "final")):
        return None
    last = [number(m.get("calibration")) for m in history.figures("eval", "final")]
    reached = f", {last[-1]:.3f} at the end" if last and not isnan(last[-1]) else ""
    made, (axes,) = new_figure(f"Calibration over steps{reached}", 2.2)
    axes.axhline(1, color=MUTED, linewidth=0.8)
    _draw(axes, history, "calibration")
    axes.set_ylabel("predicted ÷ actual")
    step_axis(axes)
    made.legend(ncols=4, loc="outside lower left")
    return made


@styled
def calibration_plot(history: History) -> Figure | None:
    """Predicted against actual rates of the last evaluation, by bins of predictions, and the bins' rows."""
    evaluation, curve = _last_curve(history, "calibration", ("predicted", "actual"))
    if curve is None:
        return None
    title = f"Predicted and actual rates at step {evaluation['step']:,}"
    made, (above, below) = new_figure(title, 3.6, 2, sharex=True, height_ratios=(4, 1))
    top = 1.05 * max(*curve["predicted"], *curve["actual"], 1e-9)
    above.plot([0, top], [0, top], color=MUTED, linewidth=0.8, label="as predicted")
    above.plot(
        curve["predicted"], curve["actual"], color=BLUE, marker="o", markersize=3.5, label="this model"
    )
    above.set(ylabel="actual rate", xlim=(0, top), ylim=(0, top))
    above.legend(loc="upper left")
    rows = [number(r) for r in _list(evaluation["curves"]["calibration"].get("rows"))]
    if len(rows) == len(curve["predicted"]):
        below.vlines(curve["predicted"], 0, rows, color=GREY, linewidth=4)
        below.set_ylim(bottom=0)
    below.set(ylabel="rows", xlabel="predicted rate")
    few_ticks(below.yaxis, 2)
    for axis in (above.yaxis, below.xaxis):
        axis.set_major_formatter(PERCENT)
    return made


@styled
def roc(history: History) -> Figure | None:
    """The ROC curve of the last evaluation."""
    evaluation, curve = _last_curve(history, "roc", ("fpr", "tpr"))
    if curve is None:
        return None
    auc = number(evaluation.get("auc"))
    named = "" if isnan(auc) else f": AUC {auc:.4f}"
    made, (axes,) = new_figure(f"ROC at step {evaluation['step']:,}{named}", WIDTH * 0.8)
    axes.plot([0, 1], [0, 1], color=MUTED, linewidth=0.8, label="chance")
    axes.plot(curve["fpr"], curve["tpr"], color=BLUE, label="this model")
    axes.set(xlabel="false positive rate", ylabel="true positive rate", xlim=(0, 1), ylim=(0, 1.01))
    axes.set_box_aspect(1)
    axes.legend(loc="lower right")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(PERCENT)
    return made


def _draw(axes: Axes, history: History, name: str) -> None:
    for kind, colour, marker, size in (
        ("train", BLUE, None, 0),
        ("eval", ORANGE, "o", 3.5),
        ("final", GREEN, "D", 5),
    ):
        steps, values = points(history, kind, name)
        if steps:
            steps, values = thinned(steps, values)
            axes.plot(steps, values, color=colour, marker=marker, markersize=size, label=LABELS[kind])
    restart_lines(axes, history.restarts())
    axes.yaxis.set_major_formatter(PLAIN)
    few_ticks(axes.yaxis)


def points(history: History, kind: str, name: str) -> tuple[list[int], list[float]]:
    points = [(m["step"], number(m.get(name))) for m in history.figures(kind)]
    points = [(step, value) for step, value in points if not isnan(value)]
    return [step for step, _ in points], [value for _, value in points]


def _what_was_reached(history: History) -> str:
    last = (history.figures("final") or history.figures("eval") or history.figures("train"))[-1]
    reached = {name: number(last.get(name)) for name in ("auc", "ne", "logloss")}
    parts = [f"{NAMES[name].split(' (')[0]} {v:.4f}" for name, v in reached.items() if not isnan(v)]
    text = ", ".join(parts) or "figures"
    return f"{text[0].upper()}{text[1:]} at step {last['step']:,}"


def _last_curve(history: History, name: str, keys: tuple[str, str]) -> tuple[dict, dict | None]:
    """The last evaluation that has this curve, and the curve: two lists of numbers, equally long."""
    for evaluation in reversed(history.figures("eval", "final")):
        curves = evaluation.get("curves")
        curve = curves.get(name) if isinstance(curves, dict) else None
        if not isinstance(curve, dict):
            continue
        first, second = ([number(v) for v in _list(curve.get(key))] for key in keys)
        if len(first) == len(second) > 0 and not any(map(isnan, first + second)):
            return evaluation, dict(zip(keys, (first, second), strict=True))
    return {}, None


def _list(value: Any) -> list:
    return value if isinstance(value, list) else []
