"""Health of tables: row norms, untrained rows, gradients, updates."""

from __future__ import annotations

from math import isnan

import numpy as np
from matplotlib.colors import LinearSegmentedColormap, to_rgba
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from raytrec.report.figures import style
from raytrec.tracking.aggregate import BINS
from raytrec.tracking.run_folder import RunFolder

EDGES = np.logspace(-4, 2, BINS + 1)  # of row_norm_counts
FADING = LinearSegmentedColormap.from_list("fading", [to_rgba(style.BLUE, 0.0), to_rgba(style.BLUE, 1.0)])
MOST_MAPS = 12
MOST_NAMED = 5  # lines of a panel that have a colour and a name

# What is drawn of a table's health: the figure, its label, whether it is a share, which tables are named.
PANELS = (
    ("dead_share", "rows never\ntrained", True),
    ("unique_ratio", "distinct ids\n÷ ids", True),
    ("gradient_norm", "gradient\nnorm", False),
    ("update_norm", "update\nnorm", False),
)


@style.styled
def row_norms(run: RunFolder) -> Figure | None:
    """The distribution of a table's row norms over steps: a panel for each of the most loaded tables."""
    measured = {
        name: points
        for name, steps in run.tables.items()
        if (points := {s: e["row_norm_counts"] for s, e in steps.items() if sum(e["row_norm_counts"] or [0])})
    }
    if not measured:
        return None
    shown = list(measured)[:MOST_MAPS]
    which = f"; the {MOST_MAPS} most loaded of {len(measured)} tables" if len(measured) > MOST_MAPS else ""
    columns = 2 if len(shown) > 1 else 1
    rows = -(-len(shown) // columns)
    made, panels = style.new_figure(
        f"Norms of rows over steps (stronger: more rows){which}",
        0.8 + 0.95 * rows,
        rows,
        columns,
        sharex=True,
        sharey=True,
    )
    for axes, name in zip(panels, shown, strict=False):
        steps = sorted(measured[name])
        shares = np.array([np.array(measured[name][s]) / sum(measured[name][s]) for s in steps]).T
        axes.pcolormesh(_borders(steps), EDGES, shares, cmap=FADING, vmin=0, rasterized=True)
        axes.set_title(style.fitted(name, style.PANEL, style.STYLE["axes.titlesize"]))
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(FixedLocator([1e-4, 1e-2, 1, 100]))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(style.PLAIN)
    style.lowest_panels(panels, len(shown), columns)
    made.supylabel("norm of a row", fontsize=8.5)
    return made


@style.styled
def health(run: RunFolder) -> Figure | None:
    """Dead rows, distinct ids, gradient and update norms of all tables over steps; the highest are named."""
    lines = {key: _known(run.tables, key) for key, _, _ in PANELS}
    found = [panel for panel in PANELS if lines[panel[0]]]
    if not found:
        return None
    title = "Tables over steps" + (
        f" (the {MOST_NAMED} highest at the end are named)" if len(run.tables) > MOST_NAMED else ""
    )
    made, panels = style.new_figure(title, 0.6 + 1.2 * len(found), len(found), sharex=True)
    for axes, (key, label, is_share) in zip(panels, found, strict=True):
        ordered = sorted(lines[key].items(), key=lambda item: item[1][-1][1], reverse=True)
        for index, (name, points) in enumerate(reversed(ordered)):
            place = len(ordered) - 1 - index
            named = place < MOST_NAMED
            axes.plot(
                *zip(*points, strict=True),
                color=style.LINES[place] if named else style.GREY,
                linewidth=1.3 if named else 0.6,
                label=style.fitted(name, style.NAME_POINTS) if named else None,
            )
        axes.set_ylabel(label)
        axes.yaxis.set_major_formatter(style.PERCENT if is_share else style.PLAIN)
        style.few_ticks(axes.yaxis, 3)
        style.restart_lines(axes, run.restarts, label=None)
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), reverse=True)
    style.step_axis(panels[-1])
    return made


def _known(series: dict[str, dict[int, dict]], key: str) -> dict[str, list[tuple[int, float]]]:
    """Return table → (step, figure) of tables that have the figure at two steps or more."""
    points = {n: [(s, e[key]) for s, e in steps.items() if not isnan(e[key])] for n, steps in series.items()}
    return {name: found for name, found in points.items() if len(found) > 1}


def _borders(steps: list[int]) -> np.ndarray:
    """Where a column of a map begins and ends: in the middle between two steps."""
    if len(steps) == 1:
        return np.array([steps[0] - 1, steps[0]])
    middles = (np.array(steps[1:]) + np.array(steps[:-1])) / 2
    return np.array([2 * steps[0] - middles[0], *middles, 2 * steps[-1] - middles[-1]])
