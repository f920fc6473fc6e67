"""Known TorchRec bugs, by issue number.

Each test shows that raytrec is correct, and incorrect without raytrec's correction.
"""

from contextlib import contextmanager, nullcontext
from unittest.mock import patch

import pytest
import torch
from ranks import run_on_ranks
from small import build_step_on_rank, make_small_config, make_small_schema
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from raytrec.checks.parity.compare import compare
from raytrec.common.errors import ConfigError, RunError
from raytrec.config.features import Features
from raytrec.config.run_config import load_config
from raytrec.embeddings import optim, pooling
from raytrec.embeddings.tables import tables
from raytrec.planning.validation import validate_constraints
from raytrec.tasks import objective
from raytrec.worker import build as building

MIN_FAULT_ERROR = 1e-3  # far above all limits of the parity check


def make_schema(**poolings):
    """Return a schema with one feature and one table of 23 rows for each pooling."""
    return make_small_schema(
        dense=["a"],
        sparse={name: {"table": name, "pooling": pooling} for name, pooling in poolings.items()},
        tables={name: {"rows": 23, "dim": 8} for name in poolings},
    )


@contextmanager
def disable_mean_division(schema):
    with patch.object(pooling.BagMeans, "forward", lambda self, sums, sparse: sums.to_dict()):
        yield


@contextmanager
def use_torchrec_means(schema):
    """Let TorchRec compute means itself, and disable raytrec's division."""

    def own(name, **values):
        kind = schema.sparse[name].pooling.upper()
        return EmbeddingBagConfig(name=name, **values | {"pooling": PoolingType[kind]})

    with patch.object(pooling, "EmbeddingBagConfig", own), disable_mean_division(schema):
        yield


def use_local_means(schema):
    """Let each rank's loss be the mean over its own rows, as in a loop without other ranks."""

    def mean(losses, weights, *_):
        return (losses * weights).sum() / weights.sum().clamp(min=1)

    return patch.object(objective, "rank_loss", mean)


def clip_without_tables(schema):
    return patch.object(optim, "iterate_sharded_kernels", lambda model: iter(()))


def measure_errors(rank, world, settings, schema, off):
    """Return the largest relative error of each check, with one correction switched off (None: all on)."""
    with off(schema) if off else nullcontext():
        found = compare(building.build_step, settings, schema, torch.device("cpu"), rows=12, steps=3)
    return {f.check: max(g.error for g in found if g.check == f.check) for f in found}


def run_parity(world, settings, schema, off=None, hosts=1):
    return run_on_ranks(world, measure_errors, settings, schema, off, hosts=hosts)[0]


def is_within_limits(found):
    return found["forward"] <= 1e-6 and found["gradient"] <= 1e-5 and found["weights"] <= 1e-4


ROW_WISE = {"sharding_type": "row_wise"}
TWO_WAYS = ["plan.tables.a.sharding_type=row_wise", "plan.tables.b.sharding_type=table_wise"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings,poolings,off,hosts",
    [
        # TorchRec divided each rank's part of a bag by that part's length. The pinned version is correct for
        # ROW_WISE and TABLE_ROW_WISE; raytrec never divides before the sum is global.
        (make_small_config(2, ROW_WISE, "sgd"), {"a": "mean", "b": "mean"}, disable_mean_division, 1),
        (load_config(make_small_config(2, {}, "sgd"), TWO_WAYS), {"a": "mean", "b": "sum"}, use_torchrec_means, 1),
        # Not reported upstream: there is no division at all.
        (make_small_config(4, {"sharding_type": "grid_shard"}, "sgd"), {"a": "mean"}, use_torchrec_means, 2),
    ],
    ids=["2362 mean under row-wise", "2808 mean next to sum", "mean under grid"],
)
def test_means_match_their_definition(settings, poolings, off, hosts):
    world, tables = settings.scaling.num_workers, make_schema(**poolings)
    assert is_within_limits(run_parity(world, settings, tables, hosts=hosts))
    assert run_parity(world, settings, tables, off, hosts=hosts)["forward"] > MIN_FAULT_ERROR


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["row_wise", "data_parallel"])
def test_2251_gradients_are_divided_by_the_world_size(sharding):
    """This is correct only for one definition of the loss; with unequal batches, the mean of local means is
    wrong."""
    settings, tables = make_small_config(2, {"sharding_type": sharding}, "sgd"), make_schema(a="sum")
    assert is_within_limits(run_parity(2, settings, tables))
    assert run_parity(2, settings, tables, use_local_means)["gradient"] > MIN_FAULT_ERROR


def test_2332_clipping_leaves_tables_out():
    settings = make_small_config(2, ROW_WISE, "sgd", lr=1.0, max_grad_norm=0.01)
    assert is_within_limits(run_parity(2, settings, make_schema(a="sum")))
    assert run_parity(2, settings, make_schema(a="sum"), clip_without_tables)["weights"] > MIN_FAULT_ERROR


def measure_cast_difference(rank, world, guarded):
    """Return the largest difference between a table's stored and looked-up values after a cast and a step."""
    step = build_step_on_rank(make_small_config(world, {"sharding_type": "data_parallel"}))
    if guarded:
        with pytest.raises(RunError, match="cast"):
            step.model.bfloat16()
    else:
        with patch.object(pooling.PooledEmbeddings, "before_cast", lambda *_: None):
            step.model.bfloat16()
            step.model.module.head.float()
    ids = KeyedJaggedTensor(
        ["user", "friends", "tags"],
        torch.cat([torch.arange(5)] * 3),
        torch.ones(15),
        lengths=torch.ones(15, dtype=torch.int32),
    )
    for table in tables(step.model).values():
        with torch.no_grad():
            table.parameter.sub_(1.0)
    looked_up = step.model.module.embeddings(ids)["user"].float()
    return float((looked_up - tables(step.model)["user"].weight.dense()[:5].float()).abs().max())


def test_2563_cast_separates_read_and_trained_weights():
    assert run_on_ranks(2, measure_cast_difference, True) == [0.0, 0.0]
    assert min(run_on_ranks(2, measure_cast_difference, False)) > MIN_FAULT_ERROR


def plan_missing_rank(rank, world):
    """Return TorchRec's error about a plan with a missing rank."""
    try:
        construct_module_sharding_plan(
            pooling.make_embedding_bags(Features(make_schema(a="sum"), {})),
            {"a": table_wise(rank=7)},
            EmbeddingBagCollectionSharder(),
            local_size=world,
            world_size=world,
            device_type="cpu",
        )
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def test_hand_written_plans_fail_early_and_clearly():
    settings = make_small_config(2, {"sharding_type": "table_wise", "ranks": [7]}, "sgd")
    with pytest.raises(ConfigError, match="cannot plan table a: there is no rank 7") as error:
        validate_constraints(settings, make_schema(a="sum"), "cpu", world=2)
    assert "ranks 0 to 1" in str(error.value)
    kind, text = run_on_ranks(2, plan_missing_rank)[0]
    assert (kind, "table a" in text) != ("ConfigError", True), "fixed upstream; remove this test"
