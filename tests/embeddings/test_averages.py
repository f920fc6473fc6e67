"""Averages of dense weights (train.ema): their formula, evaluation, saving and restoring."""

import checkpoints
import pytest
import torch
from ranks import on_ranks
from small import batches, build, config, train

from raytrec.checkpoint.restore import load
from raytrec.checkpoint.state import LogicalState, is_average
from raytrec.embeddings.optim import find_dense_average

ROWS = {"sharding_type": "row_wise"}
DECAY = 0.7


def dense(step):
    """Return a copy of the current dense weights."""
    named = dict(step.model.named_parameters())
    return {n: p.detach().clone() for n, p in named.items() if "embedding_bags" not in n}


def formula(history):
    """Σ d^(t−i) · w_i ÷ Σ d^(t−i), in float64."""
    factors = [DECAY ** (len(history) - 1 - i) for i in range(len(history))]
    return {
        name: sum(f * w[name].double() for f, w in zip(factors, history, strict=True)) / sum(factors)
        for name in history[0]
    }


def followed(rank, world, steps, optimizer, spoiled):
    """Return (averages, expected averages, count) after some steps; the loss of batch `spoiled` is NaN."""
    settings = config(world, ROWS, ema=DECAY, on_nan="skip", max_grad_norm=0.5)
    settings.optim.dense.name = optimizer
    step, local = build(settings), batches(steps, rank, world)[1]
    if spoiled is not None:
        local[spoiled].dense.fill_(float("nan"))
    history = []
    for number, _ in enumerate(step.train(iter(local), steps)):
        if number != spoiled:
            history.append(dense(step))
    average = find_dense_average(step.optimizer)
    return average.values, formula(history), int(average.count)


@pytest.mark.parametrize("world,optimizer,spoiled", [(1, "sgd", None), (2, "adam", None), (2, "sgd", 2)])
def test_dense_average_matches_its_formula(world, optimizer, spoiled):
    for values, expected, count in on_ranks(world, followed, 6, optimizer, spoiled):
        assert count == (6 if spoiled is None else 5), "skipped steps are not counted"
        for name, value in values.items():
            torch.testing.assert_close(value.double(), expected[name], rtol=1e-6, atol=1e-7)


def logits_of(step, batch):
    """Return the logits of an evaluation of one batch."""
    (outputs,) = step.evaluate(iter([batch]))
    return outputs["y"].logits


def evaluated(rank, world):
    """Return evaluation logits with averages, with averages copied into the weights, and with raw weights."""
    step, local = build(config(world, ROWS, ema=DECAY)), batches(5, rank, world)[1]
    untrained = logits_of(step, local[4])
    train(step, local[:4])
    before = dense(step)
    logits = logits_of(step, local[4])
    unchanged = all(torch.equal(weight, before[name]) for name, weight in dense(step).items())
    assert unchanged, "an evaluation does not change the weights"
    averages = find_dense_average(step.optimizer).values
    with pytest.raises(ValueError, match="stop"):
        for _ in step.evaluate(iter(local[4:])):
            raise ValueError("stop")
    assert all(torch.equal(weight, before[name]) for name, weight in dense(step).items())

    other = build(config(world, ROWS))
    assert torch.equal(untrained, logits_of(other, local[4]))
    train(other, local[:4])
    raw = logits_of(other, local[4])
    with torch.no_grad():
        for name, parameter in other.model.named_parameters():
            if name in averages:
                parameter.copy_(averages[name])
    return logits, logits_of(other, local[4]), raw


@pytest.mark.parametrize("world", [1, 2])
def test_evaluation_uses_averaged_weights(world):
    for logits, expected, raw in on_ranks(world, evaluated):
        assert torch.equal(logits, expected)
        assert not torch.allclose(logits, raw, atol=1e-5)


def saved(rank, world, root):
    step = build(config(world, ROWS, ema=DECAY))
    train(step, batches(3, rank, world)[1])
    checkpoints.save(root, step, 3)


def warm(rank, world, root):
    """Return (count, averages, weights) after one step of a run that starts with a checkpoint's weights."""
    step = build(config(world, ROWS, ema=DECAY))
    state = LogicalState(step.model, step.optimizer, with_optimizer=False)
    load(f"{root}/step-{3:010d}", {n: v for n, v in state.tensors().items() if not is_average(n)})
    state.written()
    train(step, batches(1, rank, world)[1])
    average = find_dense_average(step.optimizer)
    return int(average.count), average.values, dense(step)


def test_warm_start_resets_the_average(tmp_path):
    on_ranks(2, saved, str(tmp_path))
    count, values, weights = on_ranks(1, warm, str(tmp_path))[0]
    assert count == 1
    for name, value in values.items():
        torch.testing.assert_close(value, weights[name], rtol=1e-6, atol=0)
