"""What a person sees of a search: a live line while it runs, a line for what happens, then a table."""

from __future__ import annotations

from collections import Counter
from math import isnan
from time import monotonic
from typing import Any

from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from raytrec.common.formatting import count
from raytrec.common.terminal import bold, open_console, plain
from raytrec.metrics.selection import Figure
from raytrec.tuning.trials import FAILED, OVER, RUNNING, WAITING, Trial, best_of, ranked

PLAIN_EVERY_S = 10.0  # seconds between lines about all trials where stderr is not a terminal
SHOW_EVERY_S = 0.3


class TuneConsole:
    """Shows how a search gets on.

    Args:
        name: of the search.
    """

    def __init__(self, name: str):
        self._console, self._name = open_console(stderr=True), plain(name)
        self._trials: list[Trial] = []
        self._figure: Figure | None = None
        self._shown_at = self._plain_at = 0.0
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", style="bold", markup=False),
            TextColumn("{task.fields[text]}", markup=False),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
            transient=True,
        )
        self._task = self._progress.add_task(self._name, total=None, text="")

    def __enter__(self) -> TuneConsole:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def follow(self, trials: list[Trial], figure: Figure) -> None:
        """The trials that are shown from now on, and the metric that they are compared by."""
        self._trials, self._figure = trials, figure

    def phase(self, text: str) -> None:
        """What the search is doing while no trial runs."""
        self._progress.update(self._task, text=plain(text))
        if not self._console.is_terminal:
            self.note(text)

    def begin(self, at_once: int) -> None:
        """Ray is there, and so many trials run at a time."""
        left = sum(trial.state not in OVER for trial in self._trials)
        self.note(f"{count(left, 'trial')} to run, {at_once} at a time, compared by {self._figure.label}")

    def began(self, trial: Trial) -> None:
        again = f", resumed after step {trial.step}" if trial.step else ""
        self.note(f"trial {trial.number} begins{again}: {values_text(trial)}")

    def evaluated(self, trial: Trial) -> None:
        self.note(f"trial {trial.number}  step {max(trial.points)}/{trial.total}  {self._value(trial)}")

    def ended(self, trial: Trial) -> None:
        if trial.state == FAILED:
            return self.warn(f"trial {trial.number} failed: {trial.error.splitlines()[0]}")
        value = "" if isnan(trial.value) else f": {self._value(trial)}"
        self.note(f"trial {trial.number} {trial.state} at step {trial.step}/{trial.total}{value}")

    def failed(self, cause: str, again: bool) -> None:
        """Ray was lost, and all processes with it."""
        self.warn(f"{cause}; {'restarting' if again else 'giving up'}")

    def show(self) -> None:
        """Brings the live line up to date; elsewhere a line now and then."""
        now = monotonic()
        if now - self._shown_at < SHOW_EVERY_S:
            return
        self._shown_at = now
        text = self._state()
        self._progress.update(self._task, text=text)
        if not self._console.is_terminal and now - self._plain_at > PLAIN_EVERY_S:
            self._plain_at = now
            self.note(text)

    def note(self, text: str) -> None:
        """A line that stays."""
        self._console.print(f"{self._name}  {plain(text)}", soft_wrap=True)

    def warn(self, text: str) -> None:
        self._console.print(f"warning: {plain(text)}", soft_wrap=True)

    def _state(self) -> str:
        counts = Counter(trial.state for trial in self._trials)
        parts = [f"{number} {state}" for state, number in counts.items() if state != WAITING]
        ended = sum(trial.state in OVER or trial.state == FAILED for trial in self._trials)
        steps = [
            f"{trial.number}: {trial.step}/{trial.total}" for trial in self._trials if trial.state == RUNNING
        ]
        if best := best_of(self._trials, self._figure):
            parts.append(f"best {best.number}: {self._value(best)}")
        if steps:
            parts.append(f"steps {', '.join(steps[:4])}{' …' if len(steps) > 4 else ''}")
        return f"{ended}/{len(self._trials)} trials  " + ", ".join(parts)

    def _value(self, trial: Trial) -> str:
        return f"{self._figure.label} {self._figure.text(trial.value)}"


def values_text(trial: Trial) -> str:
    """What was drawn, on one line."""
    return ", ".join(f"{key} = {value}" for key, value in trial.values.items())


def print_outcome(outcome: Any) -> None:
    """The trials as a table on stdout, the best first, and where to look next.

    Args:
        outcome: tune.Outcome.
    """
    console = open_console()
    console.print(bold(outcome.name), soft_wrap=True)
    table = _table(outcome, list(outcome.trials[0].values))
    if console.measure(table, options=console.options.update_width(10_000)).maximum > console.width:
        table = _table(outcome, [])
    console.print(table)
    if outcome.caution:
        console.print(f"warning: {outcome.caution}", soft_wrap=True)
    for trial in outcome.trials:
        if trial.error:
            console.print(plain(f"trial {trial.number} failed: {trial.error}"), soft_wrap=True)
    for line in outcome.next_steps:
        console.print(plain(line), soft_wrap=True)


def _table(outcome: Any, keys: list[str]) -> Table:
    """The trials, with a column for each key; without keys, one for all that was drawn, whose lines break."""
    table, figure = Table(), outcome.figure
    for column in ("trial", figure.label, "step", *keys, "state"):
        table.add_column(plain(column), justify="left" if column == "state" else "right", no_wrap=True)
    if not keys:
        table.add_column("values", overflow="fold")
    for trial in ranked(outcome.trials, figure):
        cells = [str(trial.number), figure.text(trial.value), f"{trial.step:,}"]
        drawn = [trial.values[key] for key in keys]
        table.add_row(*map(plain, [*cells, *drawn, trial.state, *([] if keys else [values_text(trial)])]))
    return table
