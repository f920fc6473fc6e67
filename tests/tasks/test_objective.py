"""Training losses and predictions of one or several tasks, compared with formulas."""

import math

import pytest
import torch
from ranks import run_on_ranks
from small import (
    SCHEMA,
    batch_of_labels,
    build_step_on_rank,
    make_batches,
    make_objective,
    make_small_config,
    train_step,
)

from raytrec.tasks.objective import ScoringObjective, total

TWO_LABELS = SCHEMA.model_copy(update={"labels": ["y", "z"]})
CLICK_AND_TIME = [{"label": "z", "loss": "mse", "weight": 0.25}, {"label": "y"}]


LOGITS, LABELS = torch.tensor([0.5, -2.0, 9.0]), torch.tensor([1.0, 0.25, 0.0])
FORMULAS = {
    "bce": lambda x, y: -y * math.log(1 / (1 + math.exp(-x))) - (1 - y) * math.log(1 / (1 + math.exp(x))),
    "mse": lambda x, y: (x - y) ** 2,
}


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("world,weight", [(1, 1.0), (2, 0.5), (3, 2.0)])
def test_losses_match_their_formulas(name, world, weight):
    made = make_objective([{"loss": name, "weight": weight}], world=world)
    rows = [FORMULAS[name](float(x), float(y)) for x, y in zip(LOGITS, LABELS, strict=True)]
    found = total(made.losses(LOGITS, batch_of_labels(LABELS, torch.tensor([1.0, 1.0, 0.0]), 7)))
    expected = weight * world * (rows[0] + rows[1]) / 7
    assert float(found) == pytest.approx(expected, rel=1e-6)


def test_predictions_are_in_label_units():
    made = make_objective(CLICK_AND_TIME, TWO_LABELS)
    logits_BT, labels_BL = torch.stack([LOGITS, -LOGITS], 1), torch.stack([LABELS, 10 * LABELS], 1)
    weights = torch.tensor([1.0, 1.0, 0.0])
    outputs = made.outputs(torch.tensor(1.5), logits_BT, batch_of_labels(labels_BL, weights))
    assert list(outputs.tasks) == ["z", "y"] and not outputs.skipped
    assert torch.equal(outputs["z"].predictions, LOGITS) and torch.equal(outputs["z"].labels, 10 * LABELS)
    assert torch.equal(outputs["y"].predictions, torch.sigmoid(-LOGITS))
    assert torch.equal(outputs["y"].labels, LABELS) and torch.equal(outputs["y"].weights, weights)
    assert torch.equal(outputs.rows, weights) and float(outputs.loss) == 1.5


def test_scoring_predicts_every_task_without_labels():
    """The world size is 2 but only one rank exists, so any collective would fail."""
    tasks = [
        {"label": "y", "negatives_kept": 0.25},
        {"label": "z", "loss": "cross_entropy", "options": {"classes": 3}},
        {"label": "y", "name": "pairs", "loss": "bpr", "group": "user"},
    ]
    scoring = ScoringObjective(make_objective(tasks, TWO_LABELS).tasks, world=2)
    logits = torch.tensor([[0.5, 1.0, 2.0, 3.0, -1.0], [-2.0, 0.0, 0.0, 0.0, 4.0]])
    batch = batch_of_labels(torch.empty(2, 0), torch.tensor([1.0, 0.0]))
    loss = total(scoring.losses(logits, batch))
    outputs = scoring.outputs(loss, logits, batch)
    found = {name: each.predictions for name, each in outputs.tasks.items()}
    p = torch.sigmoid(logits[:, 0])
    torch.testing.assert_close(found["y"], p / (p + (1 - p) / 0.25))
    torch.testing.assert_close(found["z"], torch.softmax(logits[:, 1:4], 1))
    assert torch.equal(found["pairs"], logits[:, 4])
    assert float(loss) == 0 and outputs.rows.tolist() == [1, 0]


def train_overflowing_step(rank, world):
    """Run a step with finite logits and an infinite loss; return which outputs are finite."""
    local = make_batches(1, rank, world)[1]
    local[0].labels[0, 0] = 1e30
    (outputs,), (skipped,) = (
        train_step(build_step_on_rank(make_small_config(world, {}, tasks=[{"loss": "mse"}], **train)), local)
        for train in ({}, {"on_nan": "skip"})
    )
    finite = [torch.isfinite(x).all().item() for x in (outputs["y"].logits, outputs.loss, skipped.loss)]
    return finite, skipped.skipped, skipped.rows.sum().item()


def test_non_finite_loss_is_reported_for_finite_logits():
    for finite, skipped, rows in run_on_ranks(1, train_overflowing_step):
        assert finite == [True, False, True]
        assert skipped and rows == 0
