"""The curves of several runs over one another."""

from __future__ import annotations

from matplotlib.figure import Figure

from raytrec.common.formatting import short
from raytrec.report.figures.learning import points
from raytrec.report.figures.style import (
    LINES,
    PLAIN,
    few_ticks,
    new_figure,
    step_axis,
    styled,
    thinned,
)
from raytrec.report.history import History

DASHES = ("-", "--", ":")  # more runs than colours: the colours again, dashed


@styled
def overlay(runs: list[History], names: list[str]) -> Figure | None:
    """Panels of the metrics that should be low or high, in training and in evaluations; a line for each run.

    A diamond is a final evaluation, which may be of other data than those before it.
    """
    metrics = {each.key: each.label for run in runs for each in run.metrics_of_tasks if each.directed}
    found = {
        (kind, name): f"{word}\n{label}"
        for kind, word in (("train", "training"), ("eval", "evaluation"))
        for name, label in metrics.items()
        if any(points(run, each, name)[0] for run in runs for each in _kinds(kind))
    }
    if not found:
        return None
    height = 0.7 + 1.5 * len(found) + 0.2 * -(-len(runs) // 2)
    made, panels = new_figure(
        "Curves over steps (diamonds: final evaluations)", height, len(found), sharex=True
    )
    for axes, ((kind, name), label) in zip(panels, found.items(), strict=True):
        for index, (run, called) in enumerate(zip(runs, names, strict=True)):
            colour, dash = LINES[index % len(LINES)], DASHES[index // len(LINES) % len(DASHES)]
            steps, values = thinned(*points(run, kind, name))
            marker = "." if kind == "eval" else None
            axes.plot(steps, values, label=short(called, 28), color=colour, linestyle=dash, marker=marker)
            if kind == "eval":
                axes.plot(
                    *points(run, "final", name), color=colour, linestyle="none", marker="D", markersize=5
                )
        axes.set_ylabel(label)
        axes.yaxis.set_major_formatter(PLAIN)
        few_ticks(axes.yaxis)
    step_axis(panels[-1])
    made.legend(*panels[0].get_legend_handles_labels(), ncols=2, loc="outside lower left")
    return made


def _kinds(kind: str) -> tuple[str, ...]:
    return (kind, "final") if kind == "eval" else (kind,)
