"""Pictures of how well a run predicts: metrics over steps, reliability of predictions, ROC."""

from __future__ import annotations

from itertools import cycle
from math import isnan
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from raytrec.common.formatting import number
from raytrec.metrics.selection import Figure as Metric
from raytrec.report.figures.style import (
    BLUE,
    GREEN,
    GREY,
    LINES,
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
KINDS = tuple(LABELS)


@styled
def curves(history: History) -> Figure | None:
    """Each metric over steps: of training, of evaluations, of the final one."""
    return _over_steps(history, [each for each in _measured(history) if not each.is_ratio])


@styled
def ratios(history: History) -> Figure | None:
    """Metrics that should be 1 over steps, such as the sum of predictions ÷ the sum of labels."""
    return _over_steps(history, [each for each in _measured(history) if each.is_ratio], right=1)


@styled
def reliability(history: History) -> Figure | None:
    """Predicted against actual rates of the last evaluation, by bins of predictions, and the bins' rows."""
    evaluation, curves = _last_curves(history, "reliability", ("predicted", "actual"))
    if not curves:
        return None
    title = f"Predicted and actual rates at step {evaluation['step']:,}"
    made, (above, below) = new_figure(title, 3.6, 2, sharex=True, height_ratios=(4, 1))
    top = 1.05 * max(value for curve in curves for key in ("predicted", "actual") for value in curve[key])
    top = max(top, 1e-9)
    above.plot([0, top], [0, top], color=MUTED, linewidth=0.8, label="as predicted")
    for curve, colour in zip(curves, cycle(LINES)):
        style = {"color": colour, "marker": "o", "markersize": 3.5, "label": curve["name"]}
        above.plot(curve["predicted"], curve["actual"], **style)
        rows = [number(count) for count in _list(curve["written"].get("rows"))]
        if len(rows) == len(curve["predicted"]):
            below.vlines(curve["predicted"], 0, rows, color=colour if len(curves) > 1 else GREY, linewidth=4)
    above.set(ylabel="actual rate", xlim=(0, top), ylim=(0, top))
    above.legend(loc="upper left")
    below.set_ylim(bottom=0)
    below.set(ylabel="rows", xlabel="predicted rate")
    few_ticks(below.yaxis, 2)
    for axis in (above.yaxis, below.xaxis):
        axis.set_major_formatter(PERCENT)
    return made


@styled
def roc(history: History) -> Figure | None:
    """The ROC curve of the last evaluation."""
    evaluation, curves = _last_curves(history, "roc", ("fpr", "tpr"))
    if not curves:
        return None
    areas = {each.key: _reached(each, evaluation) for each in history.metrics_of_tasks}
    named = [areas.get(str(curve["written"].get("metric"))) for curve in curves]
    area = ": " + ", ".join(filter(None, named)) if any(named) else ""
    made, (axes,) = new_figure(f"ROC at step {evaluation['step']:,}{area}", WIDTH * 0.8)
    axes.plot([0, 1], [0, 1], color=MUTED, linewidth=0.8, label="chance")
    for curve, colour in zip(curves, cycle(LINES)):
        axes.plot(curve["fpr"], curve["tpr"], color=colour, label=curve["name"])
    axes.set(xlabel="false positive rate", ylabel="true positive rate", xlim=(0, 1), ylim=(0, 1.01))
    axes.set_box_aspect(1)
    axes.legend(loc="lower right")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(PERCENT)
    return made


def _measured(history: History) -> list[Metric]:
    """The metrics that there are figures of; those that training has come first."""
    found = [each for each in history.metrics_of_tasks if any(points(history, k, each.key)[0] for k in KINDS)]
    return sorted(found, key=lambda each: not points(history, "train", each.key)[0])


def _over_steps(history: History, found: list[Metric], right: float | None = None) -> Figure | None:
    """A panel for each metric; with `right`, a line at the value that it should have."""
    if not found:
        return None
    height = 0.75 + 1.35 * len(found)
    made, axes = new_figure(_what_was_reached(history, found), height, len(found), sharex=True)
    for panel, metric in zip(axes, found, strict=True):
        if right is not None:
            panel.axhline(right, color=MUTED, linewidth=0.8)
        _draw(panel, history, metric.key)
        panel.set_ylabel(metric.label)
    step_axis(axes[-1])
    # The first panel may lack a kind: training has no AUC, and evaluations have no training loss.
    kinds = {
        label: line for panel in axes for line, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    made.legend(kinds.values(), kinds.keys(), ncols=4, loc="outside lower left")
    return made


def _draw(axes: Axes, history: History, name: str) -> None:
    for kind, colour, marker, size in (
        ("train", BLUE, None, 0),
        ("eval", ORANGE, "o", 3.5),
        ("final", GREEN, "D", 5),
    ):
        steps, values = points(history, kind, name)
        if steps:
            axes.plot(
                *thinned(steps, values), color=colour, marker=marker, markersize=size, label=LABELS[kind]
            )
    restart_lines(axes, history.restarts())
    axes.yaxis.set_major_formatter(PLAIN)
    few_ticks(axes.yaxis)


def points(history: History, kind: str, name: str) -> tuple[list[int], list[float]]:
    points = [(m["step"], number(m.get(name))) for m in history.figures(kind)]
    points = [(step, value) for step, value in points if not isnan(value)]
    return [step for step, _ in points], [value for _, value in points]


def _what_was_reached(history: History, found: list[Metric]) -> str:
    last = (history.figures("final") or history.figures("eval") or history.figures("train"))[-1]
    text = ", ".join(filter(None, (_reached(metric, last) for metric in found))) or "figures"
    return f"{text[0].upper()}{text[1:]} at step {last['step']:,}"


def _reached(metric: Metric, line: dict[str, Any]) -> str:
    """A metric's value with its label; empty where a line has none."""
    value = number(line.get(metric.key))
    return "" if isnan(value) else f"{metric.label} {metric.text(value)}"


def _last_curves(history: History, name: str, keys: tuple[str, str]) -> tuple[dict, list[dict[str, Any]]]:
    """The last evaluation that has such curves, and of each task its curve: two lists of numbers, equally
    long, its name for a legend, and what was written of it."""
    for evaluation in reversed(history.figures("eval", "final")):
        written = evaluation.get("curves")
        found = []
        for key, curve in written.items() if isinstance(written, dict) else ():
            task, _, kind = key.rpartition(".")
            if kind != name or not isinstance(curve, dict):
                continue
            first, second = ([number(v) for v in _list(curve.get(each))] for each in keys)
            if len(first) == len(second) > 0 and not any(map(isnan, first + second)):
                pair = zip(keys, (first, second), strict=True)
                found.append({**dict(pair), "name": task or "this model", "written": curve})
        if found:
            return evaluation, found
    return {}, []


def _list(value: Any) -> list:
    return value if isinstance(value, list) else []
