"""A search and its trials, drawn and checked before they start."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from math import isnan, nan
from pathlib import Path
from typing import Any

from raytrec.cluster.session import stays_here
from raytrec.common.documents import find_document
from raytrec.common.errors import ConfigError, RaytrecError
from raytrec.common.messages import METRICS, Eval, Final
from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema
from raytrec.driver.datasets import open_data
from raytrec.driver.preflight import check_fit
from raytrec.driver.prepare import check_nothing_hidden, resolve
from raytrec.metrics.selection import EVAL, Figure, Selection
from raytrec.tracking.run_folder import RESULT, RunFolder
from raytrec.tuning.space import Space
from raytrec.worker.loop import total_steps

BEST = "best.yaml"
MOST_TRIALS = 10_000
ON_TEST = (
    "data.valid is not set, so trials are compared on the test data: figures of the best one are better than "
    "they would be on data that took no part in the search"
)


class State(StrEnum):
    """How far a trial is."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"  # trained to its end
    STOPPED = "stopped"  # because others of its age are better
    INTERRUPTED = "interrupted"  # with the search
    FAILED = "failed"


OVER = (State.FINISHED, State.STOPPED)  # a resumed search leaves these as they are
ORDER = {State.FINISHED: 0, State.STOPPED: 1, State.INTERRUPTED: 2, State.RUNNING: 2}  # the best first


@dataclass(frozen=True)
class Settings:
    """How many trials are drawn, how they are compared, and when the worse ones are stopped.

    Attributes:
        metric: key of a metric in evaluations; None: the one that the best checkpoints are kept by.
        grace_steps: no trial is stopped before; None: train.eval_every_steps.
        factor: of the trials of an age, one in this many is trained on.

    Raises:
        ConfigError: a number is out of range.
    """

    trials: int = 10
    metric: str | None = None
    seed: int = 0
    grace_steps: int | None = None
    factor: float = 4.0

    def __post_init__(self) -> None:
        grace = self.grace_steps
        for option, value, is_right, expected in (
            ("--trials", self.trials, 0 < self.trials <= MOST_TRIALS, f"1 to {MOST_TRIALS:,}"),
            ("--seed", self.seed, self.seed >= 0, "0 or more"),
            ("--grace-steps", grace, grace is None or grace > 0, "1 or more"),
            ("--reduction-factor", self.factor, 1.1 <= self.factor <= 1e6, "at least 1.1"),
        ):
            if not is_right:
                raise ConfigError(f"{option} must be {expected} (got {value})", where="command line")


@dataclass
class Trial:
    """A trial, which is a run in its own folder.

    Attributes:
        number: from 1.
        values: key → value that was drawn.
        config: of its run, resolved.
        total: steps of the whole run.
        points: step → the searched metric in the evaluation there; NaN is left out.
        step: the last one that its run folder has.
        error: why it failed.
    """

    number: int
    values: dict[str, Any]
    config: RunConfig
    total: int
    state: State = State.WAITING
    points: dict[int, float] = field(default_factory=dict)
    step: int = 0
    error: str = ""
    _run: RunFolder | None = None

    @property
    def folder(self) -> Path:
        return Path(self.config.run.dir)

    @property
    def value(self) -> float:
        """The metric in the last evaluation; NaN before the first."""
        return self.points[max(self.points)] if self.points else nan

    def last_figures(self) -> dict[str, Any]:
        """eval.NAME → figure of its last evaluation, if it is finished."""
        result = find_document(str(self.folder / RESULT), dict[str, Any]) or {}
        return {key: value for key, value in result.items() if key.startswith(EVAL)}

    def rows(self, step: int) -> int:
        """Rows trained by the end of a step: the age by which trials are compared."""
        return step * self.config.data.global_batch_size

    def read_evaluations(self, key: str) -> None:
        """Reads what its run folder has gained.

        Args:
            key: of the searched metric.
        """
        self._run = self._run or RunFolder(self.folder, files=[METRICS])
        self._run.read_new()
        self.step = self._run.step
        values = {line.step: line.figure(key) for line in self._run.figures(Eval, Final)}
        self.points = {step: value for step, value in values.items() if not isnan(value)}

    @property
    def values_text(self) -> str:
        """The drawn values on one line."""
        return ", ".join(f"{key} = {value}" for key, value in self.values.items())

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


@dataclass
class Search:
    """A search whose trials are drawn.

    Attributes:
        config: resolved; each trial differs from it in the keys of the space. run.dir is the search's folder.
        figure: the metric that trials are compared by.
    """

    config: RunConfig
    schema: Schema
    space: Space
    settings: Settings
    figure: Figure
    trials: list[Trial] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        return Path(self.config.run.dir)

    @property
    def caution(self) -> str:
        """A warning about the figures of the best trial; may be empty."""
        return "" if self.config.data.valid else ON_TEST

    @property
    def ranked(self) -> list[Trial]:
        """The best trial first: finished ones, those that were stopped, then the others."""

        def place(trial: Trial) -> tuple:  # sorting is stable: trials of equal figures, or none, by number
            return ORDER.get(trial.state, 3), isnan(trial.value), self.figure.loss(trial.value)

        return sorted(self.trials, key=place)

    @property
    def best(self) -> Trial | None:
        """The best of the finished trials; if there are none, of those that were stopped."""
        able = (trial for trial in self.ranked if trial.state in OVER and not isnan(trial.value))
        return next(able, None)

    def value_text(self, trial: Trial) -> str:
        """The metric in a trial's last evaluation, with its name."""
        return f"{self.figure.label} {self.figure.text(trial.value)}"

    @property
    def metrics(self) -> dict[str, Any]:
        """As JSON: name, folder, metric (key, better), best (of a trial; with figures and config), trials."""
        best = self.best
        return {
            "name": self.config.run.name,
            "folder": str(self.folder),
            "metric": {"key": self.figure.key, "better": self.figure.better},
            "best": best
            and best.record() | {"figures": best.last_figures(), "config": str(self.folder / BEST)},
            "trials": [trial.record() for trial in self.trials],
        }


def prepare_search(config: RunConfig, space: Space, settings: Settings, allow_code: bool = False) -> Search:
    """Draws the trials, and checks, before the first one starts, that each of them can run.

    Args:
        config: resolved; run.dir is the search's folder.
        allow_code: True if a space from elsewhere may draw code (config/trust.py).

    Raises:
        ConfigError, SchemaError, DataError: what is wrong, in the configuration, the data or the space.
    """
    if not allow_code:
        space.refuse_code(config)
    if not config.train.eval_every_steps:
        raise ConfigError(
            "train.eval_every_steps is not set, so there is nothing to compare trials by",
            where="train.eval_every_steps",
            expected="the number of steps between two evaluations on data.valid",
            do="set it in the configuration, or add train.eval_every_steps=STEPS to the command",
        )
    check_nothing_hidden(config)
    schema, datasets = open_data(config)
    here = stays_here(config.scaling.address)

    def check(each: RunConfig) -> Figure:
        check_fit(each, schema, here=here)
        able, key = Selection.of_config(each, schema), settings.metric
        return able.best(each.checkpoint.best_metric) if key is None else able.best(key, "--metric")

    search = Search(config, schema, space, settings, check(config))
    for draw, value in space.extremes:  # one at a time, so that an error names the key and its line
        with _as_mistake_of(f"{draw.key} = {value}", draw.where):
            check(config.with_({draw.key: value}))
    for index, values in enumerate(space.configurations(settings.trials, settings.seed), 1):
        hint = "draw values that depend on each other as one: a choice of whole sections, such as "
        hint += "optim.schedule: {choice: [{}, {decay: linear}]}"
        shown = ", ".join(f"{key} = {value}" for key, value in values.items())
        with _as_mistake_of(f"trial {index} ({shown})", space.place, hint):
            each = trial_config(config, values, index)
            check(each)
        search.trials.append(Trial(index, values, each, total_steps(each, datasets["train"].rows)))
    return search


@contextmanager
def _as_mistake_of(what: str, where: str, do: str | None = None) -> Iterator[None]:
    """Names the values of the space that an error comes from."""
    try:
        yield
    except RaytrecError as error:
        raise ConfigError(
            f"{what}: {error.what}", where=where, expected=error.expected, do=do or error.do
        ) from None


def trial_config(base: RunConfig, drawn: dict[str, Any], number: int) -> RunConfig:
    """The resolved configuration of one trial.

    It is evaluated on data.valid at the end, too, so that data.test takes no part in the search. It has no
    report until it is asked for: `raytrec report FOLDER`.

    Args:
        base: resolved, of the whole search; its run is the MLflow parent of all trials.
    """
    config = base.with_(drawn)
    folder = Path(base.run.dir) / f"trial-{number:03}"
    config.run.name, config.run.dir = f"{base.run.name}-{number:03}", str(folder)
    config.tracking.parent_run, config.tracking.report = base.run.name, False
    if config.data.valid:
        config.data.test = None
    if config.checkpoint.dir:
        config.checkpoint.dir = f"{config.checkpoint.dir.rstrip('/')}/{folder.name}"
    return resolve(config, base.run.name)
