"""Checkpoints saved under one plan are restored bit-identically under every other plan, also for tables that
are looked up id by id."""

import itertools
import shutil
from pathlib import Path

import checkpoints
import pytest
import small
import torch
from ranks import run_on_ranks
from small import SCHEMA, make_small_config, train_step

from raytrec.config.features import resolve_features
from raytrec.config.models import PythonSection

# (world size, hosts, plan for all tables), with different kernels.
PLANS = {
    "row-wise@4": (4, 1, {"sharding_type": "row_wise"}),
    "table-wise@2": (2, 1, {"sharding_type": "table_wise"}),
    "grid@3": (3, 1, {"sharding_type": "grid_shard"}),
    "data-parallel@1": (1, 1, {"sharding_type": "data_parallel"}),
    "column-wise@2": (2, 1, {"sharding_type": "column_wise"}),
    "table-row-wise@4": (4, 2, {"sharding_type": "table_row_wise"}),
    "dense kernel@3": (3, 1, {"sharding_type": "row_wise", "compute_kernel": "dense"}),
    "uvm@2": (2, 1, {"sharding_type": "row_wise", "compute_kernel": "fused_uvm"}),
    "mmap@2": (2, 1, {"sharding_type": "row_wise", "compute_kernel": "fused_mmap"}),
    "data-parallel@3": (3, 1, {"sharding_type": "data_parallel"}),
    "table-wise@1": (1, 1, {"sharding_type": "table_wise"}),
}
# Plans of a model that reads pooled bags or looks up a sequence id by id.
SEQUENCE_PLANS = {
    "bags row-wise@2": (2, 1, {"sharding_type": "row_wise"}),
    "ids column-wise@2": (2, 1, {"sharding_type": "column_wise"}),
    "ids data-parallel@1": (1, 1, {"sharding_type": "data_parallel"}),
    "bags grid@2": (2, 1, {"sharding_type": "grid_shard"}),
    "ids row-wise@4": (4, 1, {"sharding_type": "row_wise"}),
    "ids table-wise@2": (2, 1, {"sharding_type": "table_wise", "compute_kernel": "dense"}),
}
SEQUENCES = SCHEMA.model_copy(deep=True)
SEQUENCES.sparse["friends"].pooling = "sequence"  # of user's table; at most 4 ids a row
COLUMN_PLANS = ("grid@3", "column-wise@2")  # row-wise Adagrad is refused for these
OPTIMIZERS = {
    "sgd": list(PLANS),
    "adagrad": list(PLANS),
    "rowwise_adagrad": [p for p in PLANS if p not in COLUMN_PLANS],
    "adam": [p for p in PLANS if p not in ("uvm@2", "mmap@2")],  # on CPU, Adam is a dense update
    "mixed": [p for p in PLANS if p not in ("uvm@2", "mmap@2")],
}
MIXED = {"user": {"name": "adam"}, "tag": {"name": "adagrad", "lr": 0.3}}  # plus averages of dense weights

FAST_PLANS = {
    "rowwise_adagrad": ["table-wise@2", "uvm@2", "row-wise@4", "mmap@2", "data-parallel@1"],
    "adam": ["column-wise@2", "dense kernel@3", "grid@3", "table-row-wise@4"],
    "mixed": ["table-wise@2", "row-wise@4", "data-parallel@1", "column-wise@2"],
}


def build_step_and_batches(name, optimizer, rank):
    """Return (a Step with this plan, this rank's part of five batches)."""
    world, _, plan = (PLANS | SEQUENCE_PLANS)[name]
    if optimizer == "mixed":
        settings = make_small_config(world, plan, "sgd", tables=MIXED, ema=0.7)
    else:
        settings = make_small_config(world, plan, optimizer)
    settings.optim.dense.name = "adam" if optimizer in ("adam", "mixed") else "adagrad"
    schema, features = SCHEMA, None
    if name in SEQUENCE_PLANS:
        length = 4 if name.startswith("ids") else None
        settings.model = PythonSection(name="mean_model:MeanModel", max_length=length)
        schema, features = SEQUENCES, resolve_features(SEQUENCES, settings.model)
    local = small.make_batches(5, rank, world, schema=schema, features=features)[1]
    return small.build_step_on_rank(settings, schema), local


def train_and_save(rank, world, name, optimizer, root):
    """Train a few steps and save."""
    step, local = build_step_and_batches(name, optimizer, rank)
    train_step(step, local[:3])
    return checkpoints.save_checkpoint(root, step, 3)


def restore_and_train_on(rank, world, name, optimizer, source, root):
    """Restore and save the restored state; then train further and save again."""
    step, local = build_step_and_batches(name, optimizer, rank)
    checkpoints.restore_newest(source, step)
    checkpoints.save_checkpoint(root, step, 3)
    train_step(step, local[3:])
    checkpoints.save_checkpoint(root, step, 5)


def make_cases():
    """Yield chains of plans: two with sequences, the most common plans, and all plans."""
    yield pytest.param("adagrad", list(SEQUENCE_PLANS)[:2], id="adagrad, sequences")
    for optimizer, plans in FAST_PLANS.items():
        yield pytest.param(optimizer, plans, marks=pytest.mark.slow, id=f"{optimizer}, common plans")
    for optimizer, plans in OPTIMIZERS.items():
        yield pytest.param(optimizer, plans, marks=pytest.mark.survive, id=f"{optimizer}, all plans")
    for optimizer in ("adam", "sgd"):
        yield pytest.param(optimizer, list(SEQUENCE_PLANS), marks=pytest.mark.survive, id=f"{optimizer}, all sequences")


@pytest.mark.parametrize(("optimizer", "plans"), make_cases())
def test_checkpoint_restores_under_other_plans(optimizer, plans, tmp_path):
    """Restore through a chain of plans on 1 to 4 ranks; every checkpoint of the same step equals the first."""
    known = PLANS | SEQUENCE_PLANS
    first = run_on_ranks(known[plans[0]][0], train_and_save, plans[0], optimizer, str(tmp_path / "0"))[0]
    values = checkpoints.read_tensors(first)
    kinds = {"sgd": 1, "adagrad": 2, "rowwise_adagrad": 2, "adam": 4, "mixed": 3}[optimizer]
    assert sum(name.startswith("tables/") for name in values) == kinds * len(SCHEMA.tables)
    named = [{n.rpartition("/")[0] for n in values if n.endswith(kind)} for kind in ("/value", "/ema")]
    assert named[1] == (named[0] if optimizer == "mixed" else set())
    assert all(value.abs().sum() > 0 for value in values.values())
    ends = {}
    for number, name in enumerate(plans[1:] + plans[:1]):
        world, hosts, _ = known[name]
        source, target = str(tmp_path / str(number)), str(tmp_path / str(number + 1))
        run_on_ranks(world, restore_and_train_on, name, optimizer, source, target, hosts=hosts)
        folder = f"{target}/step-{3:010d}"
        assert checkpoints.differing_tensors(first, folder) == [], f"{optimizer}: {name}"
        ends[name] = checkpoints.read_tensors(f"{target}/step-{5:010d}")
        shutil.rmtree(f"{target}/step-{5:010d}")
    # Further training gives the same results under all plans, up to the order of summation.
    for (one, a), (other, b) in itertools.pairwise(ends.items()):
        for key, value in a.items():
            torch.testing.assert_close(b[key], value, rtol=2e-4, atol=2e-5, msg=f"{one} → {other}: {key}")


BIG_SCHEMA = small.make_small_schema(
    sparse={"user": {"table": "user"}},
    tables={"user": {"rows": 4_000_000, "dim": 16}},  # 244 MiB, and 15 MiB of state
)


def read_resident_bytes(what):
    """Return a memory size of this process in bytes: VmRSS (current) or VmHWM (peak since the last reset)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(what))


def build_big_step(world, sharding, fill):
    from raytrec.worker.build import build_step

    settings = make_small_config(world, {"sharding_type": sharding}, "rowwise_adagrad")
    return build_step(settings, BIG_SCHEMA, torch.device("cpu"), fill=fill)[0]


def save_big(rank, world, root):
    checkpoints.save_checkpoint(root, build_big_step(world, "row_wise", True), 1, async_save=False)


def restore_big(rank, world, root):
    """Return (peak bytes added by the restore, bytes of this rank's shards, the last rows of the table)."""
    build_big_step(world, "row_wise", False)  # loads code and libraries
    Path("/proc/self/clear_refs").write_text("5")
    before = read_resident_bytes("VmRSS")
    state = checkpoints.restore_newest(root, build_big_step(world, "table_wise", False))
    held = sum(
        shard.values.nbytes
        for table in state.tables.values()
        for parts in (table.weight, *table.state.values())
        for shard in parts.local
    )
    return (read_resident_bytes("VmHWM") - before, held, state.tables["user"].weight.dense()[3_999_990:])


@pytest.mark.survive
def test_restore_memory_is_bounded_by_the_shards(tmp_path):
    """Restore a table saved row-wise on 2 ranks to one of 2 ranks: at most 1.2 × the shard bytes."""
    run_on_ranks(2, save_big, str(tmp_path))
    found = run_on_ranks(2, restore_big, str(tmp_path), hosts=2)
    grown, held, last = max(found, key=lambda f: f[1])
    assert held > 250e6
    assert grown < 1.2 * held, f"{grown / 2**20:.0f} MiB for {held / 2**20:.0f} MiB"
    assert torch.equal(last, small.initial_rows(BIG_SCHEMA, "user", 3, 3_999_990, 4_000_000))
