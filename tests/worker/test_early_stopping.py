"""Early stopping ends training at the step given by a plain definition, on all ranks."""

import math
import random

import pytest
import torch
from ranks import run_on_ranks
from small import SCHEMA, make_small_config

from raytrec.common.errors import ConfigError
from raytrec.config.run_config import load_config
from raytrec.metrics.selection import Selection


def find_expected_stop(values, patience, better):
    """Return the number of evaluations until training ends, or None if it does not end early."""
    best, since = None, 0
    for number, value in enumerate(values, start=1):
        cost = {"lower": value, "higher": -value, "closer to 1": abs(value - 1)}[better]
        if not math.isnan(cost) and (best is None or cost < best):
            best, since = cost, 0
        else:
            since += 1
        if since == patience:
            return number
    return None


def run_until_stop(rank, world, values, section, resumed_after=None):
    """Return the number of evaluations until a run ends, and its message. Only rank 0 knows the metrics."""
    from raytrec.config.training import EarlyStoppingSection
    from raytrec.metrics.sums import MetricSums
    from raytrec.worker.evaluate import EarlyStopping
    from raytrec.worker.progress import Progress

    selection = Selection.from_config(make_small_config(1, {"sharding_type": "row_wise"}), SCHEMA)

    def begin():
        progress = Progress(MetricSums(selection, torch.device("cpu")))
        return progress, EarlyStopping(EarlyStoppingSection(**section), progress, torch.device("cpu"))

    progress, stopping = begin()
    for number, value in enumerate(values, start=1):
        progress.step = 10 * number
        known = None if math.isnan(value) else value
        progress.evaluation = {"step": progress.step, section["metric"]: known if rank == 0 else None}
        stopping.after_evaluation()
        if number == resumed_after:
            record = progress.record()
            progress, stopping = begin()
            progress.resume(record)
        if stopping.over:
            return number, stopping.result(progress.step + 1)["train.ended"]
    return None, stopping.result(progress.step)["train.ended"]


def run_all_cases(rank, world, cases):
    """Return the result of run_until_stop for each case."""
    return [run_until_stop(rank, world, *case) for case in cases]


DIRECTIONS = {"ne": "lower", "auc": "higher", "calibration": "closer to 1"}


@pytest.mark.slow
@pytest.mark.parametrize("metric", DIRECTIONS)
def test_early_stopping_matches_its_definition(metric):
    draw, cases, expected_at = random.Random(metric), [], []
    for _ in range(20):
        values = [draw.choice([math.nan, *(round(draw.gauss(1, 0.1), 2) for _ in range(4))]) for _ in range(9)]
        patience = draw.randint(1, 4)
        expected_at.append(find_expected_stop(values, patience, DIRECTIONS[metric]))
        section = {"metric": metric, "patience": patience}
        cases.append((values, section, draw.randint(1, 9)))
    for found in run_on_ranks(2, run_all_cases, cases):
        assert [at for at, _ in found] == expected_at, cases
    assert len(set(expected_at)) > 3
    improving = {"ne": [0.9, 0.8, 0.7], "auc": [0.7, 0.8, 0.9], "calibration": [0.5, 1.3, 1.0]}[metric]
    assert run_on_ranks(2, run_until_stop, improving, {"metric": metric, "patience": 1})[1] == (None, "after all steps")


def test_early_stopping_states_its_reason():
    section = {"metric": "auc", "patience": 2}
    answers = run_on_ranks(2, run_until_stop, [0.7, 0.8, 0.8, 0.6, 0.9], section)
    assert answers == [(4, "auc has not improved in 2 evaluations; it was best at step 20 (0.8000)")] * 2
    assert run_on_ranks(1, run_until_stop, [0.7], section) == [(None, "after all steps")]
    nan = run_on_ranks(1, run_until_stop, [math.nan] * 2, section)
    assert nan == [(2, "auc had no finite value in 2 evaluations")]


def test_training_ends_at_the_target():
    section = {"metric": "auc", "patience": None, "target": 0.75}
    answers = run_on_ranks(2, run_until_stop, [0.7, 0.6, math.nan, 0.65, 0.76, 0.9], section)
    assert answers == [(5, "auc reached 0.7600 at step 50")] * 2
    assert run_on_ranks(1, run_until_stop, [0.7, 0.74], section) == [(None, "after all steps")]
    assert run_on_ranks(1, run_until_stop, [0.8, 0.9], {"metric": "ne", "target": 0.8})[0][0] == 1


def test_invalid_early_stopping_is_rejected():
    base = make_small_config(1, {"sharding_type": "row_wise"})
    for patience, message in (
        ("2", "early_stopping is set, but"),
        ("0", "greater than 0"),
        ("null", "patience and target are both null"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_config(base, [f"train.early_stopping={{patience: {patience}}}"])
    selection = Selection.from_config(base, SCHEMA)
    with pytest.raises(ConfigError, match=r"train\.early_stopping\.metric is aux.* did you mean 'auc'"):
        selection.best("aux", "train.early_stopping.metric")


def test_metric_of_single_task_accepts_task_prefix():
    selection = Selection.from_config(make_small_config(1, {"sharding_type": "row_wise"}), SCHEMA)
    assert selection.best("y.auc").key == "auc" == selection.best("auc").key
