"""A run as it goes, in a notebook or on a terminal."""

from __future__ import annotations

import sys
from html import escape
from io import BytesIO
from time import monotonic
from typing import Any

from raytrec.client.points import Points
from raytrec.driver import progress_log as lines
from raytrec.driver.console import RunConsole
from raytrec.metrics.results import format_result

REDRAW_S = 3.0  # seconds between two drawings of the curves
COLOURS = {"finished": "#009e73", "failed": "#d55e00", "interrupted": "#d55e00", "stopped": "#e69f00"}


def display(name: str) -> InNotebook | OnTerminal:
    """What shows a run here: a context manager, to be called with what is known (Points)."""
    return InNotebook(name) if _in_notebook() else OnTerminal(name)


class InNotebook:
    """Progress, figures and curves as outputs of a cell, which are redrawn while the run is on."""

    def __init__(self, name: str):
        self._name, self._drawn_at, self._picture = name, 0.0, None

    def __enter__(self) -> InNotebook:
        from IPython.display import HTML
        from IPython.display import display as put

        self._line = put(HTML(f"<b>{escape(self._name)}</b>"), display_id=True)
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __call__(self, points: Points) -> None:
        from IPython.display import HTML

        self._line.update(HTML(progress_html(self._name, points)))
        ended = points.state not in ("starting", "running")
        if points.fresh and (ended or monotonic() - self._drawn_at > REDRAW_S):
            self._drawn_at, points.fresh = monotonic(), False
            self._draw(points)

    def note(self, text: str) -> None:
        print(text)

    def _draw(self, points: Points) -> None:
        from IPython.display import Image
        from IPython.display import display as put

        picture = Image(curves_png(points), width=560)
        if self._picture is None:
            self._picture = put(picture, display_id=True)
        else:
            self._picture.update(picture)


class OnTerminal:
    """The same lines as those of `raytrec train`."""

    def __init__(self, name: str):
        self._console, self._started, self._shown = RunConsole(name), False, (0, 0)

    def __enter__(self) -> OnTerminal:
        self._console.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._console.__exit__(*error)

    def __call__(self, points: Points) -> None:
        known, evaluation = points.progress(), points.evaluation()
        if known["total"] and not self._started:
            self._console.start(known["total"], metrics=[figure.record() for figure in points.figures])
            self._started = True
        trained, evaluated = self._shown
        if self._started and known["step"] > trained and (keys := points.keys("train")):
            figures = {key: known[key] for key in keys}
            self._console.train(known["step"], rows_per_s=known["rows_per_s"], **figures)
        if evaluation.get("step", 0) > evaluated:
            self._console.eval(**evaluation)
        self._shown = max(trained, known["step"]), max(evaluated, evaluation.get("step", 0))

    def note(self, text: str) -> None:
        self._console.note(text)


def progress_html(name: str, points: Points) -> str:
    """A bar and a line of figures; at the end, the result."""
    known = points.progress()
    share = 100 * known["step"] / known["total"] if known["total"] else 0
    colour = COLOURS.get(points.state, "#0072b2")
    if points.result:
        rows = [row for row in format_result(points.result).values() if row.brief]
        text = " · ".join(f"{escape(row.title)} <b>{escape(row.text)}</b>" for row in rows)
    elif points.error:
        text = f"<pre style='margin:0'>{escape(points.error['what'])}</pre>"
    else:
        text = escape(" · ".join(_progress(points, known)))
    bar = f"height:6px;border-radius:3px;background:{colour};width:{share:.1f}%"
    return (
        "<div style='font:13px system-ui,sans-serif;max-width:560px'>"
        f"<div style='display:flex;justify-content:space-between'><b>{escape(name)}</b>"
        f"<span style='color:{colour}'>{points.state}</span></div>"
        f"<div style='background:#8883;border-radius:3px;margin:4px 0'><div style='{bar}'></div></div>"
        f"{text}</div>"
    )


def curves_png(points: Points) -> bytes:
    """The metrics so far, as in the run's report."""
    from raytrec.report.figures.learning import curves
    from raytrec.report.figures.style import save_png

    out = BytesIO()
    save_png(curves(points.history()), out)
    return out.getvalue()


def _progress(points: Points, known: dict[str, Any]) -> list[str]:
    """The parts of a line about a run that trains."""
    if not (keys := points.keys("train")):
        return ["waiting for the first figures"]
    speed = f"{known['rows_per_s']:,.0f} rows/s" if known["rows_per_s"] else ""
    left = lines.remaining(known["eta_s"]) if known["eta_s"] is not None else ""
    shown = [figure for figure in points.figures if figure.key in keys and figure.directed]
    figures = [f"{figure.label} {figure.text(known[figure.key])}" for figure in shown]
    parts = [f"step {known['step']:,} of {known['total'] or '?'}", speed, *figures, left]
    return [part for part in parts if part]


def _in_notebook() -> bool:
    """Whether this is a kernel, which takes displays."""
    module = sys.modules.get("IPython")
    shell = module.get_ipython() if module else None
    return shell is not None and hasattr(shell, "kernel")
