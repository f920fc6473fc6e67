"""Trials: their configurations, their figures as their folders grow, and which of them is the best."""

import json
from math import isnan, nan
from pathlib import Path

import pytest

from raytrec.config.run_config import load_config
from raytrec.metrics.registry import METRICS
from raytrec.metrics.selection import Figure
from raytrec.tuning.trials import (
    FAILED,
    FINISHED,
    INTERRUPTED,
    STOPPED,
    WAITING,
    Evaluations,
    Trial,
    best_config,
    best_of,
    ranked,
    trial_config,
)

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
    return Trial(number, {"a.b": number}, Path("nowhere"), 8, state, points)


@pytest.mark.parametrize("figure, order", [(HIGH, [2, 3, 1]), (LOW, [1, 3, 2]), (NEAR_1, [3, 2, 1])])
def test_the_best_comes_first(figure, order):
    trials = [trial(1, FINISHED, 0.5), trial(2, FINISHED, 1.3), trial(3, FINISHED, 1.2)]
    assert [each.number for each in ranked(trials, figure)] == order
    assert best_of(trials, figure).number == order[0]


def test_who_was_trained_to_the_end_is_before_who_was_not():
    trials = [
        trial(1, FAILED, 0.1),
        trial(2, WAITING),
        trial(3, INTERRUPTED, 0.2),
        trial(4, STOPPED, 0.3),
        trial(5, FINISHED, 0.9),
        trial(6, FINISHED),
    ]
    assert [each.number for each in ranked(trials, LOW)] == [5, 6, 4, 3, 1, 2]
    assert best_of(trials, LOW).number == 5 and best_of(trials[:4], LOW).number == 4
    assert best_of(trials[:3], LOW) is None


def test_a_trial_differs_in_what_was_drawn_and_leaves_test_data_alone():
    base = load_config(BASE)
    config = trial_config(
        base, {"optim.dense.lr": 0.5, "model.name": "dcn"}, "search-002", Path("/runs/search/2")
    )
    assert config.optim.dense.lr == 0.5 and config.model.name == "dcn" and config.run.seed == 3
    assert (config.run.name, config.run.dir, config.checkpoint.dir) == (
        "search-002",
        "/runs/search/2",
        "/checkpoints/2",
    )
    assert config.data.test is None and config.data.valid == "/d/valid"
    assert config.tracking.parent_run == "search" and not config.tracking.report
    assert config.tracking.uri == base.tracking.uri
    assert base.data.test == "/d/test" and base.optim.dense.lr != 0.5


def test_the_best_is_a_run_of_its_own():
    values = best_config(load_config(BASE), {"optim.dense.lr": 0.5})
    assert values["run"] == {"seed": 3} and values["optim"] == {"dense": {"lr": 0.5}}
    config = load_config(values)
    assert config.data.test == "/d/test" and config.tracking.report and config.tracking.parent_run is None


def test_figures_are_read_as_they_are_written(tmp_path):
    key = next(iter(METRICS.parts))
    evaluations, file = Evaluations(tmp_path, key), tmp_path / "metrics.jsonl"
    evaluations.look()
    assert (evaluations.points, evaluations.step) == ({}, 0)

    def add(text):
        with file.open("a") as out:
            out.write(text)
        evaluations.look()
        return evaluations.points, evaluations.step

    def line(kind, step, value):
        return json.dumps({"kind": kind, "step": step, key: value}) + "\n"

    assert add(line("train", 4, 9.0)) == ({}, 4)
    assert add(line("eval", 5, 0.5) + line("eval", 10, 0.6)[:9]) == ({5: 0.5}, 5)  # a line is being written
    assert add(line("eval", 10, 0.6)[9:]) == ({5: 0.5, 10: 0.6}, 10)
    assert add("torn\n" + line("eval", 15, None)) == ({5: 0.5, 10: 0.6}, 15)  # not defined there
    assert add(line("train", 9, 1.0) + line("eval", 10, 0.7)) == ({5: 0.5, 10: 0.7}, 10)  # trained again
    assert add(line("final", 20, 0.8)) == ({5: 0.5, 10: 0.7, 20: 0.8}, 20)
