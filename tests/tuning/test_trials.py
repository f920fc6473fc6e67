"""Trials: configurations, figures, ranking and early stopping by successive halving."""

import json
from math import isnan, nan
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
from searches import make_settings

from raytrec.config.run_config import load_config
from raytrec.metrics.registry import METRICS
from raytrec.metrics.selection import MetricDisplay
from raytrec.tuning.runner import SuccessiveHalving
from raytrec.tuning.search import Search, State, Trial, make_trial_config
from raytrec.tuning.space import Space

HIGH = MetricDisplay("area", "area", "area", "higher", "{:.4f}", False)
LOW = MetricDisplay("loss", "loss", "loss", "lower", "{:.4f}", True)
NEAR_1 = MetricDisplay("ratio", "ratio", "ratio", "closer to 1", "{:.4f}", True)
BASE = {
    "run": {"name": "search", "dir": "/runs/search", "seed": 3},
    "data": {"train": "/d/train", "valid": "/d/valid", "test": "/d/test"},
    "train": {"eval_every_steps": 5},
    "checkpoint": {"dir": "/checkpoints/"},
    "tracking": {"uri": "sqlite:////runs/mlflow.db"},
}


def make_trial(number, state, value=nan):
    points = {} if isnan(value) else {5: 0.1, 10: value}
    return Trial(number, {"a.b": number}, None, 20, state, points)


def make_ranked_search(trials, figure):
    return Search(load_config(BASE), None, Space("space.yaml", "", ()), make_settings(trials=10), figure, trials)


@pytest.mark.parametrize("figure, order", [(HIGH, [2, 3, 1]), (LOW, [1, 3, 2]), (NEAR_1, [3, 2, 1])])
def test_ranking_puts_the_best_trial_first(figure, order):
    values = {1: 0.5, 2: 1.3, 3: 1.2}
    search = make_ranked_search([make_trial(number, State.FINISHED, value) for number, value in values.items()], figure)
    assert [each.number for each in search.ranked] == order
    assert search.best.number == order[0]


def test_ranking_puts_finished_trials_first():
    states = [State.FAILED, State.WAITING, State.INTERRUPTED, State.STOPPED, State.FINISHED, State.FINISHED]
    values = (0.1, nan, 0.2, 0.3, 0.9, nan)
    trials = [make_trial(n, state, value) for n, (state, value) in enumerate(zip(states, values, strict=True), 1)]
    assert [each.number for each in make_ranked_search(trials, LOW).ranked] == [5, 6, 4, 3, 1, 2]
    best = [make_ranked_search(trials[:count], LOW).best for count in (6, 4, 3)]
    assert [each and each.number for each in best] == [5, 4, None]


def test_trial_config_has_drawn_values_and_no_test_data():
    base = load_config(BASE)
    config = make_trial_config(base, {"optim.dense.lr": 0.5, "model.name": "dcn"}, 2)
    assert config.optim.dense.lr == 0.5 and config.model.name == "dcn" and config.run.seed == 3
    assert (config.run.name, config.run.dir) == ("search-002", "/runs/search/trial-002")
    assert config.checkpoint.dir == "/checkpoints/trial-002"
    base.checkpoint.dir = "s3://bucket/checkpoints?region=eu-north-1"
    assert make_trial_config(base, {}, 2).checkpoint.dir == "s3://bucket/checkpoints/trial-002?region=eu-north-1"
    assert config.data.test is None and config.data.valid == "/d/valid"
    assert config.tracking.parent_run == "search" and not config.tracking.report
    assert config.tracking.uri == base.tracking.uri
    assert base.data.test == "/d/test" and base.optim.dense.lr != 0.5


def test_evaluations_are_read_while_they_are_written(tmp_path):
    key = next(iter(METRICS.parts))
    config = load_config(BASE)
    config.run.dir = str(tmp_path)
    one, file = Trial(1, {}, config, 20), tmp_path / "metrics.jsonl"
    one.read_evaluations(key)
    assert (one.points, one.step) == ({}, 0)

    def add(text):
        with file.open("a") as out:
            out.write(text)
        one.read_evaluations(key)
        return one.points, one.step

    def line(kind, step, value):
        return json.dumps({"kind": kind, "step": step, key: value}) + "\n"

    assert add(line("train", 4, 9.0)) == ({}, 4)
    assert add(line("eval", 5, 0.5) + line("eval", 10, 0.6)[:9]) == ({5: 0.5}, 5)  # a line is being written
    assert add(line("eval", 10, 0.6)[9:]) == ({5: 0.5, 10: 0.6}, 10)
    assert add("torn\n" + line("eval", 15, None)) == ({5: 0.5, 10: 0.6}, 15)  # undefined metric
    assert add(line("train", 9, 1.0) + line("eval", 10, 0.7)) == ({5: 0.5, 10: 0.7}, 10)  # trained again
    assert add(line("final", 20, 0.8)) == ({5: 0.5, 10: 0.7, 20: 0.8}, 20)


# Stopped trials, compared with a plain definition of asynchronous successive halving.
BATCH, STEPS = 10, 16
TRIAL_VALUES = {
    "data": {"train": "/d", "valid": "/v", "global_batch_size": BATCH},
    "train": {"eval_every_steps": 1},
    "scaling": {"num_workers": 1},
}
TRIAL_CONFIG = load_config(TRIAL_VALUES)


def make_halving_rule(factor=2.0, grace=None, trials=30):
    made = {number: Trial(number, {}, TRIAL_CONFIG, STEPS) for number in range(trials)}
    settings = make_settings(trials=10, grace_steps=grace, factor=factor)
    search = SimpleNamespace(config=TRIAL_CONFIG, settings=settings, figure=HIGH, trials=list(made.values()))
    return SuccessiveHalving(search), made


class PlainHalving:
    """Reference rule: rungs at grace × factor^k; a trial continues if it is among the best 1/factor."""

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
def test_halving_stops_the_same_trials_as_the_reference(factor, grace):
    random, plain = Random(1), PlainHalving(factor, grace, STEPS)
    rule, trials = make_halving_rule(factor, grace)
    expected, stopped, running = [], [], dict.fromkeys(trials, 0)
    while running:
        number = random.choice(list(running))
        running[number] += 1
        value = number / 30 + random.random()
        if plain.is_stopped(number, running[number], value):
            expected.append((number, running[number]))
        trials[number].points[running[number]] = value
        for _ in range(2):  # figures are read repeatedly
            if rule.falls_behind(trials[number]):
                stopped.append((number, running[number]))
        if running[number] == STEPS or (number, running[number]) in expected:
            del running[number]
    assert stopped == expected and len(stopped) > 8


def test_halving_compares_trials_by_trained_rows():
    rule, trials = make_halving_rule(factor=4.0)  # rungs at 10 and 40 rows
    trials[1].config = load_config(TRIAL_VALUES | {"data": TRIAL_VALUES["data"] | {"global_batch_size": 4 * BATCH}})
    trials[2].points = {1: 0.2, 4: 0.9}
    trials[1].points = {1: 0.5}  # after 40 rows
    assert not rule.falls_behind(trials[2]) and rule.falls_behind(trials[1])


def test_halving_continues_trials_without_figures():
    rule, trials = make_halving_rule()
    assert not any(map(rule.falls_behind, trials.values()))
