"""Per-table optimizers and learning rates: the same results as in one process, under all plans."""

import pytest
import torch
from loops import failed_outcomes, run_with_fault
from ranks import run_on_ranks
from small import SCHEMA, build_step_on_rank, make_batches, make_small_config, train_step

from raytrec.checks.parity.compare import compare
from raytrec.common.errors import ConfigError
from raytrec.compat.fbgemm import find_fused_lookup
from raytrec.compat.torchrec_ import iterate_sharded_kernels, list_kernel_tables
from raytrec.config.run_config import load_config
from raytrec.embeddings.constraints import resolve_constraints, resolve_optimizers
from raytrec.embeddings.optimizers import OPTIMIZERS, TableOptimizer, table_optimizer
from raytrec.planning.rates import Rates
from raytrec.planning.validation import check_decay
from raytrec.worker.build import build_step

PLANS = {
    "row-wise": {"sharding_type": "row_wise"},
    "table-wise": {"sharding_type": "table_wise"},
    "copies": {"sharding_type": "data_parallel"},
    "dense": {"sharding_type": "row_wise", "compute_kernel": "dense"},
}
NEXT_OPTIMIZER = {"rowwise_adagrad": "sgd", "sgd": "adagrad", "adagrad": "adam", "adam": "rowwise_adagrad"}


def test_all_table_optimizers_are_tested():
    assert set(NEXT_OPTIMIZER) == set(OPTIMIZERS.parts)


def test_optimizer_without_rates_is_rejected():
    with pytest.raises(TypeError, match="Momentum has a CPU kernel but does not define cpu_lookup"):
        table_optimizer(type("Momentum", (TableOptimizer,), {}))
    with pytest.raises(ConfigError, match="the rates do not include lookups with optimizer lamb"):
        Rates.for_cpu(2).get_lookup_rates("lamb")


def test_later_optimizer_settings_override_earlier_ones():
    lines = {"*": {"lr": 0.5}, "us*": {"name": "adam", "lr": 0.001}, "user": {"eps": 1e-4}}
    found = resolve_optimizers(make_small_config(1, PLANS["row-wise"], "sgd", 0.1, lines), SCHEMA)
    assert found["user"].model_dump() == {"name": "adam", "lr": 0.001, "eps": 1e-4, "weight_decay": 0.0}
    assert (found["tag"].name, found["tag"].lr) == ("sgd", 0.5)
    with pytest.raises(ConfigError, match="no table matches 'uzer'; did you mean 'user'"):
        resolve_optimizers(make_small_config(1, PLANS["row-wise"], tables={"uzer": {"lr": 0.5}}), SCHEMA)


def compare_with_reference(rank, world, plan, tables, changes=()):
    """Compare some steps with one process; return (failed findings, number of tables with state)."""
    settings = load_config(make_small_config(world, plan, "sgd", 0.1, tables), list(changes))
    found = compare(build_step, settings, SCHEMA, torch.device("cpu"), rows=12, steps=4)
    wrong = [(f.check, f.name, f.error) for f in found if not f.error <= f.limit]
    return wrong, len({f.name.partition(".")[0] for f in found if f.check == "state"})


@pytest.mark.slow
@pytest.mark.parametrize("world,plan", [(1, "row-wise"), (2, "row-wise"), (2, "table-wise"), (2, "copies")])
@pytest.mark.parametrize("optimizer", NEXT_OPTIMIZER)
def test_two_tables_use_two_optimizers(optimizer, world, plan):
    tables = {"user": {"name": optimizer, "lr": 0.02}, "tag": {"name": NEXT_OPTIMIZER[optimizer], "lr": 0.3}}
    wrong, with_state = run_on_ranks(world, compare_with_reference, PLANS[plan], tables, ["train.max_grad_norm=0.05"])[
        0
    ]
    assert wrong == []
    assert with_state == 2 - ("sgd" in (optimizer, NEXT_OPTIMIZER[optimizer]))


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["copies", "dense"])
@pytest.mark.parametrize("optimizer", NEXT_OPTIMIZER)
def test_weight_decay_reaches_every_row(optimizer, plan):
    """Weight decay also applies to rows that a step does not look up."""
    changes = [f"optim.embeddings.name={optimizer}", "optim.embeddings.weight_decay=0.3"]
    assert run_on_ranks(2, compare_with_reference, PLANS[plan], {"tag": {"weight_decay": 0.1}}, changes)[0][0] == []


@pytest.mark.parametrize("optimizer,device", [("sgd", "cpu"), ("rowwise_adagrad", "cuda"), ("adam", "cuda")])
def test_fused_kernels_reject_weight_decay(optimizer, device):
    settings = make_small_config(2, ["row_wise", "data_parallel"], optimizer, tables={"tag": {"weight_decay": 0.1}})
    constraints, optimizers = resolve_constraints(settings, SCHEMA), resolve_optimizers(settings, SCHEMA)
    with pytest.raises(ConfigError, match="table tag has weight_decay and may be row_wise with a fused"):
        check_decay(constraints, optimizers, device)
    if optimizer == "adam":  # on CPU, Adam's update is dense
        check_decay(constraints, optimizers, "cpu")


def list_lookups(rank, world, tables):
    """Return the tables of each lookup with its optimizer."""
    step = build_step_on_rank(make_small_config(world, PLANS["row-wise"], "adagrad", 0.1, tables))
    found = [
        (find_fused_lookup(each), {t.name for t in list_kernel_tables(each)})
        for each in iterate_sharded_kernels(step.model)
    ]
    return sorted(str((str(lookup.optimizer) if lookup else "dense", names)) for lookup, names in found)


@pytest.mark.parametrize(
    "tag,expected",
    [
        ({"lr": 0.5}, ["('exact_adagrad', {'tag'})", "('exact_adagrad', {'user'})"]),
        ({"name": "adam"}, ["('dense', {'tag'})", "('exact_adagrad', {'user'})"]),
    ],
)
def test_different_optimizers_use_separate_lookups(tag, expected):
    assert run_on_ranks(1, list_lookups, {"tag": tag})[0] == expected
    assert len(run_on_ranks(1, list_lookups, {})[0]) == 1


@pytest.mark.parametrize("tag", ["adam", "sgd"])
def test_live_checks_support_several_optimizers(tag):
    settings = {"optimizer": "adagrad", "tables": {"tag": {"name": tag}, "user": {"name": "rowwise_adagrad"}}}
    assert failed_outcomes(run_on_ranks(2, run_with_fault, PLANS["row-wise"], None, settings)) == []


def read_learning_rates(rank, world):
    """Return the learning rates of all parameters at the third step of a warm-up, 3/4 of the full rate."""
    settings = make_small_config(
        world, PLANS["row-wise"], "adagrad", 0.1, {"tag": {"lr": 0.4}, "user": {"name": "adam"}}
    )
    settings.optim.schedule.warmup_steps = 3
    step = build_step_on_rank(settings)
    train_step(step, make_batches(2, rank, world)[1])
    return sorted({group["lr"] for group in step.optimizer.param_groups})


def test_schedule_scales_every_learning_rate():
    assert run_on_ranks(1, read_learning_rates)[0] == pytest.approx([0.075, 0.3])


def count_adam_calls(rank, world):
    """Return the number of Adam kernel calls per step."""
    from torch.profiler import profile

    step = build_step_on_rank(make_small_config(world, PLANS["row-wise"], "adam", 0.1))
    given = make_batches(2, rank, world)[1]
    train_step(step, given)
    with profile() as profiled:
        train_step(step, given)
    return {e.key: e.count / len(given) for e in profiled.key_averages() if "_fused_adam_" in e.key}


def test_dense_tables_are_updated_by_one_call():
    assert run_on_ranks(1, count_adam_calls)[0] == {"aten::_fused_adam_": 1}
