"""A few sharded steps against one plain torch.nn process on the whole batch: same weights and metrics."""

import pytest
import torch
from ranks import run_on_ranks
from small import Schema, gather_weights, make_batches, make_small_config
from torch import nn

ROWS, STEPS, DIM = 12, 5, 8
SCHEMA = Schema.parse(
    {
        "labels": ["y"],
        "dense": ["a", "b"],
        "sparse": {
            "user": {"table": "user"},
            "tags": {"table": "tag", "pooling": "mean"},
            "friends": {"table": "user", "pooling": "sequence"},
            "words": {"table": "word", "weights": "word_weights"},
            "scored": {"table": "word", "pooling": "mean", "weights": "scores"},
        },
        "tables": {"user": {"rows": 50, "dim": DIM}, "tag": {"rows": 5, "dim": DIM}, "word": {"rows": 23, "dim": DIM}},
    },
    "test",
)
MODEL = {"bottom_mlp": [6], "top_mlp": [10, 4]}


def local_batches(rank, world):
    """Return this rank's share of each global batch; with three ranks, rank 0 has no rows."""
    return iter(make_batches(STEPS, rank, world, "empty" if world == 3 else "unequal", SCHEMA)[1])


def run_sharded(rank, world, optimizer, sharding, loss):
    from ranked_rows import auc_of_predictions

    from raytrec.common.collectives import Peers
    from raytrec.metrics.selection import Selection
    from raytrec.metrics.sums import MetricSums
    from raytrec.tasks.task import resolve_tasks
    from raytrec.worker.build import build_step

    device = torch.device("cpu")
    settings = make_small_config(world, sharding, optimizer, tasks=[{"loss": loss}], model=MODEL)
    step, plan = build_step(settings, SCHEMA, device)
    (task,) = resolve_tasks(settings.tasks, SCHEMA)
    before, sums, losses = gather_weights(step), MetricSums(Selection([task]), device), []
    for outputs in step.train(local_batches(rank, world), STEPS):
        sums.add(outputs)
        losses.append(sums.reduce()[{"bce": "logloss", "mse": "mse"}[loss]])
    logits, labels, sums = [], [], MetricSums(Selection([task]), device)
    for outputs in step.evaluate(local_batches(rank, world)):
        sums.add(outputs)
        logits.append(outputs["y"].logits[outputs.rows > 0])
        labels.append(outputs["y"].labels[outputs["y"].weights > 0])
    figures = sums.reduce()
    logits, labels = Peers().gather([torch.cat(logits), torch.cat(labels)])
    figures["auc"] = auc_of_predictions(task.loss.predict(logits.double()), labels)
    sharding_used = {s.sharding_type for module in plan.plan.values() for s in module.values()}
    return before, gather_weights(step), losses, figures, sharding_used


class Reference(nn.Module):
    """DLRM implemented from its definition in plain torch.nn."""

    def __init__(self, weights):
        super().__init__()
        self.tables = nn.ParameterDict({name: weights[name] for name in SCHEMA.tables})
        dense = weights.keys() - SCHEMA.tables.keys()
        self.dense = nn.ParameterDict({name.replace(".", "/"): weights[name] for name in dense})

    def linear(self, name, x):
        return nn.functional.linear(x, self.dense[f"{name}/weight"], self.dense[f"{name}/bias"])

    def forward(self, batch):
        x = self.linear("bottom/2", self.linear("bottom/0", batch.dense).relu()).relu()
        vectors = [x]
        for feature, spec in SCHEMA.sparse.items():
            ids, rows, weights = batch.bags[feature]
            of_ids = self.tables[spec.table][ids] * weights.unsqueeze(1)
            total = torch.zeros(ROWS, DIM).index_add(0, rows, of_ids)
            if spec.pooling != "sum":
                divisor = torch.zeros(ROWS).index_add(0, rows, weights)
                total = total / divisor.masked_fill(divisor == 0, 1).unsqueeze(1)
            vectors.append(total)
        pairs = [(vectors[i] * vectors[j]).sum(1) for i in range(len(vectors)) for j in range(i + 1, len(vectors))]
        h = torch.cat([x, torch.stack(pairs, 1)], 1)
        return self.linear("logit", self.linear("top/2", self.linear("top/0", h).relu()).relu()).squeeze(1)


class RowWiseAdagrad(torch.optim.Optimizer):
    """Adagrad with one moment per row: the sum of mean squared gradients (FBGEMM's definition)."""

    def __init__(self, params, lr, eps):
        super().__init__(params, {"lr": lr, "eps": eps})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                moment = self.state[p].setdefault("moment", torch.zeros(len(p), 1))
                moment += p.grad.pow(2).mean(1, keepdim=True)
                p -= group["lr"] * p.grad / (moment.sqrt() + group["eps"])


LOSSES = {"bce": nn.functional.binary_cross_entropy_with_logits, "mse": nn.functional.mse_loss}


def run_reference(weights, optimizer, criterion):
    model = Reference({name: values.clone() for name, values in weights.items()})
    classes = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
        "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, eps=1e-8),
        "rowwise_adagrad": lambda p: RowWiseAdagrad(p, lr=0.1, eps=1e-8),
        "adam": lambda p: torch.optim.Adam(p, lr=0.1, eps=1e-8),
    }
    optimizers = [classes[optimizer](model.tables.values()), torch.optim.SGD(model.dense.values(), lr=0.1)]
    losses, whole = [], make_batches(STEPS, 0, 1, schema=SCHEMA)[0]
    for batch in whole:
        loss = LOSSES[criterion](model(batch), batch.labels[:, 0])
        model.zero_grad()
        loss.backward()
        for o in optimizers:
            o.step()
        losses.append(loss.item())
    with torch.no_grad():
        logits = torch.cat([model(batch) for batch in whole])
    return model, losses, logits, torch.cat([batch.labels[:, 0] for batch in whole])


@pytest.mark.parametrize(
    "world,optimizer,sharding,loss",
    [
        (1, "rowwise_adagrad", "table_wise", "bce"),
        (2, "sgd", "row_wise", "bce"),
        (2, "rowwise_adagrad", "table_wise", "bce"),
        (2, "adagrad", "column_wise", "bce"),
        (2, "adam", "row_wise", "bce"),
        (3, "sgd", "table_wise", "bce"),
        (3, "rowwise_adagrad", "row_wise", "bce"),
        (3, "rowwise_adagrad", "data_parallel", "bce"),
        (2, "adagrad", "table_wise", "mse"),
    ],
)
def test_sharded_steps_equal_one_process(world, optimizer, sharding, loss):
    ranks = run_on_ranks(world, run_sharded, optimizer, [sharding], loss)
    before, after, means, figures, used = ranks[0]
    assert used == {sharding}
    model, losses, logits, labels = run_reference(before, optimizer, loss)
    expected = dict(model.tables) | {name.replace("/", "."): p for name, p in model.dense.items()}
    # Adam normalizes gradients, which amplifies the rounding errors of the smallest gradients.
    atol = 2e-5 if optimizer == "adam" else 5e-6
    torch.testing.assert_close(after, {name: values.detach() for name, values in expected.items()}, rtol=0, atol=atol)
    for name, values in after.items():
        assert not torch.equal(values, before[name]), f"{name} was not trained"
    torch.testing.assert_close(torch.tensor(means), torch.tensor(losses), rtol=0, atol=1e-6)
    assert figures["rows"] == ROWS * STEPS
    for name, value in compute_metrics(loss, logits.double(), labels.double()).items():
        assert figures[name] == pytest.approx(float(value), abs=1e-4 if name == "auc" else 1e-5), name
    assert all(of_rank[3] == figures for of_rank in ranks)


def compute_metrics(loss, logits, labels):
    """Return each metric, computed from its definition."""
    if loss == "mse":
        errors = (logits - labels).abs()
        return {"mse": errors.square().mean(), "mae": errors.mean()}
    probability, rate = logits.sigmoid(), labels.mean()
    entropy = nn.functional.binary_cross_entropy(probability, labels)
    base = nn.functional.binary_cross_entropy(rate.expand(len(labels)), labels)
    positive, negative = logits[labels == 1, None], logits[None, labels == 0]
    return {
        "logloss": entropy,
        "ne": entropy / base,
        "calibration": probability.sum() / labels.sum(),
        "auc": ((positive > negative).double() + (positive == negative).double() / 2).mean(),
    }
