"""The parity comparison detects differences in tables, dense layers and replicas."""

import pytest
import torch
from ranks import run_on_ranks
from small import SCHEMA, SMALL_SCHEMA_PARTS, make_small_config, make_small_schema

from raytrec.config.tables import DenseOptim, QCommsSection, Schedule


def compare_steps(rank, world, settings, device="cpu", steps=2, build=None, schema=SCHEMA):
    """Return the findings of some steps as (check, name, whether the error is within its limit)."""
    from raytrec.checks.parity.compare import compare
    from raytrec.worker.build import build_step

    given = settings.model_copy(deep=True)
    found = compare(build or build_step, settings, schema, torch.device(device), rows=12, steps=steps)
    assert settings == given, "compare() changed its argument"
    return [(f.check, f.name, f.error <= f.limit) for f in found]


def find_failures(found):
    return {name for _, name, well in found if not well}


def compare_with_moved_replica(rank, world, part, where):
    """Move one rank's copy of a value by 0.01 before the first step; return the names that fail."""
    from raytrec.embeddings.tables import tables
    from raytrec.worker.build import build_step

    def build(*args):
        step, plan = build_step(*args)
        with torch.no_grad():
            if rank == where and part == "table":
                tables(step.model)["user"].weight.local[0].values[3, 2] += 0.01
            elif rank == where:
                next(step.model.module.head.model.logit.parameters())[0, 0] += 0.01
        return step, plan

    return find_failures(
        compare_steps(rank, world, make_small_config(world, {"sharding_type": "data_parallel"}, "sgd"), build=build)
    )


@pytest.mark.slow
@pytest.mark.parametrize("part,name", [("table", "user"), ("dense", "logit.weight")])
def test_parity_detects_differing_replicas(part, name):
    assert run_on_ranks(2, compare_with_moved_replica, part, None)[0] == set()
    assert name in run_on_ranks(2, compare_with_moved_replica, part, 1)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan,optimizer",
    [({"sharding_type": "table_wise", "dtype": "fp16"}, "adagrad"), ({"sharding_type": "data_parallel"}, "adam")],
)
def test_gpu_ranks_match_one_cpu_process(plan, optimizer):
    found = run_on_ranks(2, compare_steps, make_small_config(2, plan, optimizer), "cuda", device="cuda")[0]
    assert {check for check, _, _ in found} == {"forward", "gradient", "weights", "state"} and not find_failures(found)


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["row_wise", "column_wise", "table_wise"])
def test_gpu_sequence_lookups_match_one_cpu_process(sharding):
    """Two tables share one lookup, and ranks exchange distinct ids."""
    sparse = {
        name: spec | {"pooling": "sequence"} if "pooling" in spec else spec
        for name, spec in SMALL_SCHEMA_PARTS["sparse"].items()
    }
    model = {"name": "sequence", "max_length": 3, "target": "user", "top_mlp": [6]}
    settings = make_small_config(2, {"sharding_type": sharding}, model=model, max_grad_norm=0.05)
    found = run_on_ranks(2, compare_steps, settings, "cuda", 2, None, make_small_schema(sparse=sparse), device="cuda")[
        0
    ]
    assert {check for check, _, _ in found} == {"forward", "gradient", "weights", "state"} and not find_failures(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sharding", "schedule"),
    [
        ("row_wise", Schedule(warmup_steps=3, decay="cosine", decay_steps=6)),
        ("data_parallel", Schedule(warmup_steps=3, decay="cosine", decay_steps=6)),
        ("row_wise", Schedule(decay="linear")),  # decays until the end of the run
    ],
)
def test_parity_follows_learning_rate_schedules(sharding, schedule):
    settings = make_small_config(2, {"sharding_type": sharding}, "sgd")
    settings.optim.schedule = schedule
    found = run_on_ranks(2, compare_steps, settings, "cpu", 12)[0]
    assert len(found) > 10 and not find_failures(found)


@pytest.mark.parametrize("sharding", ["row_wise", "data_parallel"])
def test_parity_holds_if_only_dense_gradients_are_clipped(sharding):
    settings = make_small_config(2, {"sharding_type": sharding}, max_grad_norm=0.01, clip_tables=False)
    settings.optim.dense = DenseOptim(name="adam", lr=0.01, betas=(0.5, 0.9))
    found = run_on_ranks(2, compare_steps, settings)[0]
    assert len(found) > 10 and not find_failures(found)


def test_parity_ignores_configured_qcomms():
    settings = make_small_config(2, {"sharding_type": "row_wise"}, "sgd")
    settings.plan.qcomms = QCommsSection(forward_precision="bf16", backward_precision="bf16")
    found = run_on_ranks(2, compare_steps, settings)[0]
    assert len(found) > 10 and not find_failures(found)


def test_schedule_factors_match_their_definition():
    schedule = Schedule(warmup_steps=4, decay="linear", decay_steps=10)
    assert [schedule.compute_factor(s) for s in (0, 3, 4, 9, 14, 99)] == pytest.approx([0.2, 0.8, 1, 0.5, 0, 0])
    assert Schedule(decay="cosine", decay_steps=10).compute_factor(5) == pytest.approx(0.5)
    assert Schedule().compute_factor(10**6) == 1
    whole = Schedule(warmup_steps=4, decay="linear").resolve_decay_steps(14)
    assert [whole.compute_factor(step) for step in (3, 4, 9, 14)] == pytest.approx([0.8, 1, 0.5, 0])
    assert schedule.resolve_decay_steps(1000) == schedule and Schedule().resolve_decay_steps(5) == Schedule()
    with pytest.raises(ValueError, match="decay is constant"):
        Schedule(decay_steps=3)
