"""Plots of metrics over steps, predicted and actual rates, and ROC curves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import cycle
from math import isnan
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from raytrec.common.formatting import as_list, parse_number
from raytrec.common.messages import Eval, Final, Measured, Train
from raytrec.metrics.selection import LOG_LOSS, LOSS
from raytrec.metrics.selection import MetricDisplay as Metric
from raytrec.report.figures import style
from raytrec.tracking.history import History

# Kind of line → label, color, marker and marker size.
STYLES: dict[type[Measured], tuple[str, str, str | None, float]] = {
    Train: ("training", style.BLUE, None, 0),
    Eval: ("evaluation", style.ORANGE, "o", 3.5),
    Final: ("final evaluation", style.GREEN, "D", 5),
}
SAME_CURVE_TOLERANCE = 0.01  # relative difference below which two curves look the same
DASHES = ("-", "--", ":")  # with more runs than colors, colors are reused with dashes


@style.styled
def curves(run: History) -> Figure | None:
    """Draw the metrics of training and evaluations over steps, except metrics with target 1.

    Metrics with fewer than two points, and training losses that equal the log loss, are omitted. The result is None if
    no metric remains.
    """
    return _draw_over_steps(run, [each for each in _measured(run) if not each.is_ratio])


@style.styled
def ratios(run: History) -> Figure | None:
    """Draw the metrics with target 1, such as sum of predictions ÷ sum of labels, over steps.

    Metrics with fewer than two points are omitted; the result is None if no metric remains.
    """
    return _draw_over_steps(run, [each for each in _measured(run) if each.is_ratio], right=1)


@style.styled
def reliability(run: History) -> Figure | None:
    """Draw predicted and actual rates and rows per bin in the last evaluation that recorded them; None if none did."""
    evaluation, curves = _find_last_curves(run, "reliability", ("predicted", "actual"))
    if not curves:
        return None
    title = f"Predicted and actual rates at step {evaluation.step:,}"
    figure, (above, below) = style.new_figure(title, 3.6, 2, sharex=True, height_ratios=(4, 1))
    top = 1.05 * max(value for curve in curves for key in ("predicted", "actual") for value in curve[key])
    top = max(top, 1e-9)
    above.plot([0, top], [0, top], color=style.MUTED, linewidth=0.8, label="perfect calibration")
    for curve, colour in zip(curves, cycle(style.LINES)):
        above.plot(curve["predicted"], curve["actual"], color=colour, marker="o", markersize=3.5, label=curve["name"])
        rows = [parse_number(count) for count in as_list(curve["written"].get("rows"))]
        if len(rows) == len(curve["predicted"]):
            bars = colour if len(curves) > 1 else style.GREY
            below.vlines(curve["predicted"], 0, rows, color=bars, linewidth=4)
    above.set(ylabel="actual rate", xlim=(0, top), ylim=(0, top))
    above.legend(loc="upper left")
    below.set_ylim(bottom=0)
    below.set(ylabel="rows", xlabel="predicted rate")
    style.limit_ticks(below.yaxis, 2)
    for axis in (above.yaxis, below.xaxis):
        axis.set_major_formatter(style.PERCENT)
    return figure


@style.styled
def roc(run: History) -> Figure | None:
    """Draw the ROC curve of each task in the last evaluation with ROC curves; return None if there is none."""
    evaluation, curves = _find_last_curves(run, "roc", ("fpr", "tpr"))
    if not curves:
        return None
    areas = {each.key: _format_metric(each, evaluation) for each in run.recorded_metrics}
    named = [areas.get(str(curve["written"].get("metric"))) for curve in curves]
    area = ": " + ", ".join(filter(None, named)) if any(named) else ""
    figure, (axes,) = style.new_figure(f"ROC at step {evaluation.step:,}{area}", style.WIDTH * 0.8)
    axes.plot([0, 1], [0, 1], color=style.MUTED, linewidth=0.8, label="chance")
    for curve, colour in zip(curves, cycle(style.LINES)):
        axes.plot(curve["fpr"], curve["tpr"], color=colour, label=curve["name"])
    axes.set(xlabel="false positive rate", ylabel="true positive rate", xlim=(0, 1), ylim=(0, 1.01))
    axes.set_box_aspect(1)
    axes.legend(loc="lower right")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(style.PERCENT)
    return figure


@style.styled
def draw_overlay(runs: Sequence[History], names: list[str]) -> list[Figure]:
    """Draw plots of the metrics whose lowest or highest value is best, with a line per run.

    Training and evaluations have separate plots. Diamonds mark final evaluations, which may use other data than the
    evaluations during training. A plot is omitted if every run has fewer than two points. `names` are the names of the
    runs in the legends.
    """
    metrics = {each.key: each.label for run in runs for each in _select_distinct_metrics(run) if each.is_directed}
    titles = {
        (kind, name): f"{label} {where}"
        for kind, where in ((Train, "in training"), (Eval, "in evaluations (diamonds: final evaluation)"))
        for name, label in metrics.items()
        if any(_has_line(run, name, {kind, Final if kind is Eval else kind}) for run in runs)
    }
    pictures = []
    for (kind, name), title in titles.items():
        figure, (axes,) = style.new_figure(title, 1.9 + 0.2 * -(-len(runs) // 2))
        for index, (run, run_name) in enumerate(zip(runs, names, strict=True)):
            turn, place = divmod(index, len(style.LINES))
            line: dict[str, Any] = {"color": style.LINES[place], "linestyle": DASHES[turn % len(DASHES)]}
            line |= {"label": style.fit_name(run_name, 110), "marker": "." if kind is Eval else None}
            axes.plot(*style.thin_line(*points(run, kind, name)), **line)
            if kind is Eval:
                final = points(run, Final, name)
                axes.plot(*final, color=style.LINES[place], linestyle="none", marker="D", markersize=5)
        style.clip_initial_outliers(axes)
        axes.yaxis.set_major_formatter(style.PLAIN)
        style.limit_ticks(axes.yaxis)
        style.format_step_axis(axes)
        figure.legend(ncols=2, loc="outside lower left")
        pictures.append(figure)
    return pictures


def _select_distinct_metrics(run: History) -> list[Metric]:
    """Return the run's metrics, except training losses that equal the log loss of the same task."""
    distinct = []
    for metric in run.recorded_metrics:
        task, _, name = metric.key.rpartition(".")
        losses, others = (points(run, Train, key)[1] for key in (metric.key, f"{task}.{LOG_LOSS}".lstrip(".")))
        apart = [abs(a - b) / max(abs(b), 1e-12) for a, b in zip(losses, others, strict=False)]
        if name != LOSS or not apart or median(apart) >= SAME_CURVE_TOLERANCE:
            distinct.append(metric)
    return distinct


def _measured(run: History) -> list[Metric]:
    """Return the distinct metrics that have values; metrics recorded during training come first."""
    metrics = [each for each in _select_distinct_metrics(run) if any(points(run, k, each.key)[0] for k in STYLES)]
    return sorted(metrics, key=lambda each: not points(run, Train, each.key)[0])


def _has_line(run: History, key: str, kinds: Iterable[type[Measured]]) -> bool:
    """Return True if a metric has at least two points in lines of these kinds."""
    return sum(len(points(run, kind, key)[0]) for kind in kinds) > 1


def _draw_over_steps(run: History, metrics: list[Metric], right: float | None = None) -> Figure | None:
    """Draw a panel for each metric with at least two points, and a horizontal line at the target `right` if given."""
    plotted = [metric for metric in metrics if _has_line(run, metric.key, STYLES)]
    if not plotted:
        return None
    height = 0.75 + 1.35 * len(plotted)
    figure, axes = style.new_figure(_make_title(run, metrics), height, len(plotted), sharex=True)
    for panel, metric in zip(axes, plotted, strict=True):
        if right is not None:
            panel.axhline(right, color=style.MUTED, linewidth=0.8)
        _draw(panel, run, metric.key)
        panel.set_ylabel(metric.label)
    style.format_step_axis(axes[-1])
    # The first panel may lack a kind: training has no AUC, and evaluations have no training loss.
    kinds = {label: line for panel in axes for line, label in zip(*panel.get_legend_handles_labels(), strict=True)}
    figure.legend(kinds.values(), kinds.keys(), ncols=4, loc="outside lower left")
    return figure


def _draw(axes: Axes, run: History, name: str) -> None:
    for kind, (label, colour, marker, size) in STYLES.items():
        steps, values = points(run, kind, name)
        if steps:
            axes.plot(*style.thin_line(steps, values), color=colour, marker=marker, markersize=size, label=label)
    style.clip_initial_outliers(axes)
    style.draw_restart_lines(axes, run.restarts)
    axes.yaxis.set_major_formatter(style.PLAIN)
    style.limit_ticks(axes.yaxis)


def points(run: History, kind: type[Measured], name: str) -> tuple[list[int], list[float]]:
    """Return the steps at which the metric `name` is defined in messages of a kind, and the metric's values."""
    points = [(line.step, line.figure(name)) for line in run.figures(kind)]
    points = [(step, value) for step, value in points if not isnan(value)]
    return [step for step, _ in points], [value for _, value in points]


def _make_title(run: History, metrics: list[Metric]) -> str:
    last = (run.figures(Final) or run.figures(Eval) or run.figures(Train))[-1]
    text = ", ".join(filter(None, (_format_metric(metric, last) for metric in metrics))) or "metrics"
    return f"{text[0].upper()}{text[1:]} at step {last.step:,}"


def _format_metric(metric: Metric, line: Measured) -> str:
    """Return a metric's label and its value in a line of metrics.jsonl; "" if the line has no value."""
    value = line.figure(metric.key)
    return "" if isnan(value) else f"{metric.label} {metric.text(value)}"


def _find_last_curves(run: History, name: str, keys: tuple[str, str]) -> tuple[Measured | None, list[dict[str, Any]]]:
    """Return the last evaluation with curves of a kind, and these curves by task; (None, []) if none exists.

    Args:
        run: Run to search.
        name: Kind of curve: roc or reliability.
        keys: Names of the curve's two lists of numbers, which have equal lengths.

    Returns:
        The evaluation, and for each task a dict of the two lists, a `name` for the legend, and the recorded
        curve as `written`.
    """
    for evaluation in reversed(run.figures(Eval, Final)):
        task_curves = []
        for key, curve in (evaluation.curves or {}).items():  # type: ignore[attr-defined]
            task, _, kind = key.rpartition(".")
            if kind != name or not isinstance(curve, dict):
                continue
            first, second = ([parse_number(v) for v in as_list(curve.get(each))] for each in keys)
            if len(first) == len(second) > 0 and not any(map(isnan, first + second)):
                pair = zip(keys, (first, second), strict=True)
                task_curves.append({**dict(pair), "name": task or "this model", "written": curve})
        if task_curves:
            return evaluation, task_curves
    return None, []
