"""Requests with candidate lists train like rows of single candidates, and like plain torch."""

import pytest
import request_rows
import small
import torch
import torch.distributed as dist
from compile_backends import use_compile_backend
from ranks import run_on_ranks
from torch import nn

from raytrec.checks.parity.batches import compute_row_bounds

STEPS, ROWS = 4, 12
TASKS = [
    {"label": "y", "metrics": ["auc", "logloss"]},
    {"label": "y", "name": "seen", "mask": "shown", "sample_weight": "w"},
]
LEARNED = {"options": {"learn_temperature": True}}
GROUP_TASKS = [  # the group is the request, which rows of single candidates name
    {"label": "y", "name": "pairs", "loss": "bpr", "group": "row"},
    TASKS[1] | {"name": "list", "loss": "listwise_softmax", "group": "row", **LEARNED},
]
VECTOR_TASKS = [{"loss": "in_batch_softmax", **LEARNED}]
TOWERS = {"query": ["user", "age", "hour", "history", "tags"], "item": ["item", "price", "shop"]}
MODELS = {
    "two_tower": {"name": "two_tower", "towers": TOWERS, "tower_mlp": [6, 4]},
    "dlrm": {"bottom_mlp": [6], "top_mlp": [6]},
    "dcn": {"name": "dcn", "top_mlp": [6], "cross_layers": 2},
    "din": {"name": "din", "target": "item", "max_length": 5, "attention_mlp": [4], "top_mlp": [6]},
    "bst": {"name": "bst", "target": "item", "max_length": 5, "heads": 2, "feedforward": 8, "top_mlp": [6]},
    "sasrec": {"name": "sasrec", "history": "history", "item": "item", "max_length": 5, "dropout": 0.0},
    "hstu_rank": {"name": "hstu_rank", "max_length": 5, "candidate": ["price", "shop"], "dim": 8, "dropout": 0.0},
    "mf": {"name": "mf", "user": "user", "item": "item"},
}


def split_batch(step, rank, world):
    """Return the global batch, this rank's requests and the bounds; with three ranks, rank 0 has none in step
    1."""
    whole = request_rows.make_request_table(ROWS, step)
    bounds = compute_row_bounds(ROWS, world, "empty" if world == 3 and step == 1 else "unequal")
    return whole, whole.slice(bounds[rank], bounds[rank + 1] - bounds[rank]), bounds


def run(rank, world, name, form, tasks=TASKS, optimizer="rowwise_adagrad", **train):
    """Return (weights before, weights after, step losses, evaluation metrics) for one form of rows."""
    from raytrec.config.features import resolve_features
    from raytrec.metrics.selection import Selection
    from raytrec.metrics.sums import MetricSums
    from raytrec.tasks.task import resolve_tasks
    from raytrec.tasks.task_columns import build_read_plan

    schema = request_rows.SCHEMA if form == "requests" else request_rows.REPEATED_SCHEMA
    kinds = ["row_wise", "table_wise"]
    config = small.make_small_config(world, kinds, optimizer, tasks=tasks, model=MODELS[name], **train)
    features, learned = resolve_features(schema, config.model), resolve_tasks(config.tasks, schema)
    on_gpu = dist.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    plan = build_read_plan(learned, schema)
    made = []
    for number in range(STEPS):
        whole, mine, bounds = split_batch(number, rank, world)
        if form == "repeated":
            whole, mine = map(request_rows.repeat_by_candidate, (whole, mine))
        padding = ROWS - (bounds[rank + 1] - bounds[rank]) if form == "requests" else 99 - mine.num_rows
        made.append(request_rows.requests_to_batch(mine, schema, features, padding, plan, whole.num_rows))
    made = [batch.pin_memory() for batch in made] if on_gpu else made
    step = small.build_step_on_rank(config, schema, device)
    sums, losses, before = MetricSums(Selection(learned), device), [], small.gather_weights(step)
    for outputs in step.train(iter(made), STEPS):
        sums.add(outputs)
        losses.append(sums.reduce()["loss"])
    sums = MetricSums(Selection(learned), device)
    for outputs in step.evaluate(iter(made)):
        sums.add(outputs)
    after = {name: values.cpu() for name, values in small.gather_weights(step).items()}
    return {name: values.cpu() for name, values in before.items()}, after, losses, sums.reduce()


def run_compiled(rank, world, name):
    """Run the requests with train.compile."""
    torch.compiler.reset()
    with use_compile_backend("aot_eager"):
        return run(rank, world, name, "requests", compile=True)


@pytest.mark.slow
@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.survive), 3])
@pytest.mark.parametrize("name", MODELS)
def test_requests_train_like_repeated_rows(name, world):
    ours = run_on_ranks(world, run, name, "requests")
    theirs = run_on_ranks(world, run, name, "repeated")
    (before, after, losses, figures), (others_before, others, their_losses, their_figures) = (ours[0], theirs[0])
    assert small.max_weight_difference(before, others_before) == 0
    assert small.max_weight_difference(after, others) <= 3e-6
    assert small.max_weight_difference(after, before) > 1e-3
    assert losses == pytest.approx(their_losses, abs=1e-6)
    assert figures.pop("rows") == ROWS * STEPS and their_figures.pop("rows") != ROWS * STEPS
    assert figures == pytest.approx(their_figures, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.survive), 3])
@pytest.mark.parametrize("name,tasks", [("dlrm", GROUP_TASKS), ("mf", VECTOR_TASKS)], ids=["in requests", "in batches"])
def test_losses_that_compare_candidates_train_like_repeated_rows(name, tasks, world):
    ours, theirs = (run_on_ranks(world, run, name, form, tasks, "sgd")[0] for form in ("requests", "repeated"))
    assert small.max_weight_difference(ours[1], theirs[1]) <= 1e-6
    assert small.max_weight_difference({"": ours[1]["loss_log_temperatures"]}, {"": torch.zeros(1)}) > 1e-5
    assert ours[2] == pytest.approx(theirs[2], abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["dcn", *(pytest.param(name, marks=pytest.mark.survive) for name in ("two_tower", "din", "sasrec"))]
)
def test_requests_train_equally_on_gpus_and_compiled(name):
    one = run_on_ranks(2, run, name, "requests")[0]
    for other in (run_on_ranks(2, run, name, "requests", device="cuda")[0], run_on_ranks(2, run_compiled, name)[0]):
        assert small.max_weight_difference(one[1], other[1]) <= 1e-5
        assert other[2] == pytest.approx(one[2], abs=1e-5)
        assert other[3] == pytest.approx(one[3], abs=1e-5)


def compute_plain_logits(weights, request):
    """Return the two-tower logit of each candidate of a request, computed from the definition."""

    def tower(name, x):
        for layer in ("hidden.0", "last"):
            names = (f"towers.{name}.{layer}.{part}" for part in ("weight", "bias"))
            x = nn.functional.linear(x.relu() if layer == "last" else x, *(weights[n] for n in names))
        return x

    def mean(table, ids, factors):
        total = sum((f * weights[table][i] for i, f in zip(ids, factors, strict=True)), torch.zeros(8))
        return total / (sum(factors) or 1)

    dense = torch.tensor([request["age"], request["hour"]], dtype=torch.float32)
    history = mean("item", request["history"], [1.0] * len(request["history"]))
    tags = mean("tag", request["tags"], request["tag_weights"])
    query = tower("query", torch.cat([dense, weights["user"][request["user"]], history, tags]))
    found = []
    for price, item, shop in zip(request["price"], request["item"], request["shop"], strict=True):
        scaled = torch.tensor([(price - 1) / 2], dtype=torch.float32)
        vector = tower("item", torch.cat([scaled, weights["item"][item], weights["shop"][shop]]))
        found.append(weights["scale"] * query @ vector + weights["bias"])
    return found


@pytest.mark.parametrize("world", [1, 3])
def test_requests_train_like_plain_torch(world):
    before, after, losses, _ = run_on_ranks(world, run, "two_tower", "requests", TASKS[:1], "sgd")[0]
    weights = {name: nn.Parameter(values.clone()) for name, values in before.items()}
    optimizer, expected = torch.optim.SGD(weights.values(), lr=0.1), []
    for step in range(STEPS):
        requests = request_rows.make_request_table(ROWS, step).to_pylist()
        logits = torch.stack([logit for request in requests for logit in compute_plain_logits(weights, request)])
        labels = torch.tensor([y for request in requests for y in request["y"]], dtype=torch.float32)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert losses == pytest.approx(expected, abs=1e-6)
    assert small.max_weight_difference(after, {n: p.detach() for n, p in weights.items()}) <= 1e-6
