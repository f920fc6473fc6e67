"""model.lookup_l2 with several sharding types, compared with matrix factorization in plain PyTorch."""

import pytest
import torch
from ranks import run_on_ranks
from small import build_step_on_rank, gather_weights, make_objective, make_small_config, make_small_schema, train_step

from raytrec.checks.parity.batches import GlobalBatch, compute_row_bounds, make_local_batch
from raytrec.common.errors import ConfigError
from raytrec.config.features import resolve_features
from raytrec.config.models import SECTIONS, check_model
from raytrec.driver.datasets import check_lookup_l2

ROWS, STEPS, RATE = 12, 4, 0.5
SCHEMA = make_small_schema(
    dense=[],
    sparse={"user": {"table": "user"}, "item": {"table": "item"}, "drawn": {"table": "item", "pooling": "sequence"}},
    tables={"user": {"rows": 7, "dim": 8}, "item": {"rows": 11, "dim": 8}},
)
FACTORS = {"user": 0.3, "item": 0.8}
MODEL = {"name": "mf", "negatives": "drawn", "max_negatives": 2, "loss": "bce", "lookup_l2": FACTORS}


def make_step_ids(step):
    """Return the ids of one step: users and items with repeats, and 0 to 2 drawn items per row."""
    draw = torch.Generator().manual_seed(step)
    user, item = (torch.randint(0, rows, (ROWS,), generator=draw) for rows in (4, 5))
    return user, item, torch.randint(0, 11, (ROWS, 2), generator=draw), torch.arange(ROWS) % 3


def train_on_rank(rank, world, plan):
    tasks = [{"label": "y", "loss": "from_model", "metrics": []}]
    settings = make_small_config(world, {"sharding_type": plan}, "sgd", RATE, tasks=tasks, model=MODEL)
    step, rows = build_step_on_rank(settings, SCHEMA), torch.arange(ROWS)
    before, local = gather_weights(step), []
    for number in range(STEPS):
        user, item, drawn, counts = make_step_ids(number)
        there = torch.arange(2) < counts.unsqueeze(1)
        bags = {
            "user": (user, rows, torch.ones(ROWS)),
            "item": (item, rows, torch.ones(ROWS)),
            "drawn": (drawn[there], rows.repeat_interleave(counts), torch.ones(int(counts.sum()))),
        }
        whole = GlobalBatch(torch.zeros(ROWS, 0), torch.ones(ROWS, 1), bags)
        bounds = compute_row_bounds(ROWS, world, "empty")
        local.append(make_local_batch(whole, SCHEMA, bounds, rank, resolve_features(SCHEMA, settings.model)))
    losses = [float(outputs.loss) for outputs in train_step(step, local)]
    evaluated = [float(outputs.loss) for outputs in step.evaluate(iter(local[:1]))]
    return before, gather_weights(step), losses, evaluated


@pytest.mark.slow
@pytest.mark.parametrize("world,plan", [(1, "table_wise"), (2, "row_wise"), (3, "column_wise"), (2, "data_parallel")])
def test_lookup_l2_matches_plain_torch(world, plan):
    found = run_on_ranks(world, train_on_rank, plan)
    before, after, *_ = found[0]
    tables = {name: torch.nn.Parameter(before[name].clone()) for name in FACTORS}
    bias = torch.nn.Parameter(before["bias"].clone())
    for number in range(STEPS):
        user, item, drawn, counts = make_step_ids(number)
        losses = []
        for i in range(ROWS):
            u, v = tables["user"][user[i]], tables["item"][item[i]]
            others = tables["item"][drawn[i, : int(counts[i])]]
            score = u[:-1] @ v[:-1] + u[-1] + v[-1] + bias[0]
            wrong = others[:, :-1] @ u[:-1] + others[:, -1] + u[-1] + bias[0]
            loss = -torch.sigmoid(score).log() - (1 - torch.sigmoid(wrong)).log().sum()
            lengths = FACTORS["user"] * u @ u + FACTORS["item"] * (v @ v + others.square().sum())
            losses.append(loss + lengths / 2)
        loss = torch.stack(losses).mean()
        assert sum(each[2][number] for each in found) / world == pytest.approx(loss.item(), rel=1e-5)
        loss.backward()
        with torch.no_grad():
            for parameter, rate in ((tables["user"], RATE), (tables["item"], RATE), (bias, 0.1)):
                parameter -= rate * parameter.grad
                parameter.grad = None
    for name, table in tables.items():
        torch.testing.assert_close(after[name], table.detach(), rtol=0, atol=2e-6)
    assert all(each[3] == [0.0] for each in found)


def test_lookup_l2_can_be_set_per_table():
    section = SECTIONS["mf"].model_validate({"name": "mf", "lookup_l2": 0.5})
    assert section.l2_factors(SCHEMA) == {"user": 0.5, "item": 0.5, "drawn": 0.5}
    section = SECTIONS["mf"].model_validate({"name": "mf", "lookup_l2": {"item": 2, "user": 0}})
    assert section.l2_factors(SCHEMA) == {"item": 2.0, "drawn": 2.0}
    assert SECTIONS["mf"].model_validate({"name": "mf"}).l2_factors(SCHEMA) == {}
    assert make_objective([{}]).l2_factors == {}


def test_lookup_l2_rejects_lists_and_weighted_ids():
    weighted, lists = {"name": "dlrm", "lookup_l2": 0.1}, {"name": "dlrm", "lookup_l2": {"user": 0.1}}
    for values, message in (
        (weighted, "the ids of tags have weights"),
        ({"name": "dlrm", "lookup_l2": {"users": 0.1}}, "did you mean 'user'"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_model(make_small_schema(), SECTIONS["dlrm"].model_validate(values), False, {})
    settings = make_small_config(1, {}, model=lists)
    form = type("Form", (), {"lists": frozenset(["friends"])})
    datasets = {"train": type("Dataset", (), {"form": form})}
    with pytest.raises(ConfigError, match="friends contains lists of ids"):
        check_lookup_l2(settings, make_small_schema(), datasets)
