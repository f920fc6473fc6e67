"""Plots of a run's time and events: phases of a step by rank, and speed, workers, faults, saves and checks."""

from __future__ import annotations

from statistics import median

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from raytrec.common.formatting import format_count, format_duration, shorten_name
from raytrec.common.messages import PHASES, Outcome, RankLine, Train
from raytrec.report.figures import style
from raytrec.report.figures.learning import points
from raytrec.report.findings import find_straggler
from raytrec.report.run_timeline import Mark, RunTimeline, build_timeline
from raytrec.tracking.aggregate import by_rank, get_own_time_s, skip_warmup, sum_over_time
from raytrec.tracking.run_folder import RunFolder

COLOURS = dict(zip(PHASES, style.PHASE_PALETTE, strict=True))
MAX_BARS = 16
MAX_PANELS = 6
EVENT_STYLES = {  # kind of event → label, color, marker
    "failed": ("failure", style.VERMILION, "X"),
    "hang": ("hang", style.PURPLE, "P"),
    "not saved": ("save failed", style.VERMILION, "v"),
    "asked": ("restart or stop requested", style.ORANGE, "^"),
    "waiting": ("too few nodes", style.MUTED, "s"),
    "stopped": ("stopped", style.INK, "s"),
    "saved": ("saved", style.GREEN, "|"),
}


@style.styled
def draw_elastic_timeline(run: RunFolder) -> Figure | None:
    """Draw the number of workers over time, and below it events and the step; None if no workers have started."""
    record = build_timeline(run)
    if not record.groups:
        return None
    unit, seconds = _choose_time_unit(max(group.end_s for group in record.groups))
    fig, (workers, steps) = style.new_figure(_make_title(record), 3.9, 2, sharex=True, height_ratios=(1, 2))
    _draw_workers(workers, record, seconds)
    _steps(steps, record, seconds)
    steps.set_xlabel(f"{unit} since the start")
    steps.xaxis.set_major_formatter(style.PLAIN)
    fig.legend(*steps.get_legend_handles_labels(), loc="outside lower left", ncols=3)
    return fig


def _draw_workers(axes: Axes, timeline: RunTimeline, unit_s: int) -> None:
    for group in timeline.groups:
        begin, end = group.begin_s / unit_s, group.end_s / unit_s
        axes.bar(begin, group.workers, end - begin, align="edge", color=style.SKY)
        if group.resumed_after_s:
            axes.axvline(begin, color=style.MUTED, linewidth=0.8, linestyle=":")
            text = f"resumed after {format_duration(group.resumed_after_s)}"
            above = axes.get_xaxis_transform()
            axes.text(begin, 1.02, text, transform=above, fontsize=6.5, ha="center", va="bottom")
    axes.set_ylabel("workers")
    axes.set_ylim(0, 1.15 * max(1, *(group.workers for group in timeline.groups)))
    style.limit_ticks(axes.yaxis, whole=True)


def _steps(axes: Axes, timeline: RunTimeline, unit_s: int) -> None:
    begins = [group.begin_s for group in timeline.groups]
    for begin, end in zip(begins, [*begins[1:], float("inf")], strict=True):
        points = [(at / unit_s, step) for at, step in timeline.progress if begin <= at < end]
        axes.plot([at for at, _ in points], [step for _, step in points], color=style.BLUE, linewidth=1)
    for kind, (name, colour, marker) in EVENT_STYLES.items():
        marks = [mark for mark in timeline.marks if mark.kind == kind]
        times, heights = ([mark.at_s / unit_s for mark in marks], [_get_mark_step(mark, timeline) for mark in marks])
        if marks:
            axes.scatter(times, heights, c=colour, marker=marker, s=32, label=name, zorder=3)
    axes.set_ylabel("step")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(style.WHOLE)
    style.limit_ticks(axes.yaxis, whole=True)


def _get_mark_step(mark: Mark, timeline: RunTimeline) -> int:
    """Return the step of a mark; for a mark without a step, the step of the run at that time."""
    if mark.step is not None:
        return mark.step
    return next((step for at, step in reversed(timeline.progress) if at <= mark.at_s), 0)


def _make_title(timeline: RunTimeline) -> str:
    seconds = max(group.end_s for group in timeline.groups)
    sizes = sorted({group.workers for group in timeline.groups})
    workers = format_count(sizes[0], "worker") if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]} workers"
    faults = timeline.count("failed") + timeline.count("hang")
    parts = [format_duration(seconds), workers, format_count(faults, "failure") if faults else "no failures"]
    if timeline.restarts:
        parts.append(format_count(timeline.restarts, "restart"))
    return f"The run: {', '.join(parts)}"


def _choose_time_unit(seconds: float) -> tuple[str, int]:
    if seconds < 180:
        return "seconds", 1
    return ("minutes", 60) if seconds < 3 * 3600 else ("hours", 3600)


@style.styled
def checks(run: RunFolder) -> Figure | None:
    """Draw each check on a line over steps, with a dot for each pass and a cross for each failure; None if none ran."""
    if not run.checks:
        return None
    names = list(dict.fromkeys(line.check for line in run.checks))
    failed = [line for line in run.checks if not line.passed]
    passed = [line for line in run.checks if line.passed]
    figure, (axes,) = style.new_figure(_make_checks_title(run.checks, failed), 1.3 + 0.2 * len(names))
    for lines, colour, marker, size, label in (
        (passed, style.GREEN, "o", 12, "passed"),
        (failed, style.VERMILION, "X", 45, "failed"),
    ):
        if not lines:
            continue
        places = [names.index(line.check) for line in lines]
        axes.scatter([line.step for line in lines], places, c=colour, marker=marker, s=size, label=label)
    axes.set_yticks(range(len(names)), [shorten_name(name) for name in names])
    axes.set_ylim(len(names) - 0.5, -0.5)
    style.draw_restart_lines(axes, run.restarts)
    style.format_step_axis(axes)
    figure.legend(ncols=3, loc="outside lower left")
    return figure


def _make_checks_title(checks: list[Outcome], failed: list[Outcome]) -> str:
    if not failed:
        return f"Checks: {len(checks)} of {len(checks)} passed"
    first = failed[0]
    also = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
    where = f"{shorten_name(first.check)} at step {first.step:,}{also}"
    return f"Checks: {len(failed)} of {len(checks)} failed: {where}"


@style.styled
def draw_throughput(run: RunFolder) -> Figure | None:
    """Draw the mean throughput of all ranks together since the start of the run, in rows per second, over steps.

    The result is None if fewer than two values are recorded.
    """
    steps, rates = points(run, Train, "rows_per_s")
    if len(steps) < 2:
        return None
    usual = median(rates)
    figure, (axes,) = style.new_figure(f"Speed: median of {usual:,.0f} rows/s", 1.9)
    axes.plot(*style.thin_line(steps, rates), color=style.BLUE)
    style.draw_restart_lines(axes, run.restarts)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("rows/s")
    style.limit_ticks(axes.yaxis)
    axes.yaxis.set_major_formatter(style.WHOLE)
    style.format_step_axis(axes)
    return figure


@style.styled
def draw_phase_totals(run: RunFolder) -> Figure | None:
    """Draw the milliseconds of each phase per step, as bars for the MAX_BARS slowest ranks of the last worker group.

    The result is None if no intervals are recorded.
    """
    ranks = [line for line in sum_over_time(skip_warmup(run.ranks)) if line.steps]
    if not ranks:
        return None
    selected, suffix = _select_slowest(ranks, MAX_BARS)
    slow = find_straggler(ranks)
    title = f"Time of a step: {slow.partition(':')[0]}" if slow else f"Time of a step{suffix}"
    figure, (axes,) = style.new_figure(title, 1.6 + 0.2 * len(selected))
    offsets = [0.0] * len(selected)
    for phase in PHASES:
        widths = [line.phase_s(phase) / line.steps * 1e3 for line in selected]
        axes.barh(
            range(len(selected)), widths, left=offsets, color=COLOURS[phase], label=_format_phase(phase), height=0.75
        )
        offsets = [a + b for a, b in zip(offsets, widths, strict=True)]
    axes.set_yticks(range(len(selected)), [f"rank {line.rank}" for line in selected])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("ms per step")
    figure.legend(loc="outside lower left", ncols=4)
    return figure


@style.styled
def draw_phases_over_steps(run: RunFolder) -> Figure | None:
    """Draw the milliseconds of each phase per step, over steps, in panels for the MAX_PANELS slowest ranks.

    The result is None if no intervals are recorded.
    """
    ranks = [line for line in sum_over_time(run.ranks) if line.steps]
    if not ranks:
        return None
    selected, suffix = _select_slowest(ranks, MAX_PANELS)
    title = f"Time of a step over steps{suffix}"
    figure, panels = style.new_grid(title, len(selected), 1.2, 1.15, "ms per step")
    lines = by_rank(run.ranks)
    for axes, total in zip(panels, selected, strict=True):
        _draw_phase_areas(axes, lines[total.rank])
        axes.set_title(f"rank {total.rank}")
        style.draw_restart_lines(axes, run.restarts, label=None)
        style.limit_ticks(axes.yaxis)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower left", ncols=4)
    return figure


def _draw_phase_areas(axes: Axes, lines: list[RankLine]) -> None:
    """Draw the phases of a rank's intervals as stacked areas, with gaps for steps in which the rank did not exist."""
    edges: list[int] = [lines[0].first_step]
    spans: list[RankLine | None] = []
    for line in lines:
        if line.first_step > edges[-1]:
            edges.append(line.first_step)
            spans.append(None)
        edges.append(line.step)
        spans.append(line)
    bottom = [0.0] * len(spans)
    for phase in PHASES:
        heights = [line.phase_s(phase) / line.steps * 1e3 if line and line.steps else 0.0 for line in spans]
        top = [a + b for a, b in zip(bottom, heights, strict=True)]
        axes.stairs(top, edges, baseline=bottom, fill=True, color=COLOURS[phase], label=_format_phase(phase))
        bottom = top
    axes.set_ylim(bottom=0)


def _select_slowest(ranks: list[RankLine], max_count: int) -> tuple[list[RankLine], str]:
    """Return up to `max_count` ranks with the most own time per step, and the end of a title that states the choice."""
    if len(ranks) <= max_count:
        return ranks, ", by rank" if len(ranks) > 1 else ""
    chosen = sorted(ranks, key=lambda line: get_own_time_s(line) / line.steps, reverse=True)[:max_count]
    return chosen, f": the {max_count} of {len(ranks)} ranks with the most own time"


def _format_phase(phase: str) -> str:
    return phase.replace("_", " ")
