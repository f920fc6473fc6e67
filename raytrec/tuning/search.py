"""Hyperparameter search, whose trials are all drawn and checked before the first one starts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from math import isnan, nan
from pathlib import Path
from typing import Any

from raytrec.cluster.session import starts_local_ray
from raytrec.common.documents import find_document
from raytrec.common.errors import ConfigError, RaytrecError
from raytrec.common.messages import METRICS, Eval, Final
from raytrec.common.storage import join_uri
from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema
from raytrec.driver.datasets import open_data
from raytrec.driver.preflight import check_fit
from raytrec.driver.prepare import check_no_redacted_values, resolve
from raytrec.metrics.selection import EVAL_PREFIX, MetricDisplay, Selection
from raytrec.tracking.run_folder import RESULT, RunFolder
from raytrec.tuning.space import Space
from raytrec.worker.loop import count_total_steps

BEST_FILE = "best.yaml"
MAX_TRIALS = 10_000
TEST_DATA_WARNING = (
    "neither data.valid nor data.holdout is set, so trials are compared on the test data; "
    "the metrics of the best trial are optimistic compared with unseen data"
)


class State(StrEnum):
    """State of a trial within its search."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"  # trained to the last step
    STOPPED = "stopped"  # stopped early because other trials were better at the same age
    INTERRUPTED = "interrupted"  # ended because the search ended
    FAILED = "failed"


ENDED_STATES = (State.FINISHED, State.STOPPED)  # states of trials that a resumed search does not run again
ORDER = {State.FINISHED: 0, State.STOPPED: 1, State.INTERRUPTED: 2, State.RUNNING: 2}  # best first


@dataclass(frozen=True)
class Settings:
    """Settings of a search: number of trials, metric to compare, and rule for early stopping.

    Attributes:
        trials: Number of trials, 1 to MAX_TRIALS.
        metric: Key of an evaluation metric; None: the metric that selects the best checkpoints.
        seed: Seed of the draws, at least 0.
        grace_steps: Number of steps, at the batch size of the search's configuration, during which no trial is stopped;
            None: train.eval_every_steps. A trial with another batch size is spared for the same number of rows.
        factor: Reduction factor f, 1.1 to 10⁶. Trials are compared after g, g × f, g × f², … rows, where g is the grace
            period in rows. A trial continues if it is in the best 1 / f of those that reached this age before it.

    Raises:
        ConfigError: A number is out of range.
    """

    trials: int
    metric: str | None
    seed: int
    grace_steps: int | None
    factor: float

    def __post_init__(self) -> None:
        grace = self.grace_steps
        for option, value, is_right, expected in (
            ("--trials", self.trials, 0 < self.trials <= MAX_TRIALS, f"a number from 1 to {MAX_TRIALS:,}"),
            ("--seed", self.seed, self.seed >= 0, "a number of at least 0"),
            ("--grace-steps", grace, grace is None or grace > 0, "a number of at least 1"),
            ("--reduction-factor", self.factor, 1.1 <= self.factor <= 1e6, "a number from 1.1 to 1,000,000"),
        ):
            if not is_right:
                raise ConfigError(f"{option} is {value}", where="options of tune", expected=expected)


@dataclass
class Trial:
    """Trial of a search: a run in its own folder.

    Attributes:
        number: Number of the trial, starting from 1.
        values: Configuration key → drawn value.
        config: Resolved configuration of the trial's run.
        total: Number of steps in the complete run.
        state: State of the trial.
        points: Step → value of the compared metric in the evaluation at this step; NaN values are excluded.
        step: Last step recorded in the run folder.
        error: Reason for a failure; empty if the trial has not failed.
        deaths: Number of times that the trial's process has died while this process ran the search.
    """

    number: int
    values: dict[str, Any]
    config: RunConfig
    total: int
    state: State = State.WAITING
    points: dict[int, float] = field(default_factory=dict)
    step: int = 0
    error: str = ""
    deaths: int = 0
    _run: RunFolder | None = None

    @property
    def folder(self) -> Path:
        """Return the trial's run folder."""
        return Path(self.config.run.dir)

    @property
    def value(self) -> float:
        """Return the value of the compared metric in the last evaluation that has one; NaN without such evaluations."""
        return self.points[max(self.points)] if self.points else nan

    def read_last_figures(self) -> dict[str, Any]:
        """Return eval.NAME → value for the final evaluation; empty unless the run has finished."""
        result = find_document(str(self.folder / RESULT), dict[str, Any]) or {}
        return {key: value for key, value in result.items() if key.startswith(EVAL_PREFIX)}

    def rows(self, step: int) -> int:
        """Return the number of rows processed up to a step, which is the trial's age at this step."""
        return step * self.config.data.global_batch_size

    def read_evaluations(self, key: str) -> None:
        """Update `step` and `points` from new lines in the run folder, or raise OSError; `key` names the metric."""
        self._run = self._run or RunFolder(self.folder, files=[METRICS])
        self._run.read_new()
        self.step = self._run.step
        values = {line.step: line.figure(key) for line in self._run.figures(Eval, Final)}
        self.points = {step: value for step, value in values.items() if not isnan(value)}

    @property
    def values_text(self) -> str:
        """Return the drawn values on one line, as KEY = VALUE separated by commas."""
        return ", ".join(f"{key} = {value}" for key, value in self.values.items())

    def record(self) -> dict[str, Any]:
        """Return the trial as JSON values, which trials.json stores."""
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
    """Search over a configuration, with its drawn trials.

    Attributes:
        config: Resolved configuration of the search; run.dir is the search folder. Trials change the keys of the space.
        schema: Schema of the data.
        space: Keys to draw and their distributions.
        settings: Settings of the search.
        figure: Metric by which trials are compared.
        trials: Trials in the order of their numbers.
    """

    config: RunConfig
    schema: Schema
    space: Space
    settings: Settings
    figure: MetricDisplay
    trials: list[Trial] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        """Return the search folder."""
        return Path(self.config.run.dir)

    @property
    def test_data_warning(self) -> str:
        """Return a warning that trials are compared on the test data; "" if there is validation data."""
        return "" if _has_validation_data(self.config) else TEST_DATA_WARNING

    @property
    def ranked(self) -> list[Trial]:
        """Return the trials: finished, stopped, interrupted or running, then others; in each group, the best first."""

        def place(trial: Trial) -> tuple:  # sorting is stable: ties are ordered by trial number
            return ORDER.get(trial.state, 3), isnan(trial.value), self.figure.loss(trial.value)

        return sorted(self.trials, key=place)

    @property
    def best(self) -> Trial | None:
        """Return the best finished trial with a value, else the best such stopped trial, else None."""
        able = (trial for trial in self.ranked if trial.state in ENDED_STATES and not isnan(trial.value))
        return next(able, None)

    def value_text(self, trial: Trial) -> str:
        """Return the label and value of the compared metric in a trial's last evaluation, as text."""
        return f"{self.figure.label} {self.figure.text(trial.value)}"

    @property
    def metrics(self) -> dict[str, Any]:
        """Return the search as JSON values: name, folder, metric (key, better), best and trials.

        `best` is the record of the best trial with its metrics (figures) and the path of its configuration (config), or
        None if no finished or stopped trial has a value.
        """
        best = self.best
        return {
            "name": self.config.run.name,
            "folder": str(self.folder),
            "metric": {"key": self.figure.key, "better": self.figure.better},
            "best": best
            and best.record() | {"figures": best.read_last_figures(), "config": str(self.folder / BEST_FILE)},
            "trials": [trial.record() for trial in self.trials],
        }


def prepare_search(config: RunConfig, space: Space, settings: Settings, allow_code: bool = False) -> Search:
    """Draw all trials, and check that each of them can run.

    Args:
        config: Resolved configuration; run.dir is the search folder.
        space: Keys to draw and their distributions.
        settings: Settings of the search.
        allow_code: True to allow code that a space from a URI or another user's search draws (config/trust.py).

    Raises:
        ConfigError, SchemaError, DataError: The configuration, the data or the space is invalid.
    """
    if not allow_code:
        space.refuse_code(config)
    if not config.train.eval_every_steps:
        raise ConfigError(
            "train.eval_every_steps is not set, so trials cannot be compared",
            where="train.eval_every_steps",
            expected="auto, next_folder, or the number of steps between two evaluations",
            do="set it in the configuration, or add train.eval_every_steps=auto to the command",
        )
    space.check_training_data(config)
    check_no_redacted_values(config)
    schema, datasets = open_data(config)
    is_local = starts_local_ray(config.scaling.address)

    def check(trial: RunConfig) -> MetricDisplay:
        check_fit(trial, schema, on_this_machine=is_local)
        metrics, key = Selection.from_config(trial, schema), settings.metric
        return metrics.best(trial.checkpoint.best_metric) if key is None else metrics.best(key, "--metric")

    search = Search(config, schema, space, settings, check(config))
    for draw, value in space.extremes:  # one key is changed at a time, so that an error names the key and its line
        with _attribute_errors(f"{draw.key} = {value}", draw.where):
            check(config.with_overrides({draw.key: value}))
    for index, values in enumerate(space.configurations(settings.trials, settings.seed), 1):
        hint = "if only this combination is invalid, draw its values together as a choice of whole sections, such as "
        hint += "optim.schedule: {choice: [{}, {decay: linear}]}"
        values_text = ", ".join(f"{key} = {value}" for key, value in values.items())
        with _attribute_errors(f"trial {index} ({values_text})", space.place, hint):
            trial = make_trial_config(config, values, index)
            check(trial)
        search.trials.append(Trial(index, values, trial, count_total_steps(trial, datasets["train"].rows)))
    return search


def _has_validation_data(config: RunConfig) -> bool:
    return bool(config.data.valid or config.data.holdout)


@contextmanager
def _attribute_errors(what: str, where: str, do: str | None = None) -> Iterator[None]:
    """Convert errors raised in the block to a ConfigError that names the drawn values."""
    try:
        yield
    except RaytrecError as error:
        raise ConfigError(f"{what}: {error.what}", where=where, expected=error.expected, do=do or error.do) from None


def make_trial_config(base: RunConfig, drawn_values: dict[str, Any], number: int) -> RunConfig:
    """Return the resolved configuration of a trial.

    If data.valid or data.holdout is set, the final evaluation of a trial uses validation data instead of data.test,
    which then takes no part in the search. Trials write no report; `raytrec report FOLDER` creates it. A checkpoint.dir
    that is set gets a subfolder per trial. In MLflow, the run that is named like the search is the parent of all
    trials. `base` is the resolved configuration of the search, and `drawn_values` maps configuration keys to values.
    """
    config = base.with_overrides(drawn_values)
    folder = Path(base.run.dir) / f"trial-{number:03}"
    config.run.name, config.run.dir = f"{base.run.name}-{number:03}", str(folder)
    config.tracking.parent_run, config.tracking.report = base.run.name, False
    if _has_validation_data(config):
        config.data.test = None
    if config.checkpoint.dir:
        config.checkpoint.dir = join_uri(config.checkpoint.dir, folder.name)
    return resolve(config, base.run.name)
