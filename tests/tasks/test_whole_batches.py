"""Losses summed over the global batch, and losses that compare rows of all ranks."""

import math
import re
from contextlib import ExitStack
from unittest.mock import patch

import pytest
import torch
from ranks import run_on_ranks
from small import batch_of_labels, build_step_on_rank, make_batches, make_objective, make_small_config, train_step
from standin import use_stand_in_gpu

from raytrec.common.errors import ConfigError, RunError
from raytrec.tasks import global_batch
from raytrec.tasks.losses import Rows, loss
from raytrec.tasks.objective import Objective, total

INF = float("inf")
X, Y = torch.tensor([0.5, -2.0, 3.0]), torch.tensor([1.0, 0.0, 1.0])


def compute_row_losses(name, logits, labels, **options):
    return loss.parts[name](**options).of_rows(logits, labels).tolist()


def test_row_losses_match_their_formulas():
    p = [1 / (1 + math.exp(-x)) for x in X.tolist()]
    right = [p[0], 1 - p[1], p[2]]
    factor = [0.25, 0.75, 0.25]
    expected = [-a * (1 - r) ** 1.5 * math.log(r) for a, r in zip(factor, right, strict=True)]
    assert compute_row_losses("focal", X, Y, gamma=1.5, alpha=0.25) == pytest.approx(expected, rel=1e-5)
    assert compute_row_losses("focal", X, Y, gamma=0) == pytest.approx([-math.log(r) for r in right], rel=1e-5)
    assert compute_row_losses("huber", X, Y, delta=1.0) == pytest.approx([0.125, 1.5, 1.5])
    assert compute_row_losses("huber", X, Y, delta=0.1) == pytest.approx([0.045, 0.195, 0.195])
    counts = torch.tensor([0.0, 2.0, 7.0])
    assert compute_row_losses("poisson", X, counts) == pytest.approx(
        [math.exp(x) - y * x for x, y in zip(X.tolist(), counts.tolist(), strict=True)], rel=1e-6
    )
    classes = torch.tensor([[1.0, 2.0, 0.0], [0.0, 0.0, 0.0]])
    total = math.e + math.e**2 + 1
    assert compute_row_losses("cross_entropy", classes, torch.tensor([2.0, 1.0]), classes=3) == pytest.approx(
        [math.log(total), math.log(3)]
    )


def test_extreme_logits_have_finite_losses():
    far = torch.tensor([-200.0, 200.0], requires_grad=True)
    for name in ("bce", "focal"):
        losses = loss.parts[name]().of_rows(far, torch.tensor([1.0, 0.0]))
        (grad,) = torch.autograd.grad(losses.sum(), far)
        assert losses.isfinite().all() and grad.tolist() == pytest.approx([-1.0, 1.0])


def test_bpr_compares_pairs_within_groups():
    scores, labels = torch.tensor([1.0, 0.0, 2.0, 5.0, 1.0]), torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0])
    weights, keys = torch.tensor([1.0, 1.0, 3.0, 1.0, 1.0]), torch.tensor([7, 7, 7, 8, 8])

    def soft(x):
        return math.log1p(math.exp(x))

    bpr = loss.parts["bpr"]()
    rows = Rows(scores, labels, weights, keys)
    expected = [(soft(-1) + 3 * soft(1)) / 4, 0, 0, 0, soft(4)]
    assert bpr.of_batch(rows, slice(0, 5)).tolist() == pytest.approx(expected)
    assert bpr.of_batch(rows, slice(3, 5)).tolist() == pytest.approx(expected[3:])
    everyone = bpr.of_batch(rows._replace(keys=None), slice(4, 5)).tolist()
    assert everyone == pytest.approx([(soft(-1) + 3 * soft(1) + soft(4)) / 5])
    skipped = bpr.of_batch(rows._replace(weights=torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0])), slice(0, 5))
    assert skipped.tolist() == pytest.approx([soft(-1), 0, 0, 0, 0])


def test_in_batch_softmax_matches_its_formula():
    made = loss.parts["in_batch_softmax"](temperature=0.5)
    query = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    item = torch.tensor([[2.0, 0.0], [0.0, 1.0], [2.0, 0.0]])
    vectors, labels = torch.cat([query, item], 1), torch.tensor([1.0, 1.0, 0.0])
    rows = Rows(vectors, labels, torch.ones(3))
    e = math.exp
    expected = [math.log((2 * e(4) + 1) / e(4)), math.log((2 + e(2)) / e(2)), 0]
    assert made.of_batch(rows, slice(0, 3)).tolist() == pytest.approx(expected, rel=1e-5)
    # The third row has the item of the first row; equal items and rows without weight are excluded.
    for others in ({"keys": torch.tensor([4, 5, 4])}, {"weights": torch.tensor([1.0, 1.0, 0.0])}):
        found = made.of_batch(rows._replace(**others), slice(0, 1)).tolist()
        assert found == pytest.approx([math.log((e(4) + 1) / e(4))], rel=1e-5)
    assert made.scores(vectors).tolist() == [2.0, 1.0, 2.0]
    # Item counts 2, 1 and 4 divide the exponentiated scores; a count of 0 is treated as 1.
    often = made.of_batch(rows._replace(counts=torch.tensor([2, 0, 4])), slice(0, 2)).tolist()
    of_first, of_second = e(4) / 2 + 1 + e(4) / 4, 1 / 2 + e(2) + 1 / 4
    assert often == pytest.approx([math.log(of_first / (e(4) / 2)), math.log(of_second / e(2))], rel=1e-5)


@pytest.mark.parametrize("device,pieces", [("cpu", 4), ("cuda", 2)])
def test_gpu_compares_more_pairs_at_once(device, pieces, monkeypatch):
    monkeypatch.setattr(global_batch, "MAX_PAIRS_AT_ONCE", {"cpu": 16, "cuda": 32})
    made, found = loss.parts["bpr"](), []

    def piece(rows, own):
        found.append(own)
        return type(made).of_batch(made, rows, own)

    logits, labels = torch.randn(8), (torch.arange(8) % 2).float()
    expected = made.of_batch(Rows(logits, labels, torch.ones(8)), slice(0, 8)).sum()
    with use_stand_in_gpu(), patch.object(made, "of_batch", piece):
        given = Rows(logits.to(device).requires_grad_(), labels.to(device), torch.ones(8, device=device))
        value = global_batch.compute_batch_loss(made, given, torch.ones(8, device=device), 1)
        assert float(value) == pytest.approx(float(expected)) and len(found) == pieces


def test_loss_is_divided_by_global_batch_rows():
    made = make_objective([{"loss": "mse", "sample_weight": "w"}])
    weights = torch.tensor([[0.5], [0.0], [2.0]])
    found = total(made.losses(X, batch_of_labels(Y, rows=8, task_weights=weights)))
    assert float(found) == pytest.approx((0.5 * 0.25 + 2 * 4) / 8)
    assert float(total(made.losses(X, batch_of_labels(Y, rows=8, task_weights=0 * weights)))) == 0


def test_positive_weight_changes_only_the_loss():
    made = make_objective([{"positive_weight": 3.0}])
    plain = make_objective([{}])
    batch = batch_of_labels(Y, torch.tensor([1.0, 1.0, 0.0]))
    bce = loss.parts["bce"]().of_rows(X, Y)
    assert float(total(made.losses(X, batch))) == pytest.approx(float(3 * bce[0] + bce[1]) / 3)
    outputs = made.outputs(total(plain.losses(X, batch)), X, batch)
    assert outputs["y"].weights.tolist() == [1, 1, 0]


def test_down_sampled_negatives_are_corrected():
    made = make_objective([{"negatives_kept": 0.1}])
    p = X.sigmoid()
    expected = p / (p + (1 - p) / 0.1)
    outputs = made.outputs(torch.zeros(()), X, batch_of_labels(Y))
    torch.testing.assert_close(outputs["y"].predictions, expected)
    torch.testing.assert_close(outputs["y"].logits.sigmoid(), expected)
    same = total(make_objective([{}]).losses(X, batch_of_labels(Y)))
    assert torch.equal(total(made.losses(X, batch_of_labels(Y))), same)


MIXED = [
    {"name": "kind", "loss": "cross_entropy", "options": {"classes": 3}},
    {"name": "near", "loss": "in_batch_softmax"},
    {"name": "click"},
]


def test_outputs_are_split_into_task_columns():
    made = make_objective(MIXED)
    logits, labels = torch.randn(3, 3 + 1 + 4), torch.tensor([[0.0], [1.0], [1.0]])
    weights = torch.tensor([[1.0, 0.0, 0.5], [1.0, 1.0, 1.0], [0.0, 1.0, 1.0]])
    outputs = made.outputs(torch.zeros(()), logits, batch_of_labels(labels, task_weights=weights))
    torch.testing.assert_close(outputs["kind"].predictions, logits[:, :3].softmax(1))
    assert torch.equal(outputs["click"].logits, logits[:, 3])
    torch.testing.assert_close(outputs["near"].logits, (logits[:, 4:6] * logits[:, 6:]).sum(1))
    for place, task in enumerate(outputs.tasks.values()):
        assert torch.equal(task.weights, weights[:, place])
    assert list(outputs.tasks) == ["kind", "near", "click"]
    for columns in ([], [3], [4], [7]):
        with pytest.raises(ConfigError, match=re.escape(f"{[3, *columns]} for 3 tasks")):
            total(made.losses(torch.zeros(3, *columns), batch_of_labels(labels)))
    with pytest.raises(ConfigError, match=r"\[3, 2\] for 1 task"):
        total(make_objective([{}]).losses(torch.zeros(3, 2), batch_of_labels(labels)))


def test_outputs_name_keys_by_their_columns():
    made = make_objective([{"group": "user", "item": "film"}])
    keys = torch.tensor([[1, 2], [3, 4], [5, 6]])
    outputs = made.outputs(torch.zeros(()), X, batch_of_labels(Y, keys=keys))
    assert {name: values.tolist() for name, values in outputs["y"].keys.items()} == {
        "user": [1, 3, 5],
        "film": [2, 4, 6],
    }
    sliced = Objective(made.tasks, keys=["user", "film", "country"])  # training reads no slices
    outputs = sliced.outputs(torch.zeros(()), X, batch_of_labels(Y, keys=keys))
    assert list(outputs["y"].keys) == ["user", "film"]


def read_torchrec_switches(rank, world):
    """Return TorchRec's process-wide switches after training, and the error if one was off before."""
    from torchrec.distributed import comm_ops

    plan = {"sharding_type": "row_wise"}
    train_step(build_step_on_rank(make_small_config(world, plan, max_grad_norm=0.1)), make_batches(2, rank, world)[1])
    after = comm_ops.get_gradient_division(), comm_ops.get_use_sync_collectives()
    comm_ops.set_gradient_division(False)
    try:
        build_step_on_rank(make_small_config(world, plan))
    except RunError as error:
        return after, str(error)
    finally:
        comm_ops.set_gradient_division(True)


def test_torchrec_switches_are_kept_and_checked():
    for after, message in run_on_ranks(2, read_torchrec_switches):
        assert after == (True, False)  # TorchRec's defaults
        assert "gradient division is disabled" in message


COLLECTIVES = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_single")


def count_collectives(rank, world, task):
    """Return the numbers of calls of COLLECTIVES by a loss, its value and its gradient."""
    import torch.distributed as dist

    logits, keys = (X + rank).requires_grad_(), torch.tensor([[1], [1], [2]]) if task.get("group") else None
    with ExitStack() as stack:
        calls = [stack.enter_context(patch.object(dist, name, wraps=getattr(dist, name))) for name in COLLECTIVES]
        made = make_objective([task], world=world)
        found = total(made.losses(logits, batch_of_labels(Y, rows=3 * world, keys=keys)))
        (grad,) = torch.autograd.grad(found, logits)
    return tuple(call.call_count for call in calls), found.item(), grad


@pytest.mark.parametrize(
    "task,expected", [({}, (0, 0, 0)), ({"loss": "bpr"}, (0, 1, 1)), ({"loss": "bpr", "group": "g"}, (0, 2, 1))]
)
def test_only_batch_losses_use_collectives(task, expected):
    everyone = run_on_ranks(2, count_collectives, task)
    logits = torch.cat([X, X + 1]).requires_grad_()
    keys = torch.tensor([[1], [1], [2]] * 2) if task.get("group") else None
    whole = total(make_objective([task]).losses(logits, batch_of_labels(Y.repeat(2), keys=keys)))
    whole.backward()
    for rank, (calls, _, grad) in enumerate(everyone):
        assert calls == expected
        torch.testing.assert_close(grad / 2, logits.grad[3 * rank : 3 * rank + 3])
    assert sum(value for _, value, _ in everyone) / 2 == pytest.approx(whole.item(), rel=1e-6)


def train_overflowing_rank(rank, world):
    """Train a batch loss with non-finite logits on one rank; return which steps were skipped."""
    local = make_batches(2, rank, world)[1]
    if rank == 0:
        local[0].dense[0, 0] = INF
    step = build_step_on_rank(
        make_small_config(world, {"sharding_type": "row_wise"}, tasks=[{"loss": "bpr"}], on_nan="skip")
    )
    first, second = train_step(step, local)
    finite = all(p.isfinite().all() for p in step.model.module.head.parameters())
    return first.skipped, second.skipped, bool(second.loss.isfinite()), finite


def test_non_finite_step_is_skipped_on_all_ranks():
    assert run_on_ranks(2, train_overflowing_rank) == [(True, False, True, True)] * 2
