"""Console output of a command: a live progress line, then a table of results."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from time import monotonic
from typing import Any

from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from raytrec.cluster.session import is_job_driver
from raytrec.common.formatting import format_count
from raytrec.common.messages import ENDED_EARLY, PROFILED, Command
from raytrec.common.terminal import open_console, to_bold_text, to_plain_text
from raytrec.metrics.results import build_slice_tables, format_result
from raytrec.metrics.selection import read_metric_displays
from raytrec.tracking import progress_log as lines

Pairs = list[tuple[str, str]]  # rows of a table: (name, text)
PLAIN_LINE_INTERVAL_S = 10.0  # interval of progress lines if stderr is not a terminal


class RunConsole:
    """Console on stderr that shows messages of workers and coordinator (common/messages.py).

    Each kind of message that is shown has a method of the same name. On a terminal, progress updates one live
    line. Elsewhere, the console prints plain lines at intervals and, in the log of a job, also JSON lines
    (tracking/progress_log.py).

    Args:
        name: Name of the run, with which lines begin.
    """

    def __init__(self, name: str):
        self._console = open_console(stderr=True)
        self._name = to_plain_text(name)
        self._last_plain, self._total = 0.0, 0
        self._unsaved_step: int | None = None  # step of the last save, if it failed
        self._figures = read_metric_displays()  # replaced when training starts
        self._begin: tuple[float, int] | None = None  # time and step of the first metrics
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
        """Show the current activity while no steps are trained.

        Args:
            text: Description of the activity.
            always: True to print the text even if the previous line is less than 10 s old. Ignored on a terminal.
        """
        self._progress.update(self._task, figures=to_plain_text(text))
        self._plain(text, always)

    def start(
        self, total: int, step: int = 0, workers: int = 0, metrics: list[dict[str, Any]] | None = None, **_: Any
    ) -> None:
        """Show that training or prediction begins; in a job's log, also write the arguments as a JSON line.

        Args:
            total: Number of steps in the whole run.
            step: Number of steps that are already complete; more than 0 if the run resumes.
            workers: Number of workers.
            metrics: Descriptions of the metrics to show (metrics.selection.describe_metrics); None: built-in metrics.
        """
        self._progress.reset(self._task, total=total, completed=step, figures=f"step {step}/{total}")
        self._total, self._begin, self._figures = total, None, read_metric_displays({"metrics": metrics})
        self._write_message("start", {"total": total, "step": step, "workers": workers, "metrics": metrics or []})
        if step:
            self.note(f"resuming at step {step} with {format_count(workers, 'worker')}")

    def event(
        self, event: str, cause: str = "", reason: str = "", again: bool = False, command: str = "", **_: Any
    ) -> None:
        """Show an event that concerns the user, such as a failure followed by a restart; ignore all other events.

        Args:
            event: Name of the event (messages.Event).
            cause: Cause of the event, for "failed" and "waiting".
            reason: Reason, for "asked" and "ended early"; steps and folder of the profile, for "profiled".
            again: True if the workers restart, for "failed".
            command: Name of the command (messages.Command), for "asked".
        """
        if event == "failed" and again:  # otherwise, the command prints the error that ends the run
            self.warn(f"{cause}; restarting")
        elif event == "waiting":
            self.warn(cause)
        elif event == "asked":
            is_restart = command == Command.RESTART.name  # not every command saves a checkpoint
            self.note(f"{reason}: {'asking the workers to restart' if is_restart else 'saving a checkpoint'}")
        elif event == ENDED_EARLY:
            self.note(f"training ends early: {reason}")
        elif event == PROFILED:
            self.note(f"{event} {reason}")

    def check(self, check: str, step: int, passed: bool, text: str, **_: Any) -> None:
        """Show a failed live check (messages.Outcome); passed checks are not shown."""
        if not passed:
            self.warn(f"check {check} failed at step {step}: {text}")

    def saved(self, step: int, error: str | None, **_: Any) -> None:
        """Print that a checkpoint has been written, unless `error` is set or stderr is a terminal.

        The line is skipped if the previous plain line is less than 10 s old.
        """
        self._unsaved_step = step if error else None
        if not error:
            self._plain(f"step {step}: checkpoint saved", always=False)

    def stopped(self, step: int) -> None:
        """Show that the run has stopped at a step, and whether a checkpoint of this step was saved."""
        self.note(f"stopped at step {step}, checkpoint {'not ' if step == self._unsaved_step else ''}saved")

    def note(self, text: str) -> None:
        """Print a line, which stays on the terminal above the live line."""
        self._console.print(f"{self._name}  {to_plain_text(text)}", soft_wrap=True)

    def folder(self, folder: str) -> None:
        """Print the run folder for clients that follow a job; do nothing if this process is not the driver of a job."""
        if is_job_driver():
            self.note(f"run folder {folder}")
            self._write_message(lines.FOLDER, {lines.FOLDER: folder})

    def train(self, step: int, rows_per_s: float | None, **values: Any) -> None:
        """Show the progress of training or prediction, its speed, and the values of its metrics at a step.

        If stderr is not a terminal, at most one line is printed every 10 s, except at the last step.

        Args:
            step: Number of completed steps.
            rows_per_s: Rows per second over all ranks; None: not shown.
            **values: Metrics by name; only losses and metrics of training are shown.
        """
        figures = lines.named((each for each in self._figures if each.sums and each.is_directed), values)
        text = lines.progress(step, self._total, rows_per_s, figures)
        self._progress.update(self._task, completed=step, figures=text)
        remaining_s = self._estimate_remaining_s(step)
        line = text if remaining_s is None else f"{text}  {lines.remaining(remaining_s)}"
        if self._plain(line, always=step == self._total):
            self._write_message("train", {"step": step, "rows_per_s": rows_per_s, **values})

    def eval(self, step: int, curves: Any = None, slices: Any = None, **values: Any) -> None:
        """Show the values of an evaluation's metrics (`values`) at a step; curves and slices are not shown."""
        text = lines.evaluation(step, lines.named(self._figures, values))
        if self._console.is_terminal:
            self._progress.print(f"{self._name}  {to_plain_text(text)}")
        self._plain(text, always=True)
        self._write_message("eval", {"step": step, **values})

    def _estimate_remaining_s(self, step: int) -> float | None:
        """Estimate the seconds until the last step from the speed since the first metrics; None at first."""
        now = monotonic()
        began, first = self._begin = self._begin or (now, step)
        return (now - began) / (step - first) * (self._total - step) if step > first else None

    def warn(self, text: str) -> None:
        """Print a warning."""
        self._console.print(Text("warning:", style="yellow"), to_plain_text(text), soft_wrap=True)

    def _plain(self, text: str, always: bool) -> bool:
        """Print a line if stderr is not a terminal, and return True if the line was printed.

        Unless `always` is True, the line is skipped if the previous plain line is less than 10 s old.
        """
        now = monotonic()
        if self._console.is_terminal or not (always or now - self._last_plain >= PLAIN_LINE_INTERVAL_S):
            return False
        self._last_plain = now
        self._console.print(f"{self._name}  {to_plain_text(text)}", soft_wrap=True)
        return True

    def _write_message(self, kind: str, values: dict[str, Any]) -> None:
        """Write a JSON line for programs that follow a job; outside of a job, do nothing."""
        lines.write_message(kind, values, self._console.file)


@dataclass(frozen=True)
class Result:
    """Result of a command: metrics, which notebooks display as a table, and next steps.

    Attributes:
        metrics: Metrics by name; `name` is the title of the table. For a run, the content of result.json, including
            eval.NAME for each metric (eval.TASK.NAME with several tasks), metrics (label and better direction of
            each metric), eval.rows, train.rows, bound.by and further metrics on the use of time
            (report.findings), train.steps, train.samples_per_s, train.checks_passed, train.checks_failed,
            skipped_files, world_size, seconds, name and mlflow_run_id (None without MLflow). If the run uses
            code of the user, code lists it as module:name. metrics/results.py lists further keys.
        path: Run folder, evaluated checkpoint, or folder that the command has written.
        next_steps: Lines, shown below the table, that name files and commands.
        pairs: (name, text) of each row of the table; default: the rows for the metrics of a run.
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
        """Return (name, text) of each row of the table."""
        return self.pairs or [(row.title, row.text) for row in format_result(self.metrics).values()]


def print_summary(summary: Result) -> None:
    """Print the metrics, slices, use of time and next steps to stdout; in a job's log, also the metrics as JSON."""
    console, table = open_console(), Table(show_header=False)
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, text in summary.rows:
        table.add_row(to_plain_text(name), to_plain_text(text))
    console.print(to_bold_text(summary.metrics["name"]), soft_wrap=True)
    console.print(table)
    for title, slices in build_slice_tables(summary.metrics):
        of_slices = Table(*map(to_plain_text, slices.columns), title=to_plain_text(title), title_justify="left")
        for cells in slices.rows:
            of_slices.add_row(*(to_plain_text(cell.text) for cell in cells))
        console.print(of_slices)
    sentence = summary.metrics.get("bound.sentence")
    for line in [*([sentence] if sentence else []), *summary.next_steps]:
        console.print(to_plain_text(line), soft_wrap=True)
    lines.write_message(lines.RESULT, summary.metrics)
