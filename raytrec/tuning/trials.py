"""The trials of a search: the configuration of each, and what is known of it. Each is a run of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from math import isnan
from pathlib import Path
from typing import Any

from raytrec.common.errors import ConfigError
from raytrec.common.formatting import is_step, number
from raytrec.common.messages import METRICS
from raytrec.common.reading import json_lines, open_regular
from raytrec.config.run_config import RunConfig, load_config
from raytrec.metrics.selection import Figure
from raytrec.tuning.space import Space, put

State = str  # one of these
WAITING, RUNNING, FINISHED, STOPPED, INTERRUPTED, FAILED = (
    "waiting",  # not begun
    "running",
    "finished",  # trained to its end
    "stopped",  # by the scheduler, because others of its age are better; it could be resumed
    "interrupted",  # with the search
    "failed",
)
OVER = (FINISHED, STOPPED)  # what a search that is resumed leaves as it is
OWN = ("name", "dir")  # of a run, not of what it trains


@dataclass
class Trial:
    """What is known of a trial.

    Attributes:
        number: from 1.
        values: key → value that was drawn.
        folder: of its run.
        batch_rows: of a step.
        points: step → the searched metric in the evaluation there.
        step: the last one that was reported.
        total: steps of the whole run; 0: not known yet.
        error: why it failed.
    """

    number: int
    values: dict[str, Any]
    folder: Path
    batch_rows: int
    state: State = WAITING
    points: dict[int, float] = field(default_factory=dict)
    step: int = 0
    total: int = 0
    error: str = ""

    @property
    def value(self) -> float:
        """The metric in the last evaluation; NaN where there is none."""
        return self.points[max(self.points)] if self.points else float("nan")

    def record(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "trial": self.number,
            "state": self.state,
            "values": self.values,
            "step": self.step,
            "value": None if isnan(self.value) else self.value,
            "folder": str(self.folder),
            "error": self.error or None,
        }


def ranked(trials: list[Trial], figure: Figure) -> list[Trial]:
    """The best first: finished ones, those that were stopped, then the others; without a figure last."""
    order = {FINISHED: 0, STOPPED: 1, INTERRUPTED: 2, RUNNING: 2}

    def place(trial: Trial) -> tuple:
        missing = isnan(trial.value)
        loss = 0.0 if missing else figure.loss(trial.value)
        return order.get(trial.state, 3), missing, loss, trial.number

    return sorted(trials, key=place)


def best_of(trials: list[Trial], figure: Figure) -> Trial | None:
    """The best of those that have finished; where none has, of those that were stopped."""
    able = [trial for trial in trials if trial.state in OVER and not isnan(trial.value)]
    return ranked(able, figure)[0] if able else None


def plain_values(config: RunConfig) -> dict[str, Any]:
    """What a configuration says, without defaults, so that another kind of model can take its place."""
    return config.model_dump(by_alias=True, mode="json", exclude_unset=True)


def with_values(base: Mapping[str, Any], drawn: Mapping[str, Any]) -> dict[str, Any]:
    """Plain values of a configuration with those of a trial in their places.

    Args:
        base: of `plain_values`.
    """
    values = deepcopy(dict(base))
    for key, value in drawn.items():
        put(values, key, value)
    return values


def check_space(space: Space, base: RunConfig, accept: Callable[[RunConfig], None]) -> None:
    """Whether the configuration takes each key with its ends and choices, each by itself.

    Args:
        accept: raises a RaytrecError for a configuration that cannot be run.

    Raises:
        ConfigError: it does not, with the key and its line.
    """
    plain = plain_values(base)
    for draw, value in space.extremes():
        try:
            accept(load_config(with_values(plain, {draw.key: value})))
        except ConfigError as error:
            raise ConfigError(
                f"{draw.key} = {value}: {error.what}",
                where=space.where(draw),
                expected=error.expected or "values that the configuration takes, each by itself",
                do=error.do,
            ) from None


def trial_config(base: RunConfig, drawn: Mapping[str, Any], name: str, folder: Path) -> RunConfig:
    """The configuration of one trial.

    It is evaluated on data.valid at the end, too, so that data.test takes no part in the search. Its report
    is drawn when somebody asks for it: `raytrec report FOLDER`.

    Args:
        base: resolved, of the whole search; its run is the MLflow parent of all trials.
        name, folder: of the trial's run.
    """
    values = with_values(plain_values(base), drawn)
    config = load_config(values)
    config.run.name, config.run.dir = name, str(folder)
    config.tracking.parent_run, config.tracking.report = base.run.name, False
    if config.data.valid:
        config.data.test = None
    if config.checkpoint.dir:
        config.checkpoint.dir = f"{config.checkpoint.dir.rstrip('/')}/{folder.name}"
    return config


def best_config(base: RunConfig, drawn: Mapping[str, Any]) -> dict[str, Any]:
    """What `raytrec train` takes to train a trial's configuration again, as a run of its own."""
    values = with_values(plain_values(base), drawn)
    values["run"] = {key: value for key, value in values.get("run", {}).items() if key not in OWN}
    return {section: inner for section, inner in values.items() if inner != {}}


class Evaluations:
    """Reads the figures of a run as its folder grows.

    Args:
        folder: of the run.
        key: of the metric that is searched.

    Attributes:
        points: step → the metric; evaluations of steps that are trained again are gone.
        step: the last one that was reported.
    """

    def __init__(self, folder: Path, key: str):
        self._path, self._key, self._read = folder / METRICS, key, 0
        self.points: dict[int, float] = {}
        self.step = 0

    def look(self) -> None:
        """Reads what has been added since."""
        try:
            with open_regular(self._path) as file:
                file.seek(self._read)
                data = file.readall()
        except FileNotFoundError:
            return
        whole = data[: data.rfind(b"\n") + 1]  # a line may still be being written
        self._read += len(whole)
        for line in json_lines(whole.splitlines()):
            if is_step(line.get("step")):
                self._add(line)

    def _add(self, line: dict[str, Any]) -> None:
        step, kind = line["step"], line.get("kind")
        if kind in ("eval", "final") and not isnan(value := number(line.get(self._key))):
            self.points = {s: v for s, v in self.points.items() if s < step} | {step: value}
        if kind in ("train", "eval", "final"):
            self.step = step
