"""The parity comparison detects differences in tables, dense layers and replicas."""

import pytest
import torch
from ranks import run_on_ranks
from small import SCHEMA, SMALL_SCHEMA_PARTS, make_small_config, make_small_schema

from raytrec.checks.parity.compare import compare
from raytrec.config.run_config import load_config
from raytrec.config.tables import Schedule
from raytrec.embeddings.tables import tables
from raytrec.worker.build import build_step


def compare_steps(rank, world, settings, device="cpu", steps=2, build=None, schema=SCHEMA):
    """Return the findings of some steps as (check, name, whether the error is within its limit)."""
    given = settings.model_copy(deep=True)
    found = compare(build or build_step, settings, schema, torch.device(device), rows=12, steps=steps)
    assert settings == given, "compare() changed its argument"
    return [(f.check, f.name, f.error <= f.limit) for f in found]


def find_failures(found):
    return {name for _, name, well in found if not well}


def compare_with_moved_replica(rank, world, part, where):
    """Move one rank's copy of a value by 0.01 before the first step; return the names that fail."""

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


def make_sequence_config(sharding):
    model = {"name": "sequence", "max_length": 3, "target": "user", "top_mlp": [6]}
    return make_small_config(2, {"sharding_type": sharding}, model=model, max_grad_norm=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings,pooling",
    [
        (make_small_config(2, {"sharding_type": "table_wise", "dtype": "fp16"}), "mean"),
        (make_small_config(2, {"sharding_type": "data_parallel"}, "adam"), "mean"),
        # Two tables share one lookup, and ranks exchange distinct ids.
        *((make_sequence_config(sharding), "sequence") for sharding in ("row_wise", "column_wise", "table_wise")),
    ],
    ids=["fp16", "copies", "row-wise sequences", "column-wise sequences", "table-wise sequences"],
)
def test_gpu_ranks_match_one_cpu_process(settings, pooling):
    sparse = {
        name: spec | {"pooling": pooling} if "pooling" in spec else spec
        for name, spec in SMALL_SCHEMA_PARTS["sparse"].items()
    }
    schema = make_small_schema(sparse=sparse)
    found = run_on_ranks(2, compare_steps, settings, "cuda", 2, None, schema, device="cuda")[0]
    assert {check for check, _, _ in found} == {"forward", "gradient", "weights", "state"} and not find_failures(found)


COSINE = ["optim.schedule={warmup_steps: 3, decay: cosine, decay_steps: 6}"]
DENSE_CLIPPED = ["train.max_grad_norm=0.01", "train.clip_tables=false"]
DENSE_CLIPPED += ["optim.dense={name: adam, lr: 0.01, betas: [0.5, 0.9]}"]


@pytest.mark.parametrize(
    "sharding,changes,steps",
    [
        pytest.param("row_wise", COSINE, 12, marks=pytest.mark.slow),
        pytest.param("data_parallel", COSINE, 12, marks=pytest.mark.slow),
        pytest.param("row_wise", ["optim.schedule.decay=linear"], 12, marks=pytest.mark.slow),  # until the last step
        ("row_wise", DENSE_CLIPPED, 2),
        ("data_parallel", DENSE_CLIPPED, 2),
        ("row_wise", ["plan.qcomms={forward_precision: bf16, backward_precision: bf16}"], 2),
    ],
    ids=["cosine, row-wise", "cosine, copies", "linear", "clipped, row-wise", "clipped, copies", "qcomms are ignored"],
)
def test_parity_holds_with_training_options(sharding, changes, steps):
    settings = load_config(make_small_config(2, {"sharding_type": sharding}, "sgd"), changes)
    found = run_on_ranks(2, compare_steps, settings, "cpu", steps)[0]
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
