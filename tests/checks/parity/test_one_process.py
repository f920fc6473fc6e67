"""Comparison of the one-process reference with torch: nn.EmbeddingBag and torch.optim."""

import pytest
import torch
from torch import nn

from raytrec.checks.parity import reference
from raytrec.checks.parity.batches import make_random_batches
from raytrec.config.data import TaskSection
from raytrec.config.schema import Schema
from raytrec.embeddings.optimizers import find_optimizer
from raytrec.tasks.objective import Objective
from raytrec.tasks.task import resolve_tasks

POOLINGS = {
    "sums": ("sum", False),
    "means": ("mean", False),
    "weighted": ("sum", True),
    "weighted_means": ("mean", True),
}
SCHEMA = Schema.parse(
    {
        "labels": ["y"],
        "sparse": {
            name: {"table": "t", "pooling": pooling} | ({"weights": f"{name}_w"} if weighted else {})
            for name, (pooling, weighted) in POOLINGS.items()
        },
        "tables": {"t": {"rows": 11, "dim": 4}},
    },
    "test",
)


class LinearModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 1)

    def forward(self, dense, pooled):
        return self.linear(torch.cat(list(pooled.values()), 1)).squeeze(1)


def make_reference(loss="bce"):
    torch.manual_seed(0)
    objective = Objective(resolve_tasks([TaskSection(loss=loss)], SCHEMA))
    return reference.Reference(SCHEMA, {"t": torch.randn(11, 4)}, LinearModel(), objective=objective)


@pytest.mark.parametrize("feature", POOLINGS)
def test_reference_pooling_matches_embedding_bag(feature):
    """nn.EmbeddingBag has no weighted mean, so its weighted sum is divided by the bag's sum of weights."""
    pooling, weighted = POOLINGS[feature]
    batch = make_random_batches(SCHEMA, 40, 1, seed=2)[0]
    ids, bag, weights = batch.bags[feature]
    lengths = torch.bincount(bag, minlength=40)
    assert (lengths == 0).any() and (lengths > 1).any()
    one = make_reference()
    theirs = nn.EmbeddingBag.from_pretrained(
        one.tables["t"].detach().clone(), freeze=False, mode="sum" if weighted else pooling
    )
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)[:-1]])
    expected = theirs(ids, offsets, per_sample_weights=weights if weighted else None)
    if feature == "weighted_means":
        totals = torch.zeros(40).index_add(0, bag, weights).clamp(min=1e-30)
        expected = expected / totals.unsqueeze(1)
    got = one.pooled(batch)[feature]
    torch.testing.assert_close(got, expected)
    assert (got[lengths == 0] == 0).all()
    upstream = torch.randn(40, 4)
    got.backward(upstream)
    expected.backward(upstream)
    torch.testing.assert_close(one.tables["t"].grad, theirs.weight.grad)


LOSSES = {"bce": nn.functional.binary_cross_entropy_with_logits, "mse": nn.functional.mse_loss}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("settings", [{}, {"max_grad_norm": 0.01}])
def test_reference_training_matches_a_plain_loop(loss, settings):
    batches = make_random_batches(SCHEMA, 10, 5, seed=3)
    one, other = make_reference(loss), make_reference()
    lr = 0.3 if loss == "bce" else 0.003  # small enough for stable training
    reference.train(one, batches, [torch.optim.SGD(one.parameters(), lr=lr)], **settings)
    sgd = torch.optim.SGD(other.parameters(), lr=lr)
    for batch in batches:
        sgd.zero_grad()
        LOSSES[loss](other(batch), batch.labels[:, 0]).backward()
        if "max_grad_norm" in settings:
            nn.utils.clip_grad_norm_(other.parameters(), settings["max_grad_norm"])
        sgd.step()
    for got, expected in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(got, expected)


def draw_some_rows():
    return torch.randn(6, 4) * (torch.rand(6, 1) > 0.5)


def draw_equal_columns():
    return torch.randn(6, 1).expand(6, 4).clone()


def train_table(make, gradient=draw_some_rows):
    """Return a 6 × 4 table after some steps."""
    torch.manual_seed(1)
    table = nn.Parameter(torch.randn(6, 4))
    optimizer = make([table])
    for _ in range(6):
        table.grad = gradient()
        if isinstance(optimizer, torch.optim.SparseAdam):
            table.grad = _sparse(table.grad)
        optimizer.step()
    return table.detach()


def _sparse(grad):
    rows = grad.abs().sum(1).nonzero().squeeze(1)
    return torch.sparse_coo_tensor(rows.unsqueeze(0), grad[rows], grad.shape, check_invariants=True)


@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize("name", ["sgd", "adagrad", "adam"])
def test_dense_table_updates_match_torch_optimizers(name, decay):
    eps = {} if name == "sgd" else {"eps": 1e-6}
    make = find_optimizer(name).torch_class()
    ours = train_table(lambda p: reference.TableReference(name, *p, lr=0.1, weight_decay=decay, **eps))
    torch.testing.assert_close(ours, train_table(lambda p: make(p, lr=0.1, weight_decay=decay, **eps)))


def test_touched_rows_adam_matches_sparse_adam():
    ours = train_table(lambda p: reference.TableReference("adam", *p, lr=0.1, eps=1e-12, touched_rows=True))
    torch.testing.assert_close(ours, train_table(lambda p: torch.optim.SparseAdam(p, lr=0.1, eps=1e-12)))


@pytest.mark.parametrize("name", ["sgd", "adagrad", "rowwise_adagrad"])
def test_weight_decay_leaves_rows_without_a_gradient_unchanged(name):
    """FBGEMM's fused kernels decay only the rows that have been looked up."""
    table = nn.Parameter(torch.ones(3, 4))
    table.grad = torch.tensor([[0.5], [0.0], [0.5]]).expand(3, 4)
    reference.TableReference(name, table, lr=0.1, weight_decay=0.3, touched_rows=True).step()
    assert (table[1] == 1).all() and (table[[0, 2]] != 1).all()


def test_row_wise_adagrad_uses_the_mean_square_of_each_row():
    """Row-wise Adagrad equals Adagrad if gradients are equal in all columns."""

    ours = train_table(lambda p: reference.TableReference("rowwise_adagrad", *p, lr=0.1, eps=1e-6), draw_equal_columns)
    theirs = train_table(lambda p: torch.optim.Adagrad(p, lr=0.1, eps=1e-6), draw_equal_columns)
    torch.testing.assert_close(ours, theirs)
    # All columns of a row share the mean of squared gradients: (1 + 9) ÷ 2 = 5.
    table = nn.Parameter(torch.zeros(1, 2))
    table.grad = torch.tensor([[1.0, 3.0]])
    reference.TableReference("rowwise_adagrad", table, lr=0.5, eps=0.0).step()
    torch.testing.assert_close(table.detach(), torch.tensor([[-0.5 / 5**0.5, -1.5 / 5**0.5]]))


def test_half_tables_are_rounded_after_every_step():
    start = torch.randn(11, 4).half()
    one = reference.Reference(SCHEMA, {"t": start}, LinearModel())
    reference.train(one, make_random_batches(SCHEMA, 10, 1, seed=3), [torch.optim.SGD(one.parameters(), lr=0.3)])
    values = one.tables["t"].detach()
    assert (values != start.float()).any()
    assert torch.equal(values, values.half().float())


class ReluModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.relu, self.logit = nn.Linear(16, 3), nn.ReLU(), nn.Linear(3, 1)

    def forward(self, dense, pooled):
        return self.logit(self.relu(self.hidden(torch.cat(list(pooled.values()), 1)))).squeeze(1)


def test_kink_margins_match_relu_inputs():
    batch = make_random_batches(SCHEMA, 10, 1, seed=3)[0]
    assert reference.measure_kink_margins(make_reference(), [batch]) == [
        float("inf")
    ]  # make_reference() sets the seed for the following draws
    one = reference.Reference(SCHEMA, {"t": torch.randn(11, 4)}, ReluModel())
    with torch.no_grad():
        inputs = one.model.hidden(torch.cat(list(one.pooled(batch).values()), 1)).abs()
    margin = pytest.approx(float(inputs.min() / inputs.max()), rel=1e-4)  # loses precision
    assert reference.measure_kink_margins(one, [batch]) == [margin]
    others = make_random_batches(SCHEMA, 10, 2, seed=4)
    together = reference.measure_kink_margins(one, [others[0], batch, others[1]])
    alone = [reference.measure_kink_margins(one, [other])[0] for other in others]
    assert together == [pytest.approx(alone[0], rel=1e-4), margin, pytest.approx(alone[1], rel=1e-4)]
    assert len({round(each, 9) for each in together}) == 3
    assert not one.model.relu._forward_pre_hooks
