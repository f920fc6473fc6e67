"""The curves of several runs over one another."""

from __future__ import annotations

from matplotlib.figure import Figure

from raytrec.report.figures.learning import points
from raytrec.report.figures.style import (
    LINES,
    PLAIN,
    few_ticks,
    fitted,
    new_figure,
    step_axis,
    styled,
    thinned,
)
from raytrec.report.history import History

DASHES = ("-", "--", ":")  # more runs than colours: the colours again, dashed


@styled
def overlay(runs: list[History], names: list[str]) -> list[Figure]:
    """A picture of each metric that should be low or high, in training and evaluations: a line for each run.

    A diamond is a final evaluation, which may be of other data than those before it.
    """
    metrics = {each.key: each.label for run in runs for each in run.metrics_of_tasks if each.directed}
    found = {
        (kind, name): f"{label} {where}"
        for kind, where in (("train", "in training"), ("eval", "in evaluations (diamonds: final ones)"))
        for name, label in metrics.items()
        if any(points(run, each, name)[0] for run in runs for each in _kinds(kind))
    }
    pictures = []
    for (kind, name), title in found.items():
        made, (axes,) = new_figure(title, 1.9 + 0.2 * -(-len(runs) // 2))
        for index, (run, called) in enumerate(zip(runs, names, strict=True)):
            colour, dash = LINES[index % len(LINES)], DASHES[index // len(LINES) % len(DASHES)]
            steps, values = thinned(*points(run, kind, name))
            marker = "." if kind == "eval" else None
            axes.plot(steps, values, label=fitted(called, 130), color=colour, linestyle=dash, marker=marker)
            if kind == "eval":
                axes.plot(
                    *points(run, "final", name), color=colour, linestyle="none", marker="D", markersize=5
                )
        axes.yaxis.set_major_formatter(PLAIN)
        few_ticks(axes.yaxis)
        step_axis(axes)
        made.legend(ncols=2, loc="outside lower left")
        pictures.append(made)
    return pictures


def _kinds(kind: str) -> tuple[str, ...]:
    return (kind, "final") if kind == "eval" else (kind,)
