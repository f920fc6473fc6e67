"""Trials: their configurations, their figures as their folders grow, and which of them is the best."""

import json
from math import isnan, nan

import pytest

from raytrec.config.run_config import load_config
from raytrec.metrics.registry import METRICS
from raytrec.metrics.selection import Figure
from raytrec.tuning.search import Search, Settings, State, Trial, trial_config
from raytrec.tuning.space import Space

HIGH = Figure("area", "area", "area", "higher", "{:.4f}", False)
LOW = Figure("loss", "loss", "loss", "lower", "{:.4f}", True)
NEAR_1 = Figure("ratio", "ratio", "ratio", "closer to 1", "{:.4f}", True)
BASE = {
    "run": {"name": "search", "dir": "/runs/search", "seed": 3},
    "data": {"train": "/d/train", "valid": "/d/valid", "test": "/d/test"},
    "train": {"eval_every_steps": 5},
    "checkpoint": {"dir": "/checkpoints/"},
    "tracking": {"uri": "sqlite:////runs/mlflow.db"},
}


def trial(number, state, value=nan):
    points = {} if isnan(value) else {5: 0.1, 10: value}
    return Trial(number, {"a.b": number}, None, 20, state, points)


def search_of(trials, figure):
    return Search(load_config(BASE), None, Space("space.yaml", "", ()), Settings(), figure, trials)


@pytest.mark.parametrize("figure, order", [(HIGH, [2, 3, 1]), (LOW, [1, 3, 2]), (NEAR_1, [3, 2, 1])])
def test_the_best_comes_first(figure, order):
    values = {1: 0.5, 2: 1.3, 3: 1.2}
    search = search_of([trial(number, State.FINISHED, value) for number, value in values.items()], figure)
    assert [each.number for each in search.ranked] == order
    assert search.best.number == order[0]


def test_trials_that_were_trained_to_the_end_are_before_the_others():
    trials = [
        trial(1, State.FAILED, 0.1),
        trial(2, State.WAITING),
        trial(3, State.INTERRUPTED, 0.2),
        trial(4, State.STOPPED, 0.3),
        trial(5, State.FINISHED, 0.9),
        trial(6, State.FINISHED),
    ]
    assert [each.number for each in search_of(trials, LOW).ranked] == [5, 6, 4, 3, 1, 2]
    best = [search_of(trials[:count], LOW).best for count in (6, 4, 3)]
    assert [each and each.number for each in best] == [5, 4, None]


def test_a_trial_differs_in_what_was_drawn_and_leaves_test_data_alone():
    base = load_config(BASE)
    config = trial_config(base, {"optim.dense.lr": 0.5, "model.name": "dcn"}, 2)
    assert config.optim.dense.lr == 0.5 and config.model.name == "dcn" and config.run.seed == 3
    assert (config.run.name, config.run.dir, config.checkpoint.dir) == (
        "search-002",
        "/runs/search/trial-002",
        "/checkpoints/trial-002",
    )
    assert config.data.test is None and config.data.valid == "/d/valid"
    assert config.tracking.parent_run == "search" and not config.tracking.report
    assert config.tracking.uri == base.tracking.uri
    assert base.data.test == "/d/test" and base.optim.dense.lr != 0.5


def test_figures_are_read_as_they_are_written(tmp_path):
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
    assert add("torn\n" + line("eval", 15, None)) == ({5: 0.5, 10: 0.6}, 15)  # not defined there
    assert add(line("train", 9, 1.0) + line("eval", 10, 0.7)) == ({5: 0.5, 10: 0.7}, 10)  # trained again
    assert add(line("final", 20, 0.8)) == ({5: 0.5, 10: 0.7, 20: 0.8}, 20)
