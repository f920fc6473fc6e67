"""Losses that a model returns: their column, row weights and ranks; and the training loss metric."""

import sys
from pathlib import Path

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

from raytrec.checks.parity.batches import GlobalBatch
from raytrec.checks.parity.compare import compare
from raytrec.checks.parity.losses import compute_loss
from raytrec.common.errors import ConfigError
from raytrec.config.run_config import load_config
from raytrec.metrics.selection import Selection
from raytrec.metrics.sums import MetricSums
from raytrec.tasks.objective import Objective, total
from raytrec.worker.build import build_step

HERE = str(Path(__file__).parent)
TWO_LABELS = SCHEMA.model_copy(update={"labels": ["y", "z"]})
FROM_MODEL = {"label": "y", "loss": "from_model", "weight": 0.5, "positive_weight": 3.0}
CASES = {
    "with a loss": [{"label": "y"}],
    "for a task": [FROM_MODEL],
    "by its weights": [FROM_MODEL | {"mask": "z"}, {"label": "z", "loss": "mse"}],
    "with vectors": [{"label": "z"}, FROM_MODEL, {"name": "third", "label": "y", "loss": "in_batch_softmax"}],
}


def make_config(world, tasks, options=None, **changes):
    own = {"name": "own_parts:Auxiliary", "gives_loss": True, **(options or {})}
    return make_small_config(world, {"sharding_type": "row_wise"}, "sgd", tasks=tasks, model=own, **changes)


def make_outputs(made, rows=5):
    """Return random model outputs, labels, and row weights per task."""
    torch.manual_seed(0)
    vectors = any(task.loss.reads_vectors for task in made.tasks)
    logits = torch.randn(rows, sum(made._widths) + 1 + 6 * vectors)
    labels = torch.tensor([[1.0, 0], [0, 1], [1, 1], [0.5, 0], [0, 0]])
    weights = torch.rand(rows, len(made.tasks)) * torch.tensor([1.0] * (rows - 1) + [0.0]).unsqueeze(1)
    return logits, labels, weights


@pytest.mark.parametrize("tasks", CASES.values(), ids=CASES)
def test_own_loss_is_weighted_by_the_rows_of_its_task(tasks):
    made = make_objective(tasks, TWO_LABELS, own_loss=True)
    logits, labels, weights = make_outputs(made)
    rows = torch.tensor([1.0, 1, 1, 1, 0])
    batch = batch_of_labels(labels, rows, 4, weights)
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
    by_reference = compute_loss(made.tasks, logits, GlobalBatch(torch.zeros(5, 0), labels, {}, weights), own_loss=True)
    of_five = total(made.losses(logits, batch_of_labels(labels, task_weights=weights)))
    assert float(of_five) == pytest.approx(float(by_reference)), "the parity check has the same loss"


def check_parity(rank, world, tasks, changes):
    sys.path.insert(0, HERE)
    made = make_config(world, tasks, **changes)
    findings = compare(build_step, made, TWO_LABELS, torch.device("cpu"), rows=12, steps=2)
    return [(f.check, f.name, f.error) for f in findings if not f.error <= f.limit], len(findings)


@pytest.mark.slow
@pytest.mark.parametrize(
    "world,case,changes",
    [(2, "by its weights", {"activation_checkpointing": True}), (2, "with vectors", {"on_nan": "skip"})],
)
def test_own_loss_passes_parity_on_several_ranks(world, case, changes):
    wrong, count = run_on_ranks(world, check_parity, CASES[case], changes)[0]
    assert count > 10 and not wrong


def train_and_evaluate(rank, world):
    sys.path.insert(0, HERE)
    step = build_step_on_rank(make_config(world, CASES["for a task"], ema=0.5), TWO_LABELS)
    _, local = make_batches(2, rank, world, schema=TWO_LABELS)
    trained = train_step(step, local)
    seen = list(step.evaluate(iter(local)))
    return float(trained[0].loss), float(seen[0].loss), seen[0]["y"].predictions.shape


def test_evaluation_has_no_own_loss():
    ((trained, seen, shape),) = run_on_ranks(1, train_and_evaluate)
    assert trained > 0 and seen == 0 and shape == (12,)


@pytest.mark.parametrize(
    "tasks,options,message",
    [
        ([{"loss": "from_model"}], {"gives_loss": False}, "computes no loss as configured"),
        ([{"loss": "from_model"}], {"name": "dlrm"}, "model.name=dlrm computes no loss"),
        ([FROM_MODEL, {"name": "b", "loss": "from_model"}], {}, "only one task can use loss: from_model"),
    ],
)
def test_from_model_requires_a_model_with_a_loss(tasks, options, message):
    values = make_config(1, tasks).model_dump(by_alias=True)
    model = {"name": "dlrm"} if options.get("name") else values["model"] | options
    with pytest.raises(ConfigError, match=message):
        Objective.of(load_config(values | {"model": model}), TWO_LABELS)


def collect_training_metrics(rank, world, tasks, changes, spoil=False):
    """Train three steps; return the training metrics and the loss of each step."""
    sys.path.insert(0, HERE)
    made = make_config(world, tasks, **changes)
    _, local = make_batches(3, rank, world, schema=TWO_LABELS)
    if spoil:
        local[1].dense[0, 0] = float("nan")
    step, losses = build_step_on_rank(made, TWO_LABELS), []
    sums = MetricSums(Selection.from_config(made, TWO_LABELS), torch.device("cpu"))
    for outputs in step.train(iter(local), 3):
        sums.add(outputs)
        losses.append(float(outputs.loss))
    return sums.reduce(), losses


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_loss_metric_is_the_mean_of_step_losses(case):
    one, many = (run_on_ranks(world, collect_training_metrics, CASES[case], {}) for world in (1, 2))
    for ranks in (one, many):
        of_ranks = [sum(losses) / 3 for _, losses in ranks]
        assert ranks[0][0]["loss"] == pytest.approx(sum(of_ranks) / len(of_ranks), rel=1e-5) != 0
        mine = {key: value for key, value in ranks[0][0].items() if key.rpartition(".")[2] == "loss"}
        assert mine == pytest.approx({key: one[0][0][key] for key in mine}, rel=1e-5)
        names = {"".join(key.rpartition(".")[:1]) for key in mine} - {""}
        of_tasks = sum(mine[f"{name}.loss"] for name in names)
        if case == "with a loss":  # the sum also includes the model's loss
            assert names == {"y"} and mine["loss"] - of_tasks > 0
        elif case == "for a task":
            assert not names
        else:
            assert len(names) > 1 and mine["loss"] == pytest.approx(of_tasks, rel=1e-6)


def test_task_loss_is_its_weighted_log_loss():
    tasks = [{"label": "y"}, {"label": "z", "weight": 0.5}]
    ((figures, _),) = run_on_ranks(1, collect_training_metrics, tasks, {})
    assert figures["z.loss"] == pytest.approx(0.5 * figures["z.logloss"], rel=1e-5)
    assert figures["y.loss"] == pytest.approx(figures["y.logloss"], rel=1e-5)


def test_loss_metric_ignores_skipped_steps():
    for figures, losses in run_on_ranks(2, collect_training_metrics, CASES["with a loss"], {"on_nan": "skip"}, True):
        assert losses[1] == 0 and losses[0] != 0
        assert figures["rows"] == 24 and figures["loss"] > 0.3
