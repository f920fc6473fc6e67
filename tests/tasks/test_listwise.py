"""Losses that compare the candidates of requests, and learned temperatures, against loops by hand."""

import math
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from ranks import run_on_ranks
from small import batch_of_labels, make_objective
from standin import use_stand_in_gpu

from raytrec.data.batch import Batch
from raytrec.tasks import global_batch
from raytrec.tasks.losses import Rows, loss
from raytrec.tasks.objective import total

LISTWISE = {"loss": "listwise_softmax", "options": {"temperature": 0.5, "learn_temperature": True}}
# Candidates per request: none, one, several without and with positives. Labels and weights follow.
COUNTS = [3, 0, 1, 2, 4, 1, 0, 3, 2]
LABELS = [0, 1, 0, 1, 0, 0, 1, 0, 1, 0, 0, 1, 1, 1, 0, 1]
WEIGHTS = [1, 2, 1, 1, 1, 1, 0.5, 1, 1, 0, 3, 1, 0, 1, 1, 1]
SPLITS = {1: [0, 9], 2: [0, 2, 9], 3: [0, 1, 2, 9]}  # with three ranks, rank 1 has no candidate


def make_logits(width):
    return torch.randn(16, width, generator=torch.Generator().manual_seed(1)).squeeze(1)


def softmax_of_list(scores, labels, weights, i):
    """Return the loss of row i of a list."""
    others = [scores[j] for j in range(len(scores)) if weights[j] > 0]
    return labels[i] * (torch.stack(others).exp().sum().log() - scores[i]) if weights[i] else 0 * scores[i]


def bpr_of_list(scores, labels, weights, i):
    """Return the loss of row i of a list."""
    lower = [j for j in range(len(scores)) if labels[j] < labels[i]]
    terms = [weights[j] * (1 + (scores[j] - scores[i]).exp()).log() for j in lower]
    return sum(terms) / sum(weights[j] for j in lower) if any(weights[j] for j in lower) else 0 * scores[i]


def in_batch_of_list(vectors, labels, weights, i):
    """Return the in-batch softmax loss of row i."""
    d = vectors.shape[1] // 2
    return softmax_of_list(vectors[:, d:] @ vectors[i, :d], labels, weights, i)


def compute_by_hand(task, logits, log_temperature, lists):
    """Return the loss of the global batch."""
    temperature = task.get("options", {}).get("temperature", 1) * log_temperature.exp()
    per_row = {"bpr": bpr_of_list, "listwise_softmax": softmax_of_list, "in_batch_softmax": in_batch_of_list}
    value, start = 0, 0
    for count in lists:
        rows = slice(start, start + count)
        scores, labels, weights = logits[rows].double(), LABELS[rows], WEIGHTS[rows]
        if task["loss"] == "in_batch_softmax":
            scores = torch.cat([scores[:, :2] / temperature, scores[:, 2:]], 1)
        elif task["loss"] == "listwise_softmax":
            scores = scores / temperature
        value += sum(weights[i] * per_row[task["loss"]](scores, labels, weights, i) for i in range(count))
        start += count
    return value / len(LABELS)


def run_requests(rank, world, task, blocks):
    """Return this rank's loss, its gradients for logits and log temperature, and the number of gathers."""
    limits = {"MAX_BLOCK_ROWS": {"cpu": blocks}, "MAX_PAIRS_AT_ONCE": {"cpu": blocks}}
    gather = patch.object(dist, "all_gather_into_tensor", wraps=dist.all_gather_into_tensor)
    with patch.multiple(global_batch, **limits), gather as gathers:
        return *compute_rank_loss(rank, world, task), gathers.call_count


def compute_rank_loss(rank, world, task, device="cpu"):
    """Return this rank's loss, and its gradients for logits and log temperature."""
    first, last = SPLITS[world][rank : rank + 2]
    starts = [0, *torch.tensor(COUNTS).cumsum(0).tolist()]
    rows = slice(starts[first], starts[last])
    logits = make_logits(4 if task["loss"] == "in_batch_softmax" else 1)[rows].to(device).requires_grad_()
    longest = max(b - a for a, b in zip(SPLITS[world], SPLITS[world][1:], strict=False))
    batch = Batch(
        None,
        None,
        torch.tensor(LABELS[rows], dtype=torch.float32).unsqueeze(1),
        (torch.arange(longest) < last - first).float(),
        len(COUNTS),
        task_weights=torch.tensor(WEIGHTS[rows], dtype=torch.float32).unsqueeze(1),
        keys=torch.arange(longest).unsqueeze(1) if "group" in task else None,
        requests=torch.arange(last - first).repeat_interleave(torch.tensor(COUNTS[first:last])),
    )
    log_temperatures = torch.full((1,), -0.3, device=device, requires_grad=True)
    batch = batch.to(torch.device(device))
    value = total(make_objective([task], world=world).losses(logits, batch, None, log_temperatures))
    grad, scale = torch.autograd.grad(value, [logits, log_temperatures], allow_unused=True)
    return value.detach(), grad, torch.zeros(1) if scale is None else scale


TASKS = {
    "bpr": {"loss": "bpr"},
    "bpr with groups of metrics": {"loss": "bpr", "group": "user"},
    "listwise_softmax": LISTWISE,
    "in_batch_softmax": {"loss": "in_batch_softmax", "options": {"temperature": 0.7, "learn_temperature": True}},
}


@pytest.mark.parametrize("world,blocks", [(1, 1000), (1, 3), (2, 1000), (3, 5)])
@pytest.mark.parametrize("name", TASKS)
def test_candidates_are_compared_like_a_loop_by_hand(name, world, blocks):
    task = TASKS[name]
    parts = run_on_ranks(world, run_requests, task, blocks) if world > 1 else [run_requests(0, 1, task, blocks)]
    logits = make_logits(4 if name == "in_batch_softmax" else 1).requires_grad_()
    log_temperature = torch.full((1,), -0.3, requires_grad=True)
    expected = compute_by_hand(task, logits, log_temperature, [16] if name == "in_batch_softmax" else COUNTS)
    expected.sum().backward()
    scale = torch.zeros(1) if log_temperature.grad is None or name.startswith("bpr") else log_temperature.grad
    values, grads, scales, gathers = zip(*parts, strict=True)
    assert set(gathers) == {int(name == "in_batch_softmax" and world > 1)}
    assert sum(values).item() / world == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(torch.cat(grads) / world, logits.grad, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(sum(scales) / world, scale, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["bpr", "listwise_softmax"])
def test_gpus_compare_candidates_without_waits(name):
    expected = compute_rank_loss(0, 1, TASKS[name])
    with use_stand_in_gpu() as gpu:
        found = compute_rank_loss(0, 1, TASKS[name], "cuda")
        assert not [wait for wait in gpu.waits if any("raytrec/tasks" in caller for caller in wait.callers)]
        for value, other in zip(found, expected, strict=True):
            torch.testing.assert_close(value.cpu(), other)


def test_listwise_softmax_matches_its_formula():
    made = loss.parts["listwise_softmax"](temperature=0.5)
    scores, labels = torch.tensor([1.0, 0.0, 2.0, 5.0, 7.0, 90.0]), torch.tensor([1.0, 0.0, 0.5, 1.0, 1.0, 0.0])
    rows = Rows(scores, labels, torch.tensor([1.0, 1.0, 3.0, 1.0, 0.0, 0.0]), torch.tensor([9, 9, 9, -4, 2, 2]))
    e = math.exp
    lists = e(2) + 1 + e(4)
    expected = [math.log(lists / e(2)), 0, 0.5 * math.log(lists / e(4)), 0, 0, 0]
    assert made.of_batch(rows, slice(0, 6)).tolist() == pytest.approx(expected, abs=1e-6)
    assert made.of_batch(rows, slice(2, 4)).tolist() == pytest.approx(expected[2:4], abs=1e-6)
    single = made.of_batch(rows._replace(keys=None), slice(3, 4)).item()
    assert single == pytest.approx(math.log((lists + e(10)) / e(10)), rel=1e-4)
    far = torch.tensor([300.0, -300.0], requires_grad=True)
    losses = made.of_batch(Rows(far, torch.tensor([0.0, 1.0]), torch.ones(2)), slice(0, 2))
    (grad,) = torch.autograd.grad(losses.sum(), far)
    assert losses.tolist() == [0, 1200] and grad.tolist() == [2, -2]


def test_temperatures_do_not_change_predictions_and_follow_their_tasks():
    made = make_objective([{"name": "a"}, LISTWISE | {"name": "b"}, LISTWISE | {"name": "c"}])
    logits, batch = torch.randn(4, 3), batch_of_labels(torch.tensor([1.0, 0.0, 1.0, 0.0]))
    log_temperatures = torch.tensor([0.2, -0.7])
    given = made.losses(logits, batch, None, log_temperatures)
    scaled = made.losses(logits * torch.tensor([1.0, math.exp(-0.2), math.exp(0.7)]), batch)
    assert {name: part.item() for name, part in given.items()} == pytest.approx(
        {name: part.item() for name, part in scaled.items()}, rel=1e-6
    )
    assert torch.equal(made.predictions(logits)["c"], logits[:, 2])
