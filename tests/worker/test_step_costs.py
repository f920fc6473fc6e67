"""Upper bounds for counted costs of an ordinary step: no report, record, check or checkpoint.

Two ranks train the model of helpers/small.py: two row-wise tables, three features, one of them weighted. A
bound is the current count plus a small margin for differences between steps. A higher bound needs a comment.
"""

import sys
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
from loop import make_worker_loop
from ranks import run_on_ranks
from small import make_small_schema

import raytrec

WARMUP_STEPS, COUNTED_STEPS = 8, 8  # HELD in metrics.sums is also 8; the first sum imports modules
PACKAGE_DIR = str(Path(raytrec.__file__).parent)
MAX_COSTS = {
    # Of the next batch: lengths, ids and weights of ids. Of this batch: pooled embeddings (reduce-scatter),
    # their gradients (all-gather), dense gradients, and the ranks' agreement.
    "collectives": 8,
    # Calls of raytrec's functions; other calls come from TorchRec's pipeline, torch's modules and autograd.
    "own calls": 280,  # 32 of them replace profiler marks, which need many more calls
    "calls": 1760,
    # Operators of torch, without nested calls.
    "operators": 256,
    "marks for a profiler": 0,
    "copies": 7,
    "allocations": 11,
}
COPIES = {"aten::copy_", "aten::_to_copy", "aten::clone"}
ALLOCATIONS = ("empty", "zeros", "ones")


def measure_costs(rank, world, folder):
    """Return the costs of one step, averaged over COUNTED_STEPS."""
    import torch
    from operators import OperatorCounter

    changes = ["tracking.every_steps=1000", "train.log_every_steps=1000", "checkpoint.every_s=null"]
    loop = make_worker_loop(rank, world, WARMUP_STEPS + 2 * COUNTED_STEPS + 4, changes, folder)
    torch.set_num_threads(1)
    calls = Counter()

    def note(frame, event, _):
        if event == "call":
            calls["calls"] += 1
            calls["own calls"] += frame.f_code.co_filename.startswith(PACKAGE_DIR)

    steps = loop.step.train(loop.batches, WARMUP_STEPS + 2 * COUNTED_STEPS)

    def train(count):
        for outputs in islice(steps, count):
            loop.progress.count(12, outputs)
            for observer in loop.observers:
                observer.after_step(12)
            loop.checkpoints.after_step(outputs)

    for observer in loop.observers:
        observer.begin()
    train(WARMUP_STEPS)
    sys.setprofile(note)
    train(COUNTED_STEPS)
    sys.setprofile(None)
    with OperatorCounter() as operators:
        train(COUNTED_STEPS)
    called = operators.calls
    found = {
        **calls,
        "collectives": sum(n for name, n in called.items() if name.startswith("c10d::")),
        "operators": sum(n for name, n in called.items() if name.startswith("aten::")),
        "marks for a profiler": sum(n for name, n in called.items() if name.startswith("profiler::")),
        "copies": sum(called[name] for name in COPIES),
        "allocations": sum(n for name, n in called.items() if any(word in name for word in ALLOCATIONS)),
    }
    return {name: n / COUNTED_STEPS for name, n in found.items()}


@pytest.fixture(scope="module")
def step_costs(tmp_path_factory):
    return run_on_ranks(2, measure_costs, str(tmp_path_factory.mktemp("run")))[0]


@pytest.mark.parametrize("what", MAX_COSTS)
def test_step_cost_stays_within_bound(step_costs, what):
    assert MAX_COSTS[what] * 0.7 <= step_costs[what] <= MAX_COSTS[what], "lower the bound if the cost is far below it"


def count_collectives(rank, world, tables):
    """Return the collectives of a step over three sequences that are looked up id by id in these tables."""
    from operators import OperatorCounter
    from small import build_step_on_rank, make_batches, make_small_config

    from raytrec.config.features import resolve_features

    sparse = {name: {"table": table, "pooling": "sequence"} for name, table in zip("abc", tables, strict=True)}
    sparse["target"] = {"table": tables[0]}
    schema = make_small_schema(sparse=sparse, tables={table: {"rows": 40, "dim": 8} for table in tables})
    model = {"name": "sequence", "max_length": 3, "target": "target", "top_mlp": [6]}
    settings = make_small_config(world, {"sharding_type": "row_wise"}, model=model)
    step = build_step_on_rank(settings, schema)
    local = make_batches(12, rank, world, schema=schema, features=resolve_features(schema, settings.model))[1]
    steps = step.train(iter(local), len(local))
    list(islice(steps, 4))
    with OperatorCounter() as operators:
        list(islice(steps, 4))
    return sum(n for name, n in operators.calls.items() if name.startswith("c10d::")) / 4


@pytest.mark.slow
def test_sequence_tables_of_equal_dim_share_collectives():
    one, three = (run_on_ranks(2, count_collectives, tables)[0] for tables in ("xxx", "xyz"))
    assert one == three > 0


def measure_checkpoint_bytes(rank, world, folder):
    """Return the checkpoint sizes in bytes of models whose tables have 1,000 and 3,000 rows."""
    sizes = []
    for rows in (1000, 3000):
        tables = {"user": {"rows": rows, "dim": 8}, "tag": {"rows": 5, "dim": 8}}
        loop = make_worker_loop(rank, world, 1, [], f"{folder}/{rows}", schema=make_small_schema(tables=tables))
        assert loop.train(1).error is None
        sizes.append(sum(path.stat().st_size for path in Path(folder, str(rows)).rglob("*") if path.is_file()))
    return sizes


@pytest.mark.slow
def test_checkpoint_row_holds_only_weights_and_state(tmp_path):
    ((small, large),) = run_on_ranks(1, measure_checkpoint_bytes, str(tmp_path))
    assert (large - small) / 2000 == pytest.approx(8 * 4 + 8 * 4, abs=0.5)  # Adagrad: one float per weight
