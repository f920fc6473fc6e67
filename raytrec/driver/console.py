"""What a command shows: a live line, then a table."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from time import monotonic
from typing import Any

from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from raytrec.cluster.session import in_job
from raytrec.common.messages import ENDED_EARLY, PROFILED
from raytrec.common.terminal import bold, open_console, plain
from raytrec.metrics.results import format_result, slice_tables
from raytrec.metrics.selection import figures_of
from raytrec.tracking import progress_log as lines

Pairs = list[tuple[str, str]]  # names and texts: the rows of a table
PLAIN_EVERY_S = 10.0  # seconds between progress lines where stderr is not a terminal


class RunConsole:
    """Shows the messages that rank 0 sends (common/messages.py), each with the method of its kind.

    On a terminal they become one live line; elsewhere a plain line now and then, and in the log of a job a
    line of JSON as well (tracking/progress_log.py).
    """

    def __init__(self, name: str):
        self._console = open_console(stderr=True)
        self._name = plain(name)
        self._last_plain, self._total = 0.0, 0
        self._figures = figures_of()  # replaced when training starts
        self._begin: tuple[float, int] | None = None  # when and at which step the time left began to be known
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", style="bold", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[figures]}", markup=False),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
            transient=True,
        )
        self._task = self._progress.add_task(self._name, total=None, figures="")

    def __enter__(self) -> RunConsole:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def phase(self, text: str, always: bool = True) -> None:
        """What the run is doing while no step is counted.

        Args:
            always: where there is no terminal, print a line even if the last one was just now.
        """
        self._progress.update(self._task, figures=plain(text))
        self._plain(text, always)

    def start(
        self,
        total: int,
        step: int = 0,
        workers: int = 0,
        metrics: list[dict[str, Any]] | None = None,
        **_: Any,
    ) -> None:
        """Training begins at a step; `metrics` are descriptions of its figures (selection.Figure)."""
        self._progress.reset(self._task, total=total, completed=step, figures=f"step {step}/{total}")
        self._total, self._begin, self._figures = total, None, figures_of({"metrics": metrics})
        self._message("start", {"total": total, "step": step, "workers": workers, "metrics": metrics or []})
        if step:
            self.note(f"resuming at step {step} with {workers} workers")

    def event(self, event: str, cause: str = "", reason: str = "", again: bool = False, **_: Any) -> None:
        """Show an event of the run: a failure, or a restart that was requested."""
        if event == "failed":
            self.warn(f"{cause}; {'restarting' if again else 'giving up'}")
        elif event == "waiting":
            self.warn(cause)
        elif event == "asked":
            self.note(f"{reason}: saving")
        elif event == ENDED_EARLY:
            self.note(f"training ends early: {reason}")
        elif event == PROFILED:
            self.note(f"{event} {reason}")

    def check(self, check: str, step: int, passed: bool, text: str, **_: Any) -> None:
        """A consistency check; only failures are worth a line."""
        if not passed:
            self.warn(f"check {check} failed at step {step}: {text}")

    def saved(self, step: int, error: str | None, **_: Any) -> None:
        """A checkpoint has been written, or not (which has its own warning)."""
        if not error:
            self._plain(f"step {step}: saved", always=False)

    def stopped(self, step: int) -> None:
        self.note(f"stopped at step {step}, saved")

    def note(self, text: str) -> None:
        """A line that stays."""
        self._console.print(f"{self._name}  {plain(text)}", soft_wrap=True)

    def folder(self, folder: str) -> None:
        """Print the folder of the run if this process is the driver of a job, for clients that follow it."""
        if in_job():
            self.note(f"run folder {folder}")
            self._message(lines.FOLDER, {lines.FOLDER: folder})

    def train(self, step: int, rows_per_s: float | None, **values: Any) -> None:
        figures = lines.named((each for each in self._figures if each.sums and each.directed), values)
        text = lines.progress(step, self._total, rows_per_s, figures)
        self._progress.update(self._task, completed=step, figures=text)
        left = self._left(step)
        full = text if left is None else f"{text}  {lines.remaining(left)}"
        if self._plain(full, always=step == self._total):
            self._message("train", {"step": step, "rows_per_s": rows_per_s, **values})

    def eval(self, step: int, curves: Any = None, slices: Any = None, **values: Any) -> None:
        text = lines.evaluation(step, lines.named(self._figures, values))
        if self._console.is_terminal:
            self._progress.print(f"{self._name}  {plain(text)}")
        self._plain(text, always=True)
        self._message("eval", {"step": step, **values})

    def _left(self, step: int) -> float | None:
        """Seconds until the last step, at the speed since the first figures; None while there is none."""
        now = monotonic()
        began, first = self._begin = self._begin or (now, step)
        return (now - began) / (step - first) * (self._total - step) if step > first else None

    def warn(self, text: str) -> None:
        self._console.print(Text("warning:", style="yellow"), plain(text), soft_wrap=True)

    def _plain(self, text: str, always: bool) -> bool:
        """A line where there is no terminal, unless the last one was just now; whether it was written."""
        now = monotonic()
        if self._console.is_terminal or not (always or now - self._last_plain >= PLAIN_EVERY_S):
            return False
        self._last_plain = now
        self._console.print(f"{self._name}  {plain(text)}", soft_wrap=True)
        return True

    def _message(self, kind: str, values: dict[str, Any]) -> None:
        """Write a line for programs that follow a job."""
        lines.write_message(kind, values, self._console.file)


@dataclass(frozen=True)
class Result:
    """Figures of a command, and where to look next; a table in notebooks.

    Attributes:
        metrics: Figures by name; `name` is the table's title. Of a run, the content of result.json: eval.NAME
            of each metric (eval.TASK.NAME of several tasks), metrics (their labels, and which values are
            better), eval.rows, train.rows, bound.by and more on what the time went into (report.findings),
            train.steps, train.samples_per_s, train.checks_passed, train.checks_failed, world_size,
            seconds, name, mlflow_run_id (None without MLflow), and code, the module:name of the user's that
            the run was made of, if any.
        path: Run folder, checkpoint of an evaluation, or folder that the command has written.
        next_steps: Lines that name files and commands.
        pairs: Rows of the table; default: the figures of a run.
    """

    metrics: dict[str, Any]
    path: Path | str
    next_steps: list[str] = field(default_factory=list)
    pairs: Pairs = field(default_factory=list)

    def _repr_html_(self) -> str:
        cells = (f"<tr><td>{escape(name)}</td><td>{escape(text)}</td></tr>" for name, text in self.rows)
        title, below = escape(self.metrics["name"]), escape("\n".join(self.next_steps))
        return f"<b>{title}</b><table>{''.join(cells)}</table><pre>{below}</pre>"

    @property
    def rows(self) -> Pairs:
        """Names and texts of the table's rows."""
        return self.pairs or [(row.title, row.text) for row in format_result(self.metrics).values()]


def print_summary(summary: Result) -> None:
    """Print the table on stdout, with tables of slices, what the time went into, and the next steps."""
    console, table = open_console(), Table(show_header=False)
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, text in summary.rows:
        table.add_row(plain(name), plain(text))
    console.print(bold(summary.metrics["name"]), soft_wrap=True)
    console.print(table)
    for title, slices in slice_tables(summary.metrics):
        of_slices = Table(*map(plain, slices.columns), title=plain(title), title_justify="left")
        for cells in slices.rows:
            of_slices.add_row(*(plain(cell.text) for cell in cells))
        console.print(of_slices)
    sentence = summary.metrics.get("bound.sentence")
    for line in [*([sentence] if sentence else []), *summary.next_steps]:
        console.print(plain(line), soft_wrap=True)
    lines.write_message(lines.RESULT, summary.metrics)
