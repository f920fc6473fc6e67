"""The training loss, of every task and their sum, as metrics of training have it."""

import sys
from pathlib import Path

import pytest
import torch
from ranks import on_ranks
from test_own_loss import CASES, TWO, settings

HERE = str(Path(__file__).parent)


def trained(rank, world, tasks, changes, spoil=False):
    """(figures of training over three steps, Outputs.loss of each)."""
    from small import batches, build

    from raytrec.metrics.selection import Selection
    from raytrec.metrics.sums import Sums

    sys.path.insert(0, HERE)
    made = settings(world, tasks, **changes)
    _, local = batches(3, rank, world, schema=TWO)
    if spoil:
        local[1].dense[0, 0] = float("nan")
    step, sums = build(made, TWO), Sums(Selection.of_config(made, TWO), torch.device("cpu"))
    losses = []
    for outputs in step.train(iter(local), 3):
        sums.add(outputs)
        losses.append(float(outputs.loss))
    return sums.reduce(), losses


@pytest.mark.parametrize("case", CASES)
def test_it_is_the_mean_loss_of_steps_on_any_number_of_ranks(case):
    one, many = (on_ranks(world, trained, CASES[case], {}) for world in (1, 2))
    for ranks in (one, many):
        of_ranks = [sum(losses) / 3 for _, losses in ranks]
        assert ranks[0][0]["loss"] == pytest.approx(sum(of_ranks) / len(of_ranks), rel=1e-5) != 0
        mine = {key: value for key, value in ranks[0][0].items() if key.rpartition(".")[2] == "loss"}
        assert mine == pytest.approx({key: one[0][0][key] for key in mine}, rel=1e-5)
        names = {"".join(key.rpartition(".")[:1]) for key in mine} - {""}
        of_tasks = sum(mine[f"{name}.loss"] for name in names)
        if case == "with a loss":  # the model's is only in the sum
            assert names == {"y"} and mine["loss"] - of_tasks > 0
        elif case == "for a task":
            assert not names
        else:
            assert len(names) > 1 and mine["loss"] == pytest.approx(of_tasks, rel=1e-6)


def test_the_loss_of_labels_is_their_log_loss_times_the_weight_of_the_task():
    tasks = [{"label": "y"}, {"label": "z", "weight": 0.5}]
    ((figures, _),) = on_ranks(1, trained, tasks, {})
    assert figures["z.loss"] == pytest.approx(0.5 * figures["z.logloss"], rel=1e-5)
    assert figures["y.loss"] == pytest.approx(figures["y.logloss"], rel=1e-5)


def test_a_step_that_is_skipped_does_not_count():
    for figures, losses in on_ranks(2, trained, CASES["with a loss"], {"on_nan": "skip"}, True):
        assert losses[1] == 0 and losses[0] != 0
        assert figures["rows"] == 24 and figures["loss"] > 0.3
