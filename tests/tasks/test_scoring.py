"""Scores without labels: every task's predictions as metrics see them, and no collective for them."""

import torch
from small import labelled

from raytrec.config.schema import Schema
from raytrec.config.tasks import TaskSection
from raytrec.tasks.objective import Scoring, total
from raytrec.tasks.task import resolve_tasks

SCHEMA = Schema.parse(
    {
        "labels": ["buys", "kind"],
        "sparse": {"user": {"table": "user"}},
        "tables": {"user": {"rows": 9, "dim": 4}},
    },
    "here",
)


def test_predictions_of_every_task_without_labels():
    """With a world of two ranks, of which there is one: a collective would be an error."""
    tasks = [
        {"label": "buys", "negatives_kept": 0.25},
        {"label": "kind", "loss": "cross_entropy", "options": {"classes": 3}},
        {"label": "buys", "name": "pairs", "loss": "bpr", "group": "user"},
    ]
    scoring = Scoring(resolve_tasks([TaskSection.model_validate(task) for task in tasks], SCHEMA), world=2)
    logits = torch.tensor([[0.5, 1.0, 2.0, 3.0, -1.0], [-2.0, 0.0, 0.0, 0.0, 4.0]])
    batch = labelled(torch.empty(2, 0), torch.tensor([1.0, 0.0]))
    loss = total(scoring.losses(logits, batch))
    outputs = scoring.outputs(loss, logits, batch)
    found = {name: each.predictions for name, each in outputs.tasks.items()}
    p = torch.sigmoid(logits[:, 0])
    torch.testing.assert_close(found["buys"], p / (p + (1 - p) / 0.25))
    torch.testing.assert_close(found["kind"], torch.softmax(logits[:, 1:4], 1))
    assert torch.equal(found["pairs"], logits[:, 4])
    assert float(loss) == 0 and outputs.rows.tolist() == [1, 0]
