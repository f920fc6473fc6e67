"""Losses that a model gives itself: which column they are, which rows they count for, on how many ranks."""

from pathlib import Path

import pytest
import torch
from ranks import on_ranks
from small import SCHEMA, build, config, labelled, objective

from raytrec.checks.parity.batches import GlobalBatch
from raytrec.checks.parity.losses import loss_of
from raytrec.common.errors import ConfigError
from raytrec.config.run_config import load_config
from raytrec.tasks.objective import Objective, total

HERE = str(Path(__file__).parent)
TWO = SCHEMA.model_copy(update={"labels": ["y", "z"]})
LEFT = {"label": "y", "loss": "from_model", "weight": 0.5, "positive_weight": 3.0}
CASES = {
    "with a loss": [{"label": "y"}],
    "for a task": [LEFT],
    "by its weights": [LEFT | {"mask": "z"}, {"label": "z", "loss": "mse"}],
    "with vectors": [{"label": "z"}, LEFT, {"name": "third", "label": "y", "loss": "in_batch_softmax"}],
}


def settings(world, tasks, options=None, **changes):
    own = {"name": "own_parts:Auxiliary", "gives_loss": True, **(options or {})}
    return config(world, {"sharding_type": "row_wise"}, "sgd", tasks=tasks, model=own, **changes)


def columns(made, rows=5):
    """What a model might give, labels, and weights of rows in each task."""
    torch.manual_seed(0)
    vectors = any(task.loss.reads_vectors for task in made.tasks)
    logits = torch.randn(rows, sum(made._widths) + 1 + 6 * vectors)
    labels = torch.tensor([[1.0, 0], [0, 1], [1, 1], [0.5, 0], [0, 0]])
    weights = torch.rand(rows, len(made.tasks)) * torch.tensor([1.0] * (rows - 1) + [0.0]).unsqueeze(1)
    return logits, labels, weights


@pytest.mark.parametrize("tasks", CASES.values(), ids=CASES)
def test_it_is_added_for_the_rows_of_its_task(tasks):
    made = objective(tasks, TWO, own_loss=True)
    logits, labels, weights = columns(made)
    rows = torch.tensor([1.0, 1, 1, 1, 0])
    batch = labelled(labels, rows, 4, weights)
    found = total(made.losses(logits, batch))
    place = sum(made._widths)
    without = torch.cat([logits[:, :place], logits[:, place + 1 :]], 1)
    rest = total(Objective(made.tasks).losses(without, batch))
    task = [t.loss.from_model for t in made.tasks]
    if any(task):
        of_task = weights[:, task.index(True)]
        by = 0.5 * torch.tensor([3.0, 0, 3, 0.5, 0]) * of_task
    else:
        by = rows
    expected = (logits[:, place] * by).sum() / 4
    assert float(found - rest) == pytest.approx(float(expected), rel=1e-5) != 0
    for each in made.outputs(found, logits, batch).tasks.values():
        assert torch.isfinite(each.predictions).all() and each.predictions.shape == (5,)


@pytest.mark.parametrize("tasks", CASES.values(), ids=CASES)
def test_the_reference_has_the_same_definition(tasks):
    made = objective(tasks, TWO, own_loss=True)
    logits, labels, weights = columns(made)
    batch = GlobalBatch(torch.zeros(5, 0), labels, {}, weights)
    expected = loss_of(made.tasks, logits, batch, own_loss=True)
    found = total(made.losses(logits, labelled(labels, task_weights=weights)))
    assert float(found) == pytest.approx(float(expected))


def parity(rank, world, tasks, changes):
    import sys

    from raytrec.checks.parity.compare import compare
    from raytrec.worker.build import build_step

    sys.path.insert(0, HERE)
    made = settings(world, tasks, **changes)
    findings = compare(build_step, made, TWO, torch.device("cpu"), rows=12, steps=2)
    return [(f.check, f.name, f.error) for f in findings if not f.error <= f.limit], len(findings)


@pytest.mark.parametrize(
    "world,case,changes",
    [(2, "by its weights", {"activation_checkpointing": True}), (2, "with vectors", {"on_nan": "skip"})],
)
def test_ranks_learn_what_one_process_does(world, case, changes):
    wrong, count = on_ranks(world, parity, CASES[case], changes)[0]
    assert count > 10 and not wrong


def evaluated(rank, world):
    import sys

    from small import batches, train

    sys.path.insert(0, HERE)
    step = build(settings(world, CASES["for a task"], ema=0.5), TWO)
    _, local = batches(2, rank, world, schema=TWO)
    trained = train(step, local)
    seen = list(step.evaluate(iter(local)))
    return float(trained[0].loss), float(seen[0].loss), seen[0]["y"].predictions.shape


def test_evaluations_have_no_such_loss():
    ((trained, seen, shape),) = on_ranks(1, evaluated)
    assert trained > 0 and seen == 0 and shape == (12,)


@pytest.mark.parametrize(
    "tasks,options,message",
    [
        ([{"loss": "from_model"}], {"gives_loss": False}, "gives none"),
        ([{"loss": "from_model"}], {"name": "dlrm"}, "model.name=dlrm, as it is set, gives none"),
        ([LEFT, {"name": "b", "loss": "from_model"}], {}, "two tasks leave their loss to the model"),
    ],
)
def test_a_task_without_a_loss_needs_a_model_that_gives_one(tasks, options, message):
    values = settings(1, tasks).model_dump(by_alias=True)
    model = {"name": "dlrm"} if options.get("name") else values["model"] | options
    with pytest.raises(ConfigError, match=message):
        Objective.of(load_config(values | {"model": model}), TWO)
