"""Losses that a model gives itself: which column they are, which rows they count for, on how many ranks."""

from pathlib import Path

import pytest
import torch
from ranks import on_ranks
from small import SCHEMA, build, config

from raytrec.checks.parity.losses import loss_of
from raytrec.checks.parity.reference import GlobalBatch
from raytrec.common.errors import ConfigError
from raytrec.config.run_config import load_config
from raytrec.tasks.objective import Objective, total
from raytrec.tasks.task import resolve_tasks

HERE = str(Path(__file__).parent)
TWO = SCHEMA.model_copy(update={"labels": ["y", "z"]})
LEFT = {"label": "y", "loss": "from_model", "weight": 0.5, "positive_weight": 3.0}
CASES = {
    "beside a loss": [{"label": "y"}],
    "for a task": [LEFT],
    "by its weights": [LEFT | {"divisor": "weights", "mask": "z"}, {"label": "z", "loss": "mse"}],
    "beside vectors": [{"label": "z"}, LEFT, {"name": "third", "label": "y", "loss": "in_batch_softmax"}],
}


def settings(world, tasks, options=None, **changes):
    values = config(world, {"sharding_type": "row_wise"}, "sgd", **changes).model_dump(by_alias=True)
    own = {"name": "own_parts:Auxiliary", "gives_loss": True, **(options or {})}
    return load_config(values | {"tasks": tasks, "model": own})


def columns(made, rows=5):
    """What a model might give, labels, and weights of rows in each task."""
    torch.manual_seed(0)
    vectors = any(task.loss.reads_vectors for task in made.tasks)
    logits = torch.randn(rows, sum(made._widths) + 1 + 6 * vectors)
    labels = torch.tensor([[1.0, 0], [0, 1], [1, 1], [0.5, 0], [0, 0]])
    weights = torch.rand(rows, len(made.tasks)) * torch.tensor([1.0] * (rows - 1) + [0.0]).unsqueeze(1)
    return logits, labels, weights


@pytest.mark.parametrize("tasks", CASES.values(), ids=CASES)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_it_is_added_for_the_rows_of_its_task(tasks, reduction):
    made = Objective(resolve_tasks(settings(1, tasks).tasks, TWO), reduction, own_loss=True)
    logits, labels, weights = columns(made)
    rows = torch.tensor([1.0, 1, 1, 1, 0])
    found = total(made.losses(logits, labels, rows, 4, weights))
    place = sum(made._widths)
    without = torch.cat([logits[:, :place], logits[:, place + 1 :]], 1)
    rest = total(Objective(made.tasks, reduction).losses(without, labels, rows, 4, weights))
    task = [t.loss.from_model for t in made.tasks]
    if any(task):
        of_task = weights[:, task.index(True)]
        by = 0.5 * torch.tensor([3.0, 0, 3, 0.5, 0]) * of_task
        divisor = of_task.sum() if "divisor" in tasks[0] else 4
    else:
        by, divisor = rows, 4
    expected = (logits[:, place] * by).sum() / (divisor if reduction == "mean" else 1)
    assert float(found - rest) == pytest.approx(float(expected), rel=1e-5) != 0
    scores = made.predictions(logits)
    assert all(torch.isfinite(values).all() and values.shape == (5,) for values in scores.values())


@pytest.mark.parametrize("tasks", CASES.values(), ids=CASES)
def test_the_reference_has_the_same_definition(tasks):
    made = Objective(resolve_tasks(settings(1, tasks).tasks, TWO), own_loss=True)
    logits, labels, weights = columns(made)
    batch = GlobalBatch(torch.zeros(5, 0), labels, {}, weights)
    expected = loss_of(made.tasks, "mean", logits, batch, batch, own_loss=True)
    assert float(total(made.losses(logits, labels, torch.ones(5), 5, weights))) == pytest.approx(
        float(expected)
    )


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
    [(2, "by its weights", {"micro_batches": 3}), (2, "beside vectors", {"on_nan": "skip"})],
)
def test_ranks_and_micro_batches_learn_what_one_process_does(world, case, changes):
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
    "tasks,options,says",
    [
        ([{"loss": "from_model"}], {"gives_loss": False}, "gives none"),
        ([{"loss": "from_model"}], {"name": "dlrm"}, "model.name=dlrm, as it is set, gives none"),
        ([LEFT, {"name": "b", "loss": "from_model"}], {}, "two tasks leave their loss to the model"),
    ],
)
def test_somebody_has_to_give_it(tasks, options, says):
    values = settings(1, tasks).model_dump(by_alias=True)
    model = {"name": "dlrm"} if options.get("name") else values["model"] | options
    with pytest.raises(ConfigError, match=says):
        Objective.of(load_config(values | {"model": model}), TWO)
