"""tune.html: table and pictures of the trials."""

from __future__ import annotations

from collections import Counter
from math import isnan, sqrt
from pathlib import Path
from typing import Any

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from raytrec.common.formatting import count, number
from raytrec.report import html
from raytrec.report.figures import style
from raytrec.report.parts import Cell, Sheet
from raytrec.tuning.outcome import best_text
from raytrec.tuning.search import Search, State
from raytrec.tuning.space import Draw

MOST_NAMES = 12  # trials in a legend
MOST_KEYS = 12
MOST_CHOICES = 6  # that have a label
COLUMNS = 2


def write_page(search: Search, page: Path, names: tuple[str, str]) -> None:
    """Writes the page and its two pictures.

    Args:
        names: of the files of the pictures, in the page's folder.
    """
    label, svgs = search.figure.label, []
    pictures = ((trial_curves(search), "over steps"), (over_keys(search), "over the drawn values"))
    for name, (made, what) in zip(names, pictures, strict=True):
        if made:
            svgs.append(style.to_svg(made, f"{label} {what}"))
            page.with_name(name).write_text(style.alone(svgs[-1]), encoding="utf-8", errors="replace")
    best = search.best
    states = Counter(trial.state for trial in search.trials)
    summary = f"{count(len(search.trials), 'trial')} compared by {label}: "
    summary += ", ".join(f"{number} {state}" for state, number in states.items()) + "."
    summary += f" The best is trial {best.number}, with {search.figure.text(best.value)}." if best else ""
    html.write_page(
        page,
        "tune.html.j2",
        name=search.config.run.name,
        folder=str(search.folder.absolute()),
        summary=summary,
        caution=search.caution,
        trials=_sheet(search),
        pictures=list(map(Markup, svgs)),
        best=best_text(search, best) if best else "",
        space=search.space.text,
    )


def _sheet(search: Search) -> Sheet:
    keys = [draw.key for draw in search.space.draws]
    rows = []
    for trial in search.ranked:
        state = f"{trial.state}: {trial.error}" if trial.error else str(trial.state)
        value = Cell(search.figure.text(trial.value), trial.value)
        cells = [
            Cell(str(trial.number), trial.number),
            Cell(state),
            value,
            Cell(f"{trial.step:,}", trial.step),
        ]
        for key in keys:
            sortable = number(trial.values[key])
            cells.append(Cell(str(trial.values[key]), None if isnan(sortable) else sortable))
        rows.append(cells)
    return Sheet(["trial", "state", search.figure.label, "step", *keys], rows)


@style.styled
def trial_curves(search: Search) -> Figure | None:
    """The metric over steps: a line for each trial, thin and grey if it was not trained to its end."""
    shown = [trial for trial in search.trials if trial.points]
    if not shown:
        return None
    figure, best = search.figure, search.best
    ended = [trial for trial in shown if trial.state == State.FINISHED]
    made, (axes,) = style.new_figure(f"{figure.label} over steps; thin lines: not trained to the end", 3.0)
    for trial in shown:
        steps = sorted(trial.points)
        line: dict[str, Any] = {"color": style.GREY, "linewidth": 0.8, "marker": ".", "markersize": 3}
        if trial in ended:
            colour = style.LINES[ended.index(trial) % len(style.LINES)]
            line |= {"color": colour, "linewidth": 2.2 if trial is best else 1.3}
            if len(ended) <= MOST_NAMES or trial is best:
                line["label"] = f"{trial.number}{' (best)' if trial is best else ''}"
        axes.plot(steps, [trial.points[step] for step in steps], **line)
    axes.set_ylabel(figure.label)
    axes.yaxis.set_major_formatter(style.PLAIN)
    style.few_ticks(axes.yaxis)
    style.step_axis(axes)
    if ended:
        made.legend(*axes.get_legend_handles_labels(), ncols=6, loc="outside lower left")
    return made


@style.styled
def over_keys(search: Search) -> Figure | None:
    """A panel for each key: its value in each trial, and the metric in the trial's last evaluation."""
    shown = [trial for trial in search.trials if trial.points]
    if not shown:
        return None
    figure, best, draws = search.figure, search.best, search.space.draws[:MOST_KEYS]
    rows = -(-len(draws) // COLUMNS)
    made, panels = style.new_figure(
        f"{figure.label} over the drawn values; filled: trained to the end",
        0.6 + 1.5 * rows,
        rows,
        COLUMNS,
        sharey=True,
    )
    for axes, draw in zip(panels, draws, strict=False):
        names = [str(value) for value in draw.values] if draw.kind == "choice" else []
        for trial in shown:
            value = trial.values[draw.key]
            place = names.index(str(value)) if names else value
            face = style.BLUE if trial.state == State.FINISHED else "none"
            marker, size = ("*", 9) if trial is best else ("o", 4)
            axes.plot([place], [trial.value], marker, color=style.BLUE, markerfacecolor=face, markersize=size)
        axes.margins(0.1)  # so that no marker is cut
        _draw_axis(axes, draw, names)
        axes.set_xlabel(style.fitted(draw.key, style.PANEL, style.STYLE["axes.labelsize"]))
        axes.yaxis.set_major_formatter(style.PLAIN)
        style.few_ticks(axes.yaxis)
    for axes in panels[len(draws) :]:
        axes.set_axis_off()
    return made


def _draw_axis(axes: Axes, draw: Draw, names: list[str]) -> None:
    """Ticks along x: of a choice its names, of a logarithmic range its ends and middle, else round values."""
    if names:
        shown = range(0, len(names), -(-len(names) // MOST_CHOICES))
        width = style.PANEL / len(shown) - 4
        axes.set_xticks(shown, [style.fitted(names[place], width) for place in shown])
        axes.set_xlim(-0.5, len(names) - 0.5)
    elif draw.kind == "log_uniform":
        low, high = draw.values
        ticks = (low, sqrt(low * high), high)
        axes.set_xscale("log")
        axes.set_xticks(ticks, [f"{tick:.2g}" for tick in ticks])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlim(low * (low / high) ** 0.1, high * (high / low) ** 0.1)
    else:
        style.few_ticks(axes.xaxis, 4, whole=draw.kind == "integer")
        axes.xaxis.set_major_formatter(style.PLAIN)
