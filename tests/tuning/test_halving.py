"""Which trials are stopped, compared with a plain definition of asynchronous successive halving."""

from pathlib import Path
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest

from raytrec.metrics.selection import Figure
from raytrec.tuning.actor import LOSS, ROWS
from raytrec.tuning.schedule import Halving, Queue
from raytrec.tuning.trials import STOPPED, Trial

FIGURE = Figure("area", "area", "area", "higher", "{:.4f}", False)
BATCH = 10


def scheduler(past=(), factor=2.0, grace=1, most=16):
    stopped = []
    halving = Halving(
        FIGURE,
        past,
        lambda number, step: stopped.append((number, step)),
        grace_rows=grace * BATCH,
        most_rows=most * BATCH,
        factor=factor,
    )
    return halving, stopped


def ray_trial(number):
    return SimpleNamespace(trial_id=f"random-{number}", config={"number": number})


def tell(halving, number, step, value):
    result = {"step": step, ROWS: step * BATCH, LOSS: FIGURE.loss(value)}
    assert halving.on_trial_result(None, ray_trial(number), result) == "CONTINUE"


class Plain:
    """Rungs at grace × factor^k below the end; among the best 1/factor of those before goes on."""

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
def test_who_falls_behind_is_stopped(factor, grace):
    random, plain = Random(1), Plain(factor, grace, 16)
    halving, stopped = scheduler(factor=factor, grace=grace)
    expected, trained = [], {number: 0 for number in range(30)}
    for number in trained:
        halving.on_trial_add(None, ray_trial(number))
    while trained:
        number = random.choice(list(trained))
        trained[number] += 1
        value = number / 30 + random.random()
        for _ in range(2):  # each figure is heard more than once
            if plain.is_stopped(number, trained[number], value):
                expected.append((number, trained[number]))
            tell(halving, number, trained[number], value)
        if trained[number] == 16 or (number, trained[number]) in expected:
            del trained[number]
    assert stopped == expected and len(stopped) > 8


def test_a_search_that_is_resumed_knows_its_past():
    past = [Trial(n, {}, Path("x"), BATCH, STOPPED, {1: 0.8 + n / 100, 2: 0.9}) for n in (1, 2)]
    halving, stopped = scheduler(past)
    assert stopped == []
    halving.on_trial_add(None, ray_trial(2))
    tell(halving, 2, 1, 0.1)  # it has been there before
    halving.on_trial_add(None, ray_trial(3))
    tell(halving, 3, 1, 0.5)
    assert stopped == [(3, 1)]


def test_what_has_no_figure_yet_or_none_at_all_goes_on():
    halving, stopped = scheduler()
    for number in (1, 2, 3):
        halving.on_trial_add(None, ray_trial(number))
        halving.on_trial_result(None, ray_trial(number), {"step": 0, ROWS: 0, LOSS: float("nan")})
        tell(halving, number, 1, float("nan"))
    assert stopped == []


def test_a_run_that_is_over_before_the_first_rung():
    halving, stopped = scheduler(grace=20, most=16)
    for number in (1, 2):
        halving.on_trial_add(None, ray_trial(number))
        tell(halving, number, 16, 1 / number)
    assert stopped == []


def test_trials_are_handed_out_in_order_until_the_search_ends():
    ending = []
    queue = Queue([{"number": 1}, {"number": 2}, {"number": 3}], lambda: bool(ending))
    assert [queue.suggest("a"), queue.suggest("b")] == [{"number": 1}, {"number": 2}]
    ending.append(True)
    assert queue.suggest("c") == "FINISHED"
    ending.clear()
    assert [queue.suggest("c"), queue.suggest("d")] == [{"number": 3}, "FINISHED"]
