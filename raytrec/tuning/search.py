"""A search before it starts: its trials are drawn, and each of them is looked at."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raytrec.cluster.session import stays_here
from raytrec.common.errors import ConfigError, RaytrecError
from raytrec.config.run_config import RunConfig, load_config
from raytrec.config.schema import Schema
from raytrec.driver.datasets import open_data
from raytrec.driver.preflight import check_fit
from raytrec.driver.prepare import check_nothing_hidden, resolve
from raytrec.metrics.selection import Figure, Selection
from raytrec.tuning.space import Space
from raytrec.tuning.trials import (
    OVER,
    Trial,
    check_space,
    plain_values,
    trial_config,
)
from raytrec.worker.loop import total_steps

KIND = "tune"  # in the name of a search that nobody has named
MOST_TRIALS = 10_000
ON_TEST = (
    "data.valid is not set, so trials are compared on the test data: figures of the best one are better than "
    "they would be on data that took no part in the search"
)


@dataclass(frozen=True)
class Settings:
    """What decides which trials there are, and how long each is trained.

    Attributes:
        metric: key of a metric in evaluations; None: by which the best checkpoints would be kept.
        grace_steps: before which no trial is stopped; None: train.eval_every_steps.
        factor: of the trials of an age, one in so many is trained on.
    """

    trials: int = 10
    metric: str | None = None
    seed: int = 0
    grace_steps: int | None = None
    factor: float = 4.0

    def __post_init__(self) -> None:
        for what, is_right, expected in (
            (f"--trials {self.trials}", 0 < self.trials <= MOST_TRIALS, f"1 to {MOST_TRIALS:,}"),
            (f"--seed {self.seed}", self.seed >= 0, "0 or a number above it"),
            (f"--grace-steps {self.grace_steps}", self.grace_steps is None or self.grace_steps > 0, "steps"),
            (f"--reduction-factor {self.factor:g}", 1 < self.factor <= 1e6, "a number above 1"),
        ):
            if not is_right:
                raise ConfigError(f"{what} cannot be", where="command line", expected=expected)


@dataclass
class Search:
    """A search whose trials are known.

    Attributes:
        config: resolved; each trial differs from it in the keys of the space. run.dir is the search's folder.
        figure: the searched metric.
        configs: of the trials.
        most_rows: that a trial is trained on, those of each epoch counted.
    """

    config: RunConfig
    schema: Schema
    space: Space
    settings: Settings
    figure: Figure
    trials: list[Trial]
    configs: list[RunConfig]
    most_rows: int

    @property
    def folder(self) -> Path:
        return Path(self.config.run.dir)

    @property
    def caution(self) -> str:
        """A warning about the figures of the best trial, for all that show them; empty: there is none."""
        return "" if self.config.data.valid else ON_TEST

    @property
    def left(self) -> list[Trial]:
        """Trials that are to be begun, or resumed."""
        return [trial for trial in self.trials if trial.state not in OVER]

    @property
    def grace_rows(self) -> int:
        """The age, in rows, before which no trial is stopped."""
        steps = self.settings.grace_steps or self.config.train.eval_every_steps
        return steps * self.config.data.global_batch_size


def load_base(source: Any, overrides: list[str], allow_code: bool) -> tuple[RunConfig, str, bool]:
    """The resolved configuration of a new search; its fingerprint, and whether the user has named it."""
    config = load_config(source, overrides, allow_code=allow_code)
    named = bool(config.run.name or config.run.dir)
    text = json.dumps(plain_values(config), sort_keys=True)
    return resolve(config, source, KIND), hashlib.sha256(text.encode()).hexdigest(), named


def prepare(config: RunConfig, space: Space, settings: Settings, before: list[dict] | None = None) -> Search:
    """Draws the trials, and finds out, before one starts, whether each can be run.

    Args:
        config: resolved; run.dir is the search's folder.
        before: records of trials that have been drawn before.

    Raises:
        ConfigError, SchemaError, DataError: what is wrong, in the configuration, the data or the space.
    """
    if not config.train.eval_every_steps:
        raise ConfigError(
            "train.eval_every_steps is not set, so there is nothing to compare trials by",
            where="train.eval_every_steps",
            expected="how many steps there are between two evaluations on data.valid",
            do="set it in the configuration, or add train.eval_every_steps=STEPS to the command",
        )
    check_nothing_hidden(config)
    schema, datasets = open_data(config)
    rows, here = datasets["train"].rows, stays_here(config.scaling.address)

    def accept(each: RunConfig) -> None:
        check_fit(each, schema, here=here)
        find_figure(each, schema, settings.metric)

    accept(config)
    check_space(space, config, accept)
    trials, configs, most_rows = [], [], 0
    for drawn in _drawn(space, settings, before or []):
        number, folder = len(trials) + 1, Path(config.run.dir) / f"trial-{len(trials) + 1:03}"
        each = _checked(number, drawn, space, accept, config, folder)
        batch_rows = each.data.global_batch_size
        steps = total_steps(each, rows)
        trials.append(Trial(number, drawn, folder, batch_rows, total=steps))
        configs.append(each)
        most_rows = max(most_rows, steps * batch_rows)
    figure = find_figure(config, schema, settings.metric)
    return Search(config, schema, space, settings, figure, trials, configs, most_rows)


def _drawn(space: Space, settings: Settings, before: list[dict]) -> list[dict[str, Any]]:
    """Key → value of each trial; those that have been drawn before are as they were."""
    for number, record in enumerate(before, 1):
        if lacks := [draw.key for draw in space.draws if draw.key not in record["values"]]:
            raise ConfigError(
                f"trial {number} of the search lacks {', '.join(lacks)}",
                where=space.place,
                expected="the keys that its trials were drawn with",
                do="restore the files of the search as they were, or begin a new one",
            )
    drawn = space.configurations(settings.trials, settings.seed)
    return [record["values"] for record in before] + drawn[len(before) :]


def _checked(
    number: int,
    drawn: dict[str, Any],
    space: Space,
    accept: Callable[[RunConfig], None],
    base: RunConfig,
    folder: Path,
) -> RunConfig:
    try:
        config = trial_config(base, drawn, f"{base.run.name}-{number:03}", folder)
        config = resolve(config, base.run.name)
        accept(config)
    except RaytrecError as error:
        text = ", ".join(f"{key} = {value}" for key, value in drawn.items())
        raise ConfigError(
            f"trial {number} ({text}): {error.what}",
            where=f"{space.place}, {error.where}" if error.where else space.place,
            expected=error.expected,
            do="draw what only goes together as one: a choice of whole sections, such as "
            "optim.schedule: {choice: [{}, {decay: linear}]}",
        ) from None
    return config


def find_figure(config: RunConfig, schema: Schema, key: str | None) -> Figure:
    """The metric that trials are compared by.

    Raises:
        ConfigError: the evaluations have none of that name, or none of its values are better than others.
    """
    selection = Selection.of_config(config, schema)
    return selection.best(config.checkpoint.best_metric) if key is None else selection.best(key, "--metric")
