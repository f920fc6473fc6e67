"""Display a run in a notebook."""

from __future__ import annotations

import sys
from base64 import b64encode
from html import escape
from io import BytesIO
from time import monotonic
from typing import TYPE_CHECKING, Any

from raytrec.common.messages import Eval, Train
from raytrec.metrics.results import format_result
from raytrec.tracking import progress_log as lines
from raytrec.tracking.history import History

if TYPE_CHECKING:
    from raytrec.client.run import Run

REDRAW_INTERVAL_S = 3.0  # time between two redraws of the curves
COLOURS = {"finished": "#009e73", "failed": "#d55e00", "interrupted": "#d55e00", "stopped": "#e69f00"}


def find_notebook_display(name: str) -> NotebookDisplay | None:
    """Return a display in the output of the current notebook cell, or None outside of notebooks."""
    module = sys.modules.get("IPython")
    shell = module.get_ipython() if module else None
    return NotebookDisplay(name) if hasattr(shell, "kernel") else None


class NotebookDisplay:
    """Display of a run in the output of a notebook cell: progress, metrics and curves, updated in place.

    Args:
        name: Name of the run, shown as a title.
    """

    def __init__(self, name: str):
        self._name, self._drawn_at, self._drawn = name, 0.0, (0, 0)
        self._outputs: dict[str, Any] = {}  # name (line or curves) → display handle of the output

    def __call__(self, run: Run) -> None:
        """Update the display with data that `run` has already read."""
        from IPython.display import HTML, Image

        self._show("line", HTML(render_progress(self._name, run)))
        figures = run.history.step, len(run.history.figures(Eval))
        ended = run.state not in ("starting", "running")
        if figures != self._drawn and (ended or monotonic() - self._drawn_at > REDRAW_INTERVAL_S):
            self._drawn_at, self._drawn = monotonic(), figures
            if curves := render_curves(run.history):
                self._show("curves", Image(curves, width=560))

    def _show(self, output: str, content: Any) -> None:
        from IPython.display import display as put

        if output in self._outputs:
            self._outputs[output].update(content)
        else:
            self._outputs[output] = put(content, display_id=True)


class Pictures(dict):
    """Mapping from name to PNG bytes of a picture; notebooks display the pictures."""

    def __repr__(self) -> str:
        return f"<Pictures {', '.join(self)}>"

    def _repr_html_(self) -> str:
        style = "width:420px;max-width:100%;margin:4px;background:white"
        data = {escape(name): f"data:image/png;base64,{b64encode(png).decode()}" for name, png in self.items()}
        tags = (f'<img alt="{name}" style="{style}" src="{url}">' for name, url in data.items())
        return f'<div style="display:flex;flex-wrap:wrap;align-items:flex-start">{"".join(tags)}</div>'


class Page:
    """HTML page displayed in a notebook, in a sandboxed frame without access to the notebook.

    Attributes:
        text: HTML of the page.
    """

    def __init__(self, text: str):
        self.text = text

    def _repr_html_(self) -> str:
        return (
            '<iframe sandbox="allow-scripts" style="width:100%;height:720px;border:1px solid #8884" '
            f'srcdoc="{escape(self.text)}"></iframe>'
        )


def render_progress(name: str, run: Run) -> str:
    """Return HTML with a progress bar, and below it the result of a run, else its error, else its latest metrics."""
    progress = run.get_last_progress()
    share = 100 * progress["step"] / progress["total"] if progress["total"] else 0
    colour = COLOURS.get(run.state, "#0072b2")
    if run.history.result:
        rows = [row for row in format_result(run.history.result).values() if row.brief]
        text = " · ".join(f"{escape(row.title)} <b>{escape(row.text)}</b>" for row in rows)
    elif run.error:
        text = f"<pre style='margin:0'>{escape(run.error.what)}</pre>"
    else:
        text = escape(" · ".join(_describe_progress(run, progress)))
    bar = f"height:6px;border-radius:3px;background:{colour};width:{share:.1f}%"
    return (
        "<div style='font:13px system-ui,sans-serif;max-width:560px'>"
        f"<div style='display:flex;justify-content:space-between'><b>{escape(name)}</b>"
        f"<span style='color:{colour}'>{run.state}</span></div>"
        f"<div style='background:#8883;border-radius:3px;margin:4px 0'><div style='{bar}'></div></div>"
        f"{text}</div>"
    )


def render_curves(history: History) -> bytes:
    """Return the curves of the metrics, as in the run's report, as PNG bytes; b"" before the first metric."""
    from raytrec.report.figures.learning import curves
    from raytrec.report.figures.style import save_png

    out = BytesIO()
    if figure := curves(history):
        save_png(figure, out)
    return out.getvalue()


def _describe_progress(run: Run, progress: dict[str, Any]) -> list[str]:
    """Return the texts of a progress line: step, speed, training metrics and remaining time; at first, only a note."""
    if not (keys := run.keys(Train)):
        return ["waiting for the first metrics"]
    speed = f"{progress['rows_per_s']:,.0f} rows/s" if progress["rows_per_s"] else ""
    remaining = lines.remaining(progress["eta_s"]) if progress["eta_s"] is not None else ""
    metrics = [figure for figure in run.history.recorded_metrics if figure.key in keys and figure.is_directed]
    figures = [f"{figure.label} {figure.text(progress[figure.key])}" for figure in metrics]
    parts = [f"step {progress['step']:,} of {progress['total'] or '?'}", speed, *figures, remaining]
    return [part for part in parts if part]
