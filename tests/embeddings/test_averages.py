"""Averages of dense weights (train.ema): their formula, evaluation, saving and restoring."""

import checkpoints
import pytest
import torch
from ranks import run_on_ranks
from small import build_step_on_rank, make_batches, make_small_config, train_step

from raytrec.checkpoint.state import LogicalState, is_average
from raytrec.checkpoint.storage import load
from raytrec.embeddings.optim import find_dense_average

ROWS = {"sharding_type": "row_wise"}
DECAY = 0.7


def copy_dense_weights(step):
    """Return a copy of the current dense weights."""
    named = dict(step.model.named_parameters())
    return {n: p.detach().clone() for n, p in named.items() if "embedding_bags" not in n}


def compute_average(history):
    """Σ d^(t−i) · w_i ÷ Σ d^(t−i), in float64."""
    factors = [DECAY ** (len(history) - 1 - i) for i in range(len(history))]
    return {
        name: sum(f * w[name].double() for f, w in zip(factors, history, strict=True)) / sum(factors)
        for name in history[0]
    }


def train_with_average(rank, world, steps, optimizer, spoiled):
    """Return (averages, expected averages, count) after some steps; the loss of batch `spoiled` is NaN."""
    settings = make_small_config(world, ROWS, ema=DECAY, on_nan="skip", max_grad_norm=0.5)
    settings.optim.dense.name = optimizer
    step, local = build_step_on_rank(settings), make_batches(steps, rank, world)[1]
    if spoiled is not None:
        local[spoiled].dense.fill_(float("nan"))
    history = []
    for number, _ in enumerate(step.train(iter(local), steps)):
        if number != spoiled:
            history.append(copy_dense_weights(step))
    average = find_dense_average(step.optimizer)
    return average.values, compute_average(history), int(average.count)


@pytest.mark.parametrize("world,optimizer,spoiled", [(1, "sgd", None), (2, "adam", None), (2, "sgd", 2)])
def test_dense_average_matches_its_formula(world, optimizer, spoiled):
    for values, expected, count in run_on_ranks(world, train_with_average, 6, optimizer, spoiled):
        assert count == (6 if spoiled is None else 5), "skipped steps are not counted"
        for name, value in values.items():
            torch.testing.assert_close(value.double(), expected[name], rtol=1e-6, atol=1e-7)


def evaluate_logits(step, batch):
    """Return the logits of an evaluation of one batch."""
    (outputs,) = step.evaluate(iter([batch]))
    return outputs["y"].logits


def compare_evaluations(rank, world):
    """Return evaluation logits with averages, with averages copied into the weights, and with raw weights."""
    step, local = (build_step_on_rank(make_small_config(world, ROWS, ema=DECAY)), make_batches(5, rank, world)[1])
    untrained = evaluate_logits(step, local[4])
    train_step(step, local[:4])
    before = copy_dense_weights(step)
    logits = evaluate_logits(step, local[4])
    unchanged = all(torch.equal(weight, before[name]) for name, weight in copy_dense_weights(step).items())
    assert unchanged, "an evaluation does not change the weights"
    averages = find_dense_average(step.optimizer).values
    with pytest.raises(ValueError, match="stop"):
        for _ in step.evaluate(iter(local[4:])):
            raise ValueError("stop")
    assert all(torch.equal(weight, before[name]) for name, weight in copy_dense_weights(step).items())

    other = build_step_on_rank(make_small_config(world, ROWS))
    assert torch.equal(untrained, evaluate_logits(other, local[4]))
    train_step(other, local[:4])
    raw = evaluate_logits(other, local[4])
    with torch.no_grad():
        for name, parameter in other.model.named_parameters():
            if name in averages:
                parameter.copy_(averages[name])
    return logits, evaluate_logits(other, local[4]), raw


@pytest.mark.parametrize("world", [1, 2])
def test_evaluation_uses_averaged_weights(world):
    for logits, expected, raw in run_on_ranks(world, compare_evaluations):
        assert torch.equal(logits, expected)
        assert not torch.allclose(logits, raw, atol=1e-5)


def train_and_save(rank, world, root):
    step = build_step_on_rank(make_small_config(world, ROWS, ema=DECAY))
    train_step(step, make_batches(3, rank, world)[1])
    checkpoints.save_checkpoint(root, step, 3)


def run_warm_start(rank, world, root):
    """Return (count, averages, weights) after one step of a run that starts with a checkpoint's weights."""
    step = build_step_on_rank(make_small_config(world, ROWS, ema=DECAY))
    state = LogicalState(step.model, step.optimizer, with_optimizer=False)
    load(f"{root}/step-{3:010d}", {n: v for n, v in state.tensors().items() if not is_average(n)})
    state.refresh_kernels()
    train_step(step, make_batches(1, rank, world)[1])
    average = find_dense_average(step.optimizer)
    return int(average.count), average.values, copy_dense_weights(step)


def test_warm_start_resets_the_average(tmp_path):
    run_on_ranks(2, train_and_save, str(tmp_path))
    count, values, weights = run_on_ranks(1, run_warm_start, str(tmp_path))[0]
    assert count == 1
    for name, value in values.items():
        torch.testing.assert_close(value, weights[name], rtol=1e-6, atol=0)
