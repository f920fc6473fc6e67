"""Consistency checks over steps: what passed and what failed."""

from __future__ import annotations

from matplotlib.figure import Figure

from raytrec.common.formatting import short
from raytrec.report.figures.style import GREEN, VERMILION, new_figure, restart_lines, step_axis, styled
from raytrec.report.history import History


@styled
def strip(history: History) -> Figure | None:
    """A line for each check: a dot where it passed, a cross where it failed."""
    if not history.checks:
        return None
    names = list(dict.fromkeys(str(line.get("check")) for line in history.checks))
    failed = [line for line in history.checks if line.get("passed") is False]
    made, (axes,) = new_figure(_title(history.checks, failed), 1.3 + 0.2 * len(names))
    passed = [line for line in history.checks if line.get("passed") is True]
    for lines, colour, marker, size, label in (
        (passed, GREEN, "o", 12, "passed"),
        (failed, VERMILION, "X", 45, "failed"),
    ):
        if not lines:
            continue
        places = [names.index(str(line.get("check"))) for line in lines]
        axes.scatter([line["step"] for line in lines], places, c=colour, marker=marker, s=size, label=label)
    axes.set_yticks(range(len(names)), [short(name) for name in names])
    axes.set_ylim(len(names) - 0.5, -0.5)
    restart_lines(axes, history.restarts())
    step_axis(axes)
    made.legend(ncols=3, loc="outside lower left")
    return made


def _title(checks: list[dict], failed: list[dict]) -> str:
    if not failed:
        return f"Checks: all {len(checks)} passed"
    first = failed[0]
    also = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
    where = f"{short(first.get('check'))} at step {first['step']:,}{also}"
    return f"Checks: {len(failed)} of {len(checks)} failed: {where}"
