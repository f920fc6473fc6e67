"""The pictures of a search: the metric of all trials as they are trained, and over each key."""

from __future__ import annotations

from math import isnan
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Picture
from matplotlib.ticker import LogLocator, NullLocator

from raytrec.metrics.selection import Figure
from raytrec.report.figures.style import (
    BLUE,
    GREY,
    LINES,
    PANEL,
    PLAIN,
    STYLE,
    few_ticks,
    fitted,
    new_figure,
    step_axis,
    styled,
)
from raytrec.tuning.space import Draw
from raytrec.tuning.trials import FINISHED, Trial, best_of

MOST_NAMES = 12  # trials in a legend
MOST_KEYS = 12
MOST_CHOICES = 6  # that have a label
COLUMNS = 2


@styled
def curves(trials: list[Trial], figure: Figure) -> Picture | None:
    """A line for each trial; those that were not trained to their end are thin and grey."""
    shown = [trial for trial in trials if trial.points]
    if not shown:
        return None
    best = best_of(trials, figure)
    ended = [trial for trial in shown if trial.state == FINISHED]
    made, (axes,) = new_figure(f"{figure.label} over steps; thin lines: not trained to the end", 3.0)
    for trial in shown:
        steps = sorted(trial.points)
        style: dict[str, Any] = {"color": GREY, "linewidth": 0.8, "marker": ".", "markersize": 3}
        if trial in ended:
            colour = LINES[ended.index(trial) % len(LINES)]
            style |= {"color": colour, "linewidth": 2.2 if trial is best else 1.3}
            if len(ended) <= MOST_NAMES or trial is best:
                style["label"] = f"{trial.number}{' (best)' if trial is best else ''}"
        axes.plot(steps, [trial.points[step] for step in steps], **style)
    axes.set_ylabel(figure.label)
    axes.yaxis.set_major_formatter(PLAIN)
    few_ticks(axes.yaxis)
    step_axis(axes)
    if ended:
        made.legend(*axes.get_legend_handles_labels(), ncols=6, loc="outside lower left")
    return made


@styled
def over_keys(trials: list[Trial], draws: tuple[Draw, ...], figure: Figure) -> Picture | None:
    """A panel for each key: its value in each trial, and the metric of the trial's last evaluation."""
    shown = [trial for trial in trials if not isnan(trial.value)]
    draws = draws[:MOST_KEYS]
    if not shown:
        return None
    best, rows = best_of(trials, figure), -(-len(draws) // COLUMNS)
    made, panels = new_figure(
        f"{figure.label} over what was drawn; filled: trained to the end",
        0.6 + 1.5 * rows,
        rows,
        COLUMNS,
        sharey=True,
    )
    for axes, draw in zip(panels, draws, strict=False):
        places, names = _places(draw, shown)
        for trial, place in zip(shown, places, strict=True):
            face = BLUE if trial.state == FINISHED else "none"
            marker, size = ("*", 9) if trial is best else ("o", 4)
            axes.plot([place], [trial.value], marker, color=BLUE, markerfacecolor=face, markersize=size)
        axes.margins(0.1)  # so that no marker is cut
        if names:
            _choice_axis(axes, names)
        elif draw.kind == "log_uniform":
            _log_axis(axes)
        else:
            few_ticks(axes.xaxis, 4, whole=draw.kind == "integer")
            axes.xaxis.set_major_formatter(PLAIN)
        axes.set_xlabel(fitted(draw.key, PANEL, STYLE["axes.labelsize"]))
        axes.yaxis.set_major_formatter(PLAIN)
        few_ticks(axes.yaxis)
    for axes in panels[len(draws) :]:
        axes.set_axis_off()
    return made


def _choice_axis(axes: Axes, names: list[str]) -> None:
    apart = -(-len(names) // MOST_CHOICES)
    places = range(0, len(names), apart)
    width = PANEL / len(places) - 4
    axes.set_xticks(places, [fitted(names[place], width) for place in places])
    axes.set_xlim(-0.5, len(names) - 0.5)


def _log_axis(axes: Axes) -> None:
    """Round values as plain numbers, few enough for a panel."""
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    if high < 4 * low:
        few_ticks(axes.xaxis)
    else:
        between = (1, 2, 5) if high < 10 * low else (1, 3) if high < 100 * low else (1,)
        axes.xaxis.set_major_locator(LogLocator(subs=between, numticks=4))
    axes.xaxis.set_major_formatter(PLAIN)
    axes.xaxis.set_minor_locator(NullLocator())


def _places(draw: Draw, trials: list[Trial]) -> tuple[list[float], list[str]]:
    """Where the values of a key are along x; of a choice, what its places are called."""
    if draw.kind != "choice":
        return [trial.values[draw.key] for trial in trials], []
    names = [str(value) for value in draw.values]
    return [names.index(str(trial.values[draw.key])) for trial in trials], names
