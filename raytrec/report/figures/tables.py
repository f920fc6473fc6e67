"""Plots of embedding tables: memory and lookups by rank, and row norms and training statistics over steps."""

from __future__ import annotations

from math import isnan

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, LogNorm, Normalize, PowerNorm, to_rgba
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from raytrec.common.formatting import format_bytes, format_count, format_percent
from raytrec.report.figures import style
from raytrec.tracking.aggregate import BINS, select_last_group, sum_over_time, sum_table_bytes
from raytrec.tracking.run_folder import RunFolder

MAX_TABLES = 40  # maximum number of tables with a separate row; all other tables share one row
UNEVEN_BAR_FACTOR = 1.2  # bars longer than this factor × the mean are highlighted
MAX_LABELED_RANKS = 4  # maximum number of ranks up to which values are written in the cells
MAP = "cividis"


def draw_memory(run: RunFolder) -> Figure | None:
    """Draw the bytes of each table's weights and optimizer state on each rank of the last worker group.

    The result is None if all numbers are 0, or if no intervals are recorded.
    """
    ranks = sum_over_time(select_last_group(run.ranks))
    sizes = [{name: sum_table_bytes(entry) // 1 for name, entry in line.tables.items()} for line in ranks]
    return memory_map(sizes, [line.rank for line in ranks])


@style.styled
def memory_map(tables: list[dict[str, float]], ranks: list[int] | None = None) -> Figure | None:
    """Draw the bytes of each table on each rank as a map of tables × ranks, or return None if all are 0.

    Args:
        tables: One mapping per rank of table → bytes.
        ranks: Number of each rank; default: 0, 1, …
    """
    ranks = list(range(len(tables))) if ranks is None else ranks
    grid, names = _build_matrix(tables)
    if not grid.sum():
        return None
    totals = grid.sum(axis=0)
    span = f", {format_bytes(totals.min())} to {format_bytes(totals.max())} each" if len(ranks) > 1 else ""
    title = f"Table memory: {format_bytes(grid.sum())} on {format_count(len(ranks), 'rank')}{span}"
    fig, axes = _draw(grid, names, ranks, title, style.BYTES, LogNorm(grid[grid > 0].min() / 2, grid.max()))
    axes.set_ylabel("total")
    return fig


@style.styled
def draw_load(run: RunFolder) -> Figure | None:
    """Draw the share of each table and rank in the bytes that the last worker group looked up; None without lookups."""
    lines = sum_over_time(select_last_group(run.ranks))
    ranks = [line.rank for line in lines]
    loads, names = _build_matrix(
        [{name: entry.get("lookup_bytes") or 0.0 for name, entry in line.tables.items()} for line in lines]
    )
    if not loads.sum():
        return None
    shares = loads / loads.sum()
    hottest = int(shares.sum(axis=0).argmax())
    title = (
        f"Load: rank {ranks[hottest]} looks up {format_percent(shares.sum(axis=0)[hottest])} of all bytes"
        if len(ranks) > 1
        else f"Load: share of {format_bytes(loads.sum())} looked up, by table"
    )
    figure, axes = _draw(shares, names, ranks, title, style.PERCENT, PowerNorm(0.5, 0, shares.max()))
    axes.set_ylabel("share")
    return figure


def _build_matrix(ranks: list[dict[str, float]]) -> tuple[np.ndarray, list[str]]:
    """Convert table → value for each rank to a matrix of tables × ranks, the largest table first, and row labels.

    Tables beyond the MAX_TABLES largest are added up in the last row.
    """
    all_names = dict.fromkeys(name for tables in ranks for name in tables)
    cells = {name: np.array([max(0.0, tables.get(name, 0.0)) for tables in ranks]) for name in all_names}
    names = sorted(cells, key=lambda name: (-cells[name].sum(), name))
    separate, others = names[:MAX_TABLES], names[MAX_TABLES:]
    rows = [cells[name] for name in separate]
    labels = [style.fit_name(name, style.MAX_NAME_POINTS) for name in separate]
    if others:
        rows.append(np.sum([cells[name] for name in others], axis=0))
        labels.append(format_count(len(others), "other table"))
    return np.array(rows), labels


def _draw(
    cells: np.ndarray, names: list[str], ranks: list[int], title: str, kind: FuncFormatter, norm: Normalize
) -> tuple[Figure, Axes]:
    """Draw a map of tables × ranks below bars of each rank's total; return the plot and the axes of the bars."""
    height = 0.16 * len(names)
    ratios = 0.6, 0.3 + height
    figure, (bars, grid) = style.new_figure(title, 2.0 + height, 2, sharex=True, height_ratios=ratios)
    totals = cells.sum(axis=0)
    colours = [style.VERMILION if total > UNEVEN_BAR_FACTOR * totals.mean() else style.BLUE for total in totals]
    bars.bar(range(len(ranks)), totals, color=colours, width=0.8)
    bars.set_yticks([0, totals.max()])
    bars.yaxis.set_major_formatter(kind)
    bars.grid(axis="x", visible=False)
    bars.tick_params(bottom=False)
    image = grid.imshow(np.ma.masked_less_equal(cells, 0), cmap=MAP, norm=norm, aspect="auto")
    grid.set_yticks(range(len(names)), names)
    grid.set_xlabel("rank")
    grid.grid(visible=False)
    grid.tick_params(length=0)
    grid.xaxis.set_major_locator(MaxNLocator(8, integer=True, steps=style.ROUND))
    labels = dict(enumerate(map(str, ranks)))
    grid.xaxis.set_major_formatter(FuncFormatter(lambda x, _: labels.get(x, "")))
    if len(ranks) <= MAX_LABELED_RANKS:
        _write(grid, cells, kind, norm)
    else:
        bar = figure.colorbar(image, ax=grid, location="bottom", aspect=40, format=kind)
        bar.outline.set_visible(False)
        bar.minorticks_off()
        bar.set_ticks(norm.inverse([0, 0.25, 0.5, 0.75, 1]))
        bar.set_label("per table and rank")
    return figure, bars


def _write(axes: Axes, cells: np.ndarray, kind: FuncFormatter, norm: Normalize) -> None:
    """Write the value of each cell into it, in black or white depending on the cell's color."""
    colours = matplotlib.colormaps[MAP]
    for (row, column), value in np.ndenumerate(cells):
        if value > 0:
            red, green, blue, _ = colours(norm(value))
            ink = "black" if 0.3 * red + 0.59 * green + 0.11 * blue > 0.45 else "white"
            axes.text(column, row, kind(value), color=ink, ha="center", va="center", fontsize=6.5)


EDGES = np.logspace(-4, 2, BINS + 1)  # bin edges of row_norm_counts
FADING_COLORMAP = LinearSegmentedColormap.from_list("fading", [to_rgba(style.BLUE, 0.0), to_rgba(style.BLUE, 1.0)])
MAX_MAPS = 12
MAX_NAMED_LINES = 5  # maximum number of lines in a panel that have a color and a name

# Panels of `health`: (key of the statistic, label, True if the statistic is a share).
HEALTH_PANELS = (
    ("dead_share", "rows never\ntrained", True),
    ("unique_ratio", "distinct ids\n÷ ids", True),
    ("gradient_norm", "gradient\nnorm", False),
    ("update_norm", "update\nnorm", False),
)


@style.styled
def draw_row_norms(run: RunFolder) -> Figure | None:
    """Draw row norms over steps, with a panel for each of the MAX_MAPS most loaded tables; None if not recorded."""
    measured = {
        name: points
        for name, steps in run.tables.items()
        if (points := {s: e["row_norm_counts"] for s, e in steps.items() if sum(e["row_norm_counts"] or [0])})
    }
    if not measured:
        return None
    names = list(measured)[:MAX_MAPS]
    suffix = f"; the {MAX_MAPS} most loaded of {len(measured)} tables" if len(measured) > MAX_MAPS else ""
    title = f"Row norms over steps (more opaque: more rows){suffix}"
    figure, panels = style.new_grid(title, len(names), 0.8, 0.95, "row norm")
    for axes, name in zip(panels, names, strict=True):
        steps = sorted(measured[name])
        shares = np.array([np.array(measured[name][s]) / sum(measured[name][s]) for s in steps]).T
        axes.pcolormesh(_compute_column_borders(steps), EDGES, shares, cmap=FADING_COLORMAP, vmin=0, rasterized=True)
        axes.set_title(style.fit_name(name, style.MAX_PANEL_TITLE_POINTS, style.STYLE["axes.titlesize"]))
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(FixedLocator([1e-4, 1e-2, 1, 100]))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(style.PLAIN)
    return figure


@style.styled
def health(run: RunFolder) -> Figure | None:
    """Draw never-trained rows, distinct ids, and gradient and update norms of each table over steps.

    In each panel, only the MAX_NAMED_LINES lines with the highest final values have labels. The result is None if no
    statistic was recorded for at least two steps.
    """
    lines = {key: _select_series(run.tables, key) for key, _, _ in HEALTH_PANELS}
    specs = [panel for panel in HEALTH_PANELS if lines[panel[0]]]
    if not specs:
        return None
    title = "Table statistics over steps" + (
        f" (named: the {MAX_NAMED_LINES} highest final values)" if len(run.tables) > MAX_NAMED_LINES else ""
    )
    figure, panels = style.new_figure(title, 0.6 + 1.2 * len(specs), len(specs), sharex=True)
    for axes, (key, label, is_share) in zip(panels, specs, strict=True):
        ordered = sorted(lines[key].items(), key=lambda item: item[1][-1][1], reverse=True)
        for index, (name, points) in enumerate(reversed(ordered)):
            place = len(ordered) - 1 - index
            named = place < MAX_NAMED_LINES
            axes.plot(
                *zip(*points, strict=True),
                color=style.LINES[place] if named else style.GREY,
                linewidth=1.3 if named else 0.6,
                label=style.fit_name(name, style.MAX_NAME_POINTS) if named else None,
            )
        axes.set_ylabel(label)
        axes.yaxis.set_major_formatter(style.PERCENT if is_share else style.PLAIN)
        style.limit_ticks(axes.yaxis, 3)
        style.draw_restart_lines(axes, run.restarts, label=None)
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), reverse=True)
    style.format_step_axis(panels[-1])
    return figure


def _select_series(series: dict[str, dict[int, dict]], key: str) -> dict[str, list[tuple[int, float]]]:
    """Return table → (step, value) pairs of a statistic, for each table with this statistic at two or more steps."""
    points = {n: [(s, e[key]) for s, e in steps.items() if not isnan(e[key])] for n, steps in series.items()}
    return {name: found for name, found in points.items() if len(found) > 1}


def _compute_column_borders(steps: list[int]) -> np.ndarray:
    """Return the borders of the columns of a map over steps; inner borders lie midway between two steps."""
    if len(steps) == 1:
        return np.array([steps[0] - 1, steps[0]])
    middles = (np.array(steps[1:]) + np.array(steps[:-1])) / 2
    return np.array([2 * steps[0] - middles[0], *middles, 2 * steps[-1] - middles[-1]])
