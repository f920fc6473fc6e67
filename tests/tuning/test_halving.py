"""Which trials are stopped, compared with a plain definition of asynchronous successive halving."""

from random import Random
from types import SimpleNamespace

import numpy as np
import pytest

from raytrec.config.run_config import load_config
from raytrec.metrics.selection import Figure
from raytrec.tuning.runner import Halving
from raytrec.tuning.search import Settings, Trial

FIGURE = Figure("area", "area", "area", "higher", "{:.4f}", False)
BATCH, STEPS = 10, 16
VALUES = {
    "data": {"train": "/d", "valid": "/v", "global_batch_size": BATCH},
    "train": {"eval_every_steps": 1},
    "scaling": {"num_workers": 1},
}
CONFIG = load_config(VALUES)


def halving(factor=2.0, grace=None, trials=30):
    made = {number: Trial(number, {}, CONFIG, STEPS) for number in range(trials)}
    settings = Settings(grace_steps=grace, factor=factor)
    search = SimpleNamespace(config=CONFIG, settings=settings, figure=FIGURE, trials=list(made.values()))
    return Halving(search), made


class Plain:
    """Rungs at grace × factor^k below the end; a trial among the best 1/factor of those before goes on."""

    def __init__(self, factor, grace, most):
        self.factor, self.rungs = factor, {}
        while grace < most:
            self.rungs[grace], grace = {}, grace * factor

    def is_stopped(self, number, step, value):
        reached = [rung for rung in self.rungs if rung <= step]
        if not reached or number in self.rungs[max(reached)]:
            return False
        others = list(self.rungs[max(reached)].values())
        self.rungs[max(reached)][number] = value
        return bool(others) and value < np.percentile(others, 100 * (1 - 1 / self.factor))


@pytest.mark.parametrize("factor, grace", [(2.0, 1), (3.0, 2), (4.0, 1)])
def test_trials_that_fall_behind_are_stopped(factor, grace):
    random, plain = Random(1), Plain(factor, grace, STEPS)
    rule, trials = halving(factor, grace)
    expected, stopped, running = [], [], dict.fromkeys(trials, 0)
    while running:
        number = random.choice(list(running))
        running[number] += 1
        value = number / 30 + random.random()
        if plain.is_stopped(number, running[number], value):
            expected.append((number, running[number]))
        trials[number].points[running[number]] = value
        for _ in range(2):  # each figure is read more than once
            if rule.falls_behind(trials[number]):
                stopped.append((number, running[number]))
        if running[number] == STEPS or (number, running[number]) in expected:
            del running[number]
    assert stopped == expected and len(stopped) > 8


def test_evaluations_of_the_past_count():
    rule, trials = halving()
    for number in (1, 2):
        trials[number].points = {1: 0.8 + number / 100, 2: 0.9}
        rule.falls_behind(trials[number])
    trials[2].points[1] = 0.1  # it has been there before
    assert not rule.falls_behind(trials[2])
    trials[3].points[1] = 0.5
    assert rule.falls_behind(trials[3])


def test_batches_of_different_sizes_are_compared_by_rows():
    rule, trials = halving(factor=4.0)  # rungs at 10 and 40 rows
    trials[1].config = load_config(VALUES | {"data": VALUES["data"] | {"global_batch_size": 4 * BATCH}})
    trials[2].points = {1: 0.2, 4: 0.9}
    trials[1].points = {1: 0.5}  # after 40 rows
    assert not rule.falls_behind(trials[2]) and rule.falls_behind(trials[1])


def test_a_trial_without_figures_goes_on():
    rule, trials = halving()
    assert not any(map(rule.falls_behind, trials.values()))


def test_a_run_that_ends_before_the_first_rung():
    rule, trials = halving(grace=20)
    for number in (1, 2):
        trials[number].points = {STEPS: 1 / number}
        assert not rule.falls_behind(trials[number])
