"""Common style of all plots, and conversion of plots to PNG and SVG, without pyplot and its global state.

Plots are legible on a page 360 pixels wide, and fit side by side on a wide page.
"""

from __future__ import annotations

import io
import re
import textwrap
import warnings
from collections.abc import Callable, Sequence
from functools import cache, wraps
from html import escape
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, get_font
from matplotlib.ticker import FuncFormatter, MaxNLocator

from raytrec.common.formatting import format_bytes, format_percent, shorten_name

WIDTH = 4.2  # inches
MAX_TITLE_CHARACTERS = 54  # characters in a line of a title
# Maximum width in points of a title above one of two adjacent panels, and of a name next to a panel.
MAX_PANEL_TITLE_POINTS, MAX_NAME_POINTS = 112, 90
FONT = "DejaVu Sans"
MAX_LINE_POINTS = 1000  # maximum number of points in a line
MAX_MARKED_POINTS = 5  # maximum number of clipped points whose values are written at the edge
OUTLIER_RANGE_FACTOR = 4  # initial points that exceed later points by more than this factor × their range are clipped
ROUND = (1, 2, 2.5, 5, 10)  # intervals between ticks are these numbers × a power of ten

# Colors by role. In SVG, THEME replaces them by variables of the page, which depend on light or dark mode.
INK, MUTED, GRID = "#24292f", "#6a737d", "#d7dce1"
# Okabe and Ito's palette, which is distinguishable with any kind of color vision.
BLUE, ORANGE, GREEN, VERMILION = "#0072b2", "#e69f00", "#009e73", "#d55e00"
PURPLE, SKY, YELLOW, GREY = "#cc79a7", "#56b4e9", "#f0e442", "#999999"
THEME = {INK: "var(--ink)", MUTED: "var(--muted)", GRID: "var(--grid)", BLUE: "var(--blue)"}
LINES = (BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY)
PHASE_PALETTE = (ORANGE, YELLOW, PURPLE, INK, SKY, BLUE, GREEN, VERMILION, GREY)  # colors of a step's phases

STYLE: dict[str, Any] = {
    "font.size": 8.5,
    "font.family": "sans-serif",
    "font.sans-serif": [FONT],
    "axes.titlesize": 8.5,
    "axes.titlelocation": "left",
    "axes.labelsize": 8.5,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.formatter.useoffset": False,
    "grid.color": GRID,
    "grid.linewidth": 0.5,
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 7.5,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "text.color": INK,
    "text.parse_math": False,  # names may contain a $
    "legend.fontsize": 7.5,
    "legend.frameon": False,
    "legend.handlelength": 1.4,
    "legend.borderaxespad": 0.2,
    "lines.linewidth": 1.3,
    "figure.titlesize": 9,
    "figure.titleweight": "bold",
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "white",
    "figure.dpi": 96,
    "svg.fonttype": "none",  # text stays text: smaller, searchable, accessible to screen readers
}


def styled(draw: Callable) -> Callable:
    """Return a wrapper of a function, in which plots are drawn with STYLE."""

    @wraps(draw)
    def inner(*arguments, **options):
        with matplotlib.rc_context(STYLE):
            return draw(*arguments, **options)

    return inner


def new_figure(title: str, height: float, rows: int = 1, columns: int = 1, **options) -> tuple[Figure, list[Axes]]:
    """Return a plot with a title above its axes, and a list of the axes row by row.

    Args:
        title: Title, which summarizes the content.
        height: Height in inches, including the title.
        rows: Number of rows of axes.
        columns: Number of columns of axes.
        options: Keyword arguments of Figure.subplots.
    """
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **options)
    figure.suptitle(textwrap.fill(title, MAX_TITLE_CHARACTERS), x=0.01, ha="left")
    return figure, list(axes.flat)


def new_grid(title: str, count: int, height: float, row_height: float, label: str) -> tuple[Figure, list[Axes]]:
    """Return a plot with panels over steps, in at most two columns with shared axes, and a list of the panels.

    Args:
        title: Title, which summarizes the content.
        count: Number of panels.
        height: Height in inches of the plot without its panels.
        row_height: Height in inches of each row of panels.
        label: Label of the y axis.
    """
    columns = 2 if count > 1 else 1
    rows = -(-count // columns)
    figure, panels = new_figure(title, height + row_height * rows, rows, columns, sharex=True, sharey=True)
    for axes in panels[count:]:
        axes.set_axis_off()
    for axes in panels[max(0, count - columns) : count]:
        format_step_axis(axes)
        limit_ticks(axes.xaxis, 3)
        axes.tick_params(labelbottom=True)
    figure.supylabel(label, fontsize=8.5)
    return figure, panels[:count]


@styled
def save_png(figure: Figure, path: Path) -> None:
    """Write a plot to a PNG file with a white background."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # the font may lack the script of a name
        figure.savefig(path, format="png", dpi=200)


@styled
def to_svg(figure: Figure, label: str) -> str:
    """Return a plot as an <svg> element for a page that defines the CSS variables in THEME.

    `label` describes the content for screen readers and must be unique on the page.
    """
    text = io.StringIO()
    # Ids of reused elements are hashes; the salt makes them unique to this plot.
    with warnings.catch_warnings(), matplotlib.rc_context({"svg.hashsalt": label}):
        warnings.filterwarnings("ignore", "Glyph .* missing")
        no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        # savefig would draw everything twice.
        FigureCanvasSVG(figure).print_svg(text, metadata=no_metadata)
    figure.set_layout_engine("none")  # the layout is final, also for other formats
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)  # ids must be unique on a page
    for colour, variable in THEME.items():
        svg = svg.replace(colour, variable)
    return svg.replace("<svg", f'<svg role="img" aria-label="{escape(label)}"', 1)


def to_standalone_svg(svg: str) -> str:
    """Return an element from `to_svg` as the text of an SVG file with a white background."""
    for colour, variable in THEME.items():
        svg = svg.replace(variable, colour)
    return svg.replace("<svg", '<svg style="background: white"', 1)


def thin_line(xs: Sequence[float], ys: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return the x and y values of a line, reduced to at most MAX_LINE_POINTS points.

    Beyond this number, neighbors are combined into a point at their last x with the mean of their y values.
    """
    size = -(-len(xs) // MAX_LINE_POINTS)
    if size <= 1:
        return list(xs), list(ys)
    starts = range(0, len(xs), size)
    return [xs[min(s + size, len(xs)) - 1] for s in starts], [
        sum(ys[s : s + size]) / len(ys[s : s + size]) for s in starts
    ]


def format_step_axis(axes: Axes) -> None:
    """Format the x axis for steps, as integers with thousands separators."""
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=ROUND))
    axes.xaxis.set_major_formatter(WHOLE)


def limit_ticks(axis: Axis, max_ticks: int = 4, whole: bool = False) -> None:
    """Limit an axis to at most `max_ticks` intervals between round ticks, at whole numbers only if `whole` is True."""
    axis.set_major_locator(MaxNLocator(max_ticks, integer=whole, steps=ROUND))


def fit_name(name: object, points: float, size: float = STYLE["xtick.labelsize"]) -> str:
    """Return a name, with "…" for its middle if it exceeds 60 characters, or `points` in width at font size `size`."""
    text, max_chars = shorten_name(name, 60), 60
    while max_chars > 3 and sum(map(_measure_em, text)) * size > points:
        max_chars = min(max_chars, len(text)) - 1
        text = shorten_name(name, max_chars)
    return text


@cache
def _measure_em(character: str) -> float:
    """Return the width of a character in em; a character that FONT lacks has a fixed width."""
    font = get_font(findfont(FONT))
    font.set_size(100, 72)
    has_glyph = font.get_char_index(ord(character))
    return font.load_char(ord(character)).linearHoriAdvance / 65536 / 100 if has_glyph else 1.2


def draw_restart_lines(axes: Axes, steps: Sequence[int], label: str | None = "restart") -> None:
    """Draw dashed vertical lines at the steps at which a run was restarted; only the first line has the label."""
    for index, step in enumerate(steps):
        axes.axvline(step, color=MUTED, linewidth=0.8, linestyle=(0, (3, 2)), label=None if index else label)


def clip_initial_outliers(axes: Axes) -> None:
    """Fit the y axis to all lines without their first tenth if the first tenth reaches far above the other points.

    At the upper edge, a triangle with a value marks the highest point of up to MAX_MARKED_POINTS clipped lines. Lines
    with fewer than five points are used in full.
    """
    lines = [(line.get_color(), *map(list, line.get_data())) for line in axes.lines if len(line.get_ydata())]
    later = [y for _, _, ys in lines for y in ys[len(ys) // 10 + 1 if len(ys) >= 5 else 0 :]]
    low, high = min(later), max(later)
    span = high - low or abs(high) or 1.0
    highest = [(colour, *max(zip(ys, xs, strict=True))) for colour, xs, ys in lines]
    if all(y <= high + OUTLIER_RANGE_FACTOR * span for _, y, _ in highest):
        return
    axes.set_ylim(low - 0.05 * span, high + 0.3 * span)
    cut = [each for each in highest if each[1] > high + 0.3 * span][:MAX_MARKED_POINTS]
    for number, (colour, y, x) in enumerate(cut):
        text: dict[str, Any] = {"color": colour, "va": "top", "fontsize": STYLE["xtick.labelsize"]}
        text |= {"xytext": (-4, -8 * number), "textcoords": "offset points"}
        axes.annotate(f"▲ {y:.3g}", (x, 1), xycoords=axes.get_xaxis_transform(), **text)


PERCENT = FuncFormatter(lambda value, _: format_percent(round(value, 6)))
BYTES = FuncFormatter(lambda value, _: format_bytes(value))
WHOLE = FuncFormatter(lambda value, _: f"{value:,.0f}")
PLAIN = FuncFormatter(lambda value, _: f"{value:g}")  # without powers of ten, even on logarithmic axes
