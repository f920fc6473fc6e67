"""A few sharded steps against one plain torch.nn process on the whole batch: same weights, same metrics."""

from itertools import pairwise

import pytest
import torch
from ranks import on_ranks
from torch import nn

from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema

ROWS, STEPS, DIM = 13, 5, 8
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
        "tables": {
            "user": {"rows": 50, "dim": DIM},
            "tag": {"rows": 5, "dim": DIM},
            "word": {"rows": 23, "dim": DIM},
        },
    },
    "test",
)


def config(optimizer, sharding, loss="bce"):
    return RunConfig.model_validate(
        {
            "data": {"train": "unused/train", "global_batch_size": ROWS},
            "model": {"bottom_mlp": [6], "top_mlp": [10, 4]},
            "optim": {
                "embeddings": {"name": optimizer, "lr": 0.1},
                "dense": {"name": "sgd", "lr": 0.2},
            },
            "plan": {"sharding_types": sharding},
            "tasks": [{"loss": loss}],
        }
    )


def global_batches():
    """STEPS × (dense [ROWS, 2], labels [ROWS], per feature a list of (ids, weights))."""
    g = torch.Generator().manual_seed(5)
    for _ in range(STEPS):
        bags = {}
        for feature, spec in SCHEMA.sparse.items():
            rows = SCHEMA.tables[spec.table].rows
            lengths = torch.randint(0, 4, (ROWS,), generator=g).tolist()
            ids = [torch.randint(0, rows, (n,), generator=g) for n in lengths]
            weights = [torch.rand(n, generator=g) if spec.weights else torch.ones(n) for n in lengths]
            bags[feature] = list(zip(ids, weights, strict=True))
        yield (
            torch.randn(ROWS, 2, generator=g),
            torch.randint(0, 2, (ROWS,), generator=g).float(),
            bags,
        )


def local_batches(rank, world):
    """This rank's share of each global batch; the first rank has none where there are three."""
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    from raytrec.data.batch import Batch

    cuts = {1: [0, ROWS], 2: [0, 4, ROWS], 3: [0, 0, 8, ROWS]}[world]
    longest = max(b - a for a, b in pairwise(cuts))
    mine = range(cuts[rank], cuts[rank + 1])
    for dense, labels, bags in global_batches():
        padding = longest - len(mine)
        lengths, ids, weights = [], [], []
        for feature in SCHEMA.sparse:
            lengths += [len(bags[feature][i][0]) for i in mine] + [0] * padding
            ids += [bags[feature][i][0] for i in mine]
            weights += [bags[feature][i][1] for i in mine]
        empty = torch.zeros(0)
        yield Batch(
            nn.functional.pad(dense[list(mine)], (0, 0, 0, padding)),
            KeyedJaggedTensor(
                list(SCHEMA.sparse),
                torch.cat([empty.long(), *ids]),
                torch.cat([empty, *weights]),
                lengths=torch.tensor(lengths, dtype=torch.int32),
            ),
            nn.functional.pad(labels[list(mine)], (0, padding)).unsqueeze(1),
            torch.tensor([1.0] * len(mine) + [0.0] * padding),
            ROWS,
        )


def snapshot(model):
    """Local parts of every parameter: {name: [(row, column, values)]}."""
    out = {}
    for name, value in model.state_dict().items():
        name = name.removeprefix("head.model.")
        if hasattr(value, "local_shards"):
            out[name] = [(*s.metadata.shard_offsets, s.tensor.clone()) for s in value.local_shards()]
        else:
            out[name] = [(0, 0, value.clone())]
    return out


def sharded_run(rank, world, optimizer, sharding, loss):
    from ranked_rows import auc_of

    from raytrec.common.collectives import Peers
    from raytrec.metrics.selection import Selection
    from raytrec.metrics.sums import Sums
    from raytrec.tasks.task import resolve_tasks
    from raytrec.worker.build import build_step

    device, settings = torch.device("cpu"), config(optimizer, sharding, loss)
    step, plan = build_step(settings, SCHEMA, device)
    (task,) = resolve_tasks(settings.tasks, SCHEMA)
    before, sums, losses = snapshot(step.model), Sums(Selection([task]), device), []
    for outputs in step.train(iter(local_batches(rank, world)), STEPS):
        sums.add(outputs)
        losses.append(sums.reduce()[{"bce": "logloss", "mse": "mse"}[loss]])
    logits, labels, sums = [], [], Sums(Selection([task]), device)
    for outputs in step.evaluate(iter(local_batches(rank, world))):
        sums.add(outputs)
        logits.append(outputs["y"].logits[outputs.rows > 0])
        labels.append(outputs["y"].labels[outputs["y"].weights > 0])
    figures = sums.reduce()
    logits, labels = Peers().gather([torch.cat(logits), torch.cat(labels)])
    figures["auc"] = auc_of(task.loss.predict(logits.double()), labels)
    sharding_used = {s.sharding_type for module in plan.plan.values() for s in module.values()}
    return before, snapshot(step.model), losses, figures, sharding_used


def whole(parts):
    """Full parameters out of the ranks' parts."""
    shapes = {f"embeddings.bags.embedding_bags.{t}.weight": (s.rows, s.dim) for t, s in SCHEMA.tables.items()}
    full = {}
    for rank in parts:
        for name, pieces in rank.items():
            for row, column, values in pieces:
                if name in shapes:
                    table = full.setdefault(name, torch.full(shapes[name], float("nan")))
                    table[row : row + values.shape[0], column : column + values.shape[1]] = values
                else:
                    full[name] = values
    return full


class Reference(nn.Module):
    """DLRM written once more, from its definition, in plain torch.nn."""

    def __init__(self, weights):
        super().__init__()
        self.tables = nn.ParameterDict(
            {t: weights[f"embeddings.bags.embedding_bags.{t}.weight"].clone() for t in SCHEMA.tables}
        )
        self.dense = nn.ParameterDict(
            {n.replace(".", "/"): w.clone() for n, w in weights.items() if "embedding_bags" not in n}
        )

    def linear(self, name, x):
        return nn.functional.linear(x, self.dense[f"{name}/weight"], self.dense[f"{name}/bias"])

    def forward(self, dense, bags):
        x = self.linear("bottom/2", self.linear("bottom/0", dense).relu()).relu()
        vectors = [x]
        for feature, spec in SCHEMA.sparse.items():
            rows = []
            for ids, weights in bags[feature]:
                total = (self.tables[spec.table][ids] * weights.unsqueeze(1)).sum(0)
                mean = spec.pooling != "sum" and len(ids)
                rows.append(total / weights.sum() if mean else total)
            vectors.append(torch.stack(rows))
        pairs = [
            (vectors[i] * vectors[j]).sum(1) for i in range(len(vectors)) for j in range(i + 1, len(vectors))
        ]
        h = torch.cat([x, torch.stack(pairs, 1)], 1)
        return self.linear("logit", self.linear("top/2", self.linear("top/0", h).relu()).relu()).squeeze(1)


class RowWiseAdagrad(torch.optim.Optimizer):
    """One second moment a row: the mean of its squared gradients, added up (FBGEMM's definition)."""

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


def reference_run(weights, optimizer, criterion):
    model = Reference(weights)
    classes = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
        "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, eps=1e-8),
        "rowwise_adagrad": lambda p: RowWiseAdagrad(p, lr=0.1, eps=1e-8),
        "adam": lambda p: torch.optim.Adam(p, lr=0.1, eps=1e-8),
    }
    optimizers = [
        classes[optimizer](model.tables.values()),
        torch.optim.SGD(model.dense.values(), lr=0.2),
    ]
    losses = []
    for dense, labels, bags in global_batches():
        loss = LOSSES[criterion](model(dense, bags), labels)
        for o in optimizers:
            o.zero_grad()
        loss.backward()
        for o in optimizers:
            o.step()
        losses.append(loss.item())
    with torch.no_grad():
        logits = torch.cat([model(dense, bags) for dense, _, bags in global_batches()])
    return model, losses, logits, torch.cat([labels for _, labels, _ in global_batches()])


CASES = [
    (1, "rowwise_adagrad", "table_wise"),
    (2, "sgd", "row_wise"),
    (2, "rowwise_adagrad", "table_wise"),
    (2, "adagrad", "column_wise"),
    (2, "adam", "row_wise"),
    (3, "sgd", "table_wise"),
    (3, "rowwise_adagrad", "row_wise"),
    (3, "rowwise_adagrad", "data_parallel"),
]


def trained_as_one_process(world, optimizer, sharding, loss="bce"):
    """Trains sharded and alone; (each rank's figures after it, the logits and labels of one process)."""
    ranks = on_ranks(world, sharded_run, optimizer, [sharding], loss)
    before, after = whole([r[0] for r in ranks]), whole([r[1] for r in ranks])
    assert ranks[0][4] == {sharding}
    model, losses, logits, labels = reference_run(before, optimizer, loss)

    for name, values in after.items():
        if "embedding_bags" in name:
            expected = model.tables[name.split(".")[-2]]
        else:
            expected = model.dense[name.replace(".", "/")]
        torch.testing.assert_close(
            values, expected.detach(), rtol=0, atol=5e-6, msg=lambda m, n=name: f"{n}: {m}"
        )
        assert not torch.equal(values, before[name]), f"{name} was not trained"
    torch.testing.assert_close(torch.tensor(ranks[0][2]), torch.tensor(losses), rtol=0, atol=1e-6)
    return [r[3] for r in ranks], logits, labels


@pytest.mark.parametrize("world,optimizer,sharding", CASES)
def test_sharded_steps_equal_one_process(world, optimizer, sharding):
    ranks, logits, labels = trained_as_one_process(world, optimizer, sharding)
    figures = ranks[0]  # each metric by its definition, against what the ranks reduced
    probability, rate = logits.double().sigmoid(), labels.double().mean()
    entropy = nn.functional.binary_cross_entropy(probability, labels.double())
    base = nn.functional.binary_cross_entropy(rate.expand(len(labels)), labels.double())
    wins = (logits[labels == 1, None] > logits[None, labels == 0]).double()
    ties = (logits[labels == 1, None] == logits[None, labels == 0]).double()
    assert figures["rows"] == ROWS * STEPS
    assert figures["logloss"] == pytest.approx(float(entropy), abs=1e-5)
    assert figures["ne"] == pytest.approx(float(entropy / base), abs=1e-5)
    assert figures["calibration"] == pytest.approx(float(probability.sum() / labels.sum()), abs=1e-5)
    assert figures["auc"] == pytest.approx(float((wins + ties / 2).mean()), abs=1e-4)
    assert all(r["logloss"] == figures["logloss"] for r in ranks)


@pytest.mark.parametrize(
    "world,optimizer,sharding",
    [(1, "sgd", "table_wise"), (2, "sgd", "row_wise"), (2, "adagrad", "table_wise")],
)
def test_squared_error_is_learned_as_in_one_process(world, optimizer, sharding):
    ranks, logits, labels = trained_as_one_process(world, optimizer, sharding, "mse")
    errors = (logits.double() - labels.double()).abs()
    for figures in ranks:
        assert figures["rows"] == ROWS * STEPS
        assert figures["mse"] == pytest.approx(float(errors.square().mean()), abs=1e-6)
        assert figures["mae"] == pytest.approx(float(errors.mean()), abs=1e-6)
