"""Workers, steps, faults, saves and checks over time."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from raytrec.common.formatting import count, duration, short
from raytrec.common.messages import Outcome
from raytrec.report.figures import style
from raytrec.report.run_timeline import Mark, Story, story
from raytrec.tracking.run_folder import RunFolder

MARKS = {  # event: its name, colour, marker
    "failed": ("failure", style.VERMILION, "X"),
    "hang": ("hang", style.PURPLE, "P"),
    "not saved": ("save failed", style.VERMILION, "v"),
    "asked": ("restart or stop asked for", style.ORANGE, "^"),
    "waiting": ("too few nodes", style.MUTED, "s"),
    "stopped": ("stopped", style.INK, "s"),
    "saved": ("saved", style.GREEN, "|"),
}


@style.styled
def elastic(run: RunFolder) -> Figure | None:
    """Above: workers. Below: the step that the run was at, going back after a failure; and its marks."""
    told = story(run)
    if not told.groups:
        return None
    unit, seconds = _unit(max(group.end_s for group in told.groups))
    made, (workers, steps) = style.new_figure(_title(told), 3.9, 2, sharex=True, height_ratios=(1, 2))
    _workers(workers, told, seconds)
    _steps(steps, told, seconds)
    steps.set_xlabel(f"{unit} since the start")
    steps.xaxis.set_major_formatter(style.PLAIN)
    made.legend(*steps.get_legend_handles_labels(), loc="outside lower left", ncols=3)
    return made


def _workers(axes: Axes, told: Story, unit_s: int) -> None:
    for group in told.groups:
        begin, end = group.begin_s / unit_s, group.end_s / unit_s
        axes.bar(begin, group.workers, end - begin, align="edge", color=style.SKY)
        if group.resumed_after_s:
            axes.axvline(begin, color=style.MUTED, linewidth=0.8, linestyle=":")
            text = f"resumed after {duration(group.resumed_after_s)}"
            above = axes.get_xaxis_transform()
            axes.text(begin, 1.02, text, transform=above, fontsize=6.5, ha="center", va="bottom")
    axes.set_ylabel("workers")
    axes.set_ylim(0, 1.15 * max(1, *(group.workers for group in told.groups)))
    style.few_ticks(axes.yaxis, whole=True)


def _steps(axes: Axes, told: Story, unit_s: int) -> None:
    begins = [group.begin_s for group in told.groups]
    for begin, end in zip(begins, [*begins[1:], float("inf")], strict=True):
        points = [(at / unit_s, step) for at, step in told.progress if begin <= at < end]
        axes.plot([at for at, _ in points], [step for _, step in points], color=style.BLUE, linewidth=1)
    for kind, (name, colour, marker) in MARKS.items():
        marks = [mark for mark in told.marks if mark.kind == kind]
        times, heights = [mark.at_s / unit_s for mark in marks], [_height(mark, told) for mark in marks]
        if marks:
            axes.scatter(times, heights, c=colour, marker=marker, s=32, label=name, zorder=3)
    axes.set_ylabel("step")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(style.WHOLE)
    style.few_ticks(axes.yaxis, whole=True)


def _height(mark: Mark, told: Story) -> int:
    """The step of a mark, or the one that the run was at."""
    if mark.step is not None:
        return mark.step
    return next((step for at, step in reversed(told.progress) if at <= mark.at_s), 0)


def _title(told: Story) -> str:
    seconds = max(group.end_s for group in told.groups)
    sizes = sorted({group.workers for group in told.groups})
    workers = count(sizes[0], "worker") if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]} workers"
    faults = told.count("failed") + told.count("hang")
    parts = [duration(seconds), workers, count(faults, "failure") if faults else "no failures"]
    if told.restarts:
        parts.append(count(told.restarts, "restart"))
    return f"The run: {', '.join(parts)}"


def _unit(seconds: float) -> tuple[str, int]:
    if seconds < 180:
        return "seconds", 1
    return ("minutes", 60) if seconds < 3 * 3600 else ("hours", 3600)


@style.styled
def checks(run: RunFolder) -> Figure | None:
    """A line for each check: a dot where it passed, a cross where it failed."""
    if not run.checks:
        return None
    names = list(dict.fromkeys(line.check for line in run.checks))
    failed = [line for line in run.checks if not line.passed]
    made, (axes,) = style.new_figure(_checks_title(run.checks, failed), 1.3 + 0.2 * len(names))
    passed = [line for line in run.checks if line.passed]
    for lines, colour, marker, size, label in (
        (passed, style.GREEN, "o", 12, "passed"),
        (failed, style.VERMILION, "X", 45, "failed"),
    ):
        if not lines:
            continue
        places = [names.index(line.check) for line in lines]
        axes.scatter([line.step for line in lines], places, c=colour, marker=marker, s=size, label=label)
    axes.set_yticks(range(len(names)), [short(name) for name in names])
    axes.set_ylim(len(names) - 0.5, -0.5)
    style.restart_lines(axes, run.restarts)
    style.step_axis(axes)
    made.legend(ncols=3, loc="outside lower left")
    return made


def _checks_title(checks: list[Outcome], failed: list[Outcome]) -> str:
    if not failed:
        return f"Checks: all {len(checks)} passed"
    first = failed[0]
    also = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
    where = f"{short(first.check)} at step {first.step:,}{also}"
    return f"Checks: {len(failed)} of {len(checks)} failed: {where}"
