"""Where the time of a step goes, rank by rank."""

from __future__ import annotations

from statistics import median

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from raytrec.common.messages import PHASES, RankLine, Train
from raytrec.report.figures import style
from raytrec.report.figures.learning import points
from raytrec.report.findings import straggler
from raytrec.tracking.aggregate import by_rank, own_time, skip_warmup, sum_over_time
from raytrec.tracking.run_folder import RunFolder

COLOURS = dict(zip(PHASES, style.NINE, strict=True))
MOST_BARS = 16
MOST_PANELS = 6


@style.styled
def throughput(run: RunFolder) -> Figure | None:
    """Draw rows trained per second by all ranks together, over steps."""
    steps, rates = points(run, Train, "rows_per_s")
    if len(steps) < 2:
        return None
    usual = median(rates)
    made, (axes,) = style.new_figure(f"Speed: {usual:,.0f} rows/s in the median", 1.9)
    axes.plot(*style.thinned(steps, rates), color=style.BLUE)
    style.restart_lines(axes, run.restarts)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("rows/s")
    style.few_ticks(axes.yaxis)
    axes.yaxis.set_major_formatter(style.WHOLE)
    style.step_axis(axes)
    return made


@style.styled
def in_total(run: RunFolder) -> Figure | None:
    """Milliseconds a step in each phase, a bar for each rank of the last group of workers."""
    ranks = [line for line in sum_over_time(skip_warmup(run.ranks)) if line.steps]
    if not ranks:
        return None
    shown, which = _slowest(ranks, MOST_BARS)
    title = _title(ranks) or f"Time of a step{which}"
    made, (axes,) = style.new_figure(title, 1.6 + 0.2 * len(shown))
    left = [0.0] * len(shown)
    for phase in PHASES:
        widths = [line.phase_s(phase) / line.steps * 1e3 for line in shown]
        axes.barh(
            range(len(shown)), widths, left=left, color=COLOURS[phase], label=_words(phase), height=0.75
        )
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(shown)), [f"rank {line.rank}" for line in shown])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("ms a step")
    made.legend(loc="outside lower left", ncols=4)
    return made


@style.styled
def over_steps(run: RunFolder) -> Figure | None:
    """Milliseconds a step in each phase over steps, a panel for each rank."""
    ranks = [line for line in sum_over_time(run.ranks) if line.steps]
    if not ranks:
        return None
    shown, which = _slowest(ranks, MOST_PANELS)
    columns = 2 if len(shown) > 1 else 1
    rows = -(-len(shown) // columns)
    made, panels = style.new_figure(
        f"Time of a step over steps{which}", 1.2 + 1.15 * rows, rows, columns, sharex=True, sharey=True
    )
    lines = by_rank(run.ranks)
    for axes, total in zip(panels, shown, strict=False):
        _stack(axes, lines[total.rank])
        axes.set_title(f"rank {total.rank}")
        style.restart_lines(axes, run.restarts, label=None)
        style.few_ticks(axes.yaxis)
    style.lowest_panels(panels, len(shown), columns)
    made.supylabel("ms a step", fontsize=8.5)
    made.legend(*panels[0].get_legend_handles_labels(), loc="outside lower left", ncols=4)
    return made


def _stack(axes: Axes, lines: list[RankLine]) -> None:
    """Each interval as wide as its steps; nothing where the rank was not there."""
    edges: list[int] = [lines[0].first_step]
    kept: list[RankLine | None] = []
    for line in lines:
        if line.first_step > edges[-1]:
            edges.append(line.first_step)
            kept.append(None)
        edges.append(line.step)
        kept.append(line)
    bottom = [0.0] * len(kept)
    for phase in PHASES:
        heights = [line.phase_s(phase) / line.steps * 1e3 if line and line.steps else 0.0 for line in kept]
        top = [a + b for a, b in zip(bottom, heights, strict=True)]
        axes.stairs(top, edges, baseline=bottom, fill=True, color=COLOURS[phase], label=_words(phase))
        bottom = top
    axes.set_ylim(bottom=0)


def _slowest(ranks: list[RankLine], most: int) -> tuple[list[RankLine], str]:
    """Those with the most own time a step, if there are too many; and words for a title."""
    if len(ranks) <= most:
        return ranks, ", by rank" if len(ranks) > 1 else ""
    chosen = sorted(ranks, key=lambda line: own_time(line) / line.steps, reverse=True)[:most]
    return chosen, f": the {most} of {len(ranks)} ranks with the most own time"


def _words(phase: str) -> str:
    return phase.replace("_", " ")


def _title(ranks: list[RankLine]) -> str | None:
    """Names the straggler, if there is one."""
    sentence = straggler(ranks)
    return sentence and f"Time of a step: {sentence.partition(':')[0]}"
