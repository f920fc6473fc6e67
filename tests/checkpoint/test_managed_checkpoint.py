"""Managed ids are saved in the middle of a pipelined run and restored on another number of ranks."""

from threading import Event

import checkpoints
import pytest
import torch
from managed_ids import ROWS, SEED, SPARSE, STEPS, TABLES, managed_config, managed_schema, random_id_batches
from plain_ids import ReferenceIdMap, splitmix64
from ranks import run_on_ranks
from small import build_step_on_rank

from raytrec.checkpoint.files import get_step_folder
from raytrec.checkpoint.index import read_index
from raytrec.checkpoint.restore import gather_ids, load_with_ids, read_id_rows, restore
from raytrec.checkpoint.rows import resolve_warm_starts
from raytrec.checkpoint.save import CheckpointWriter
from raytrec.checkpoint.snapshot import RowSnapshot
from raytrec.checkpoint.state import LogicalState
from raytrec.checks.parity.batches import compute_row_bounds, make_local_batch
from raytrec.common.errors import SchemaError
from raytrec.compat.torch_ import list_local_parts
from raytrec.config.training import CheckpointSection
from raytrec.worker.build import begin

MIDDLE_STEP = 3


def make_own_batches(rank, world):
    bounds = compute_row_bounds(ROWS, world, "unequal")
    return [make_local_batch(batch, managed_schema(), bounds, rank) for batch in random_id_batches()]


def run(rank, world, sharding, root, first, last, drained=()):
    """Train from step `first` with the state in `root`; save in the middle and at the end.

    Args:
        drained: steps after which the pipeline is drained.
    """
    made = managed_config(world, {"sharding_type": sharding}, "adagrad")
    step = build_step_on_rank(made, managed_schema())
    state, saver = LogicalState(step.model, step.optimizer), CheckpointWriter(root, made.checkpoint)
    found = restore(root, state, step.maps)
    assert bool(found.folder) == bool(first)
    if found.folder:
        step.trained = first
    local = make_own_batches(rank, world)
    # The pipeline prefetches all batches it can; it is drained before the middle is saved.
    step.drain_every, ahead = MIDDLE_STEP, []
    for number, _ in enumerate(step.train(iter(local[first:]), STEPS - first), first + 1):
        ahead.append(step.is_map_ahead)
        if number in drained:
            step.drain()
        if number in (MIDDLE_STEP, STEPS):
            ids, about = gather_ids(step.maps)
            saver.save(number, state.tensors(), about | {"schema": managed_schema().to_yaml()}, ids)
            assert saver.collect_outcome().error is None
        if number == last:
            break
    return ahead


@pytest.fixture(scope="module")
def uninterrupted_run(tmp_path_factory):
    """Return the checkpoint folder of an uninterrupted run on two ranks."""
    root = str(tmp_path_factory.mktemp("whole"))
    run_on_ranks(2, run, "row_wise", root, 0, STEPS)
    return root


def read_stored_ids(folder):
    return {name: v.tolist() for name, v in checkpoints.read_tensors(folder).items() if name.startswith("ids/")}


def test_checkpoint_holds_the_trained_ids(uninterrupted_run):
    for step in (MIDDLE_STEP, STEPS):
        stored = read_stored_ids(get_step_folder(uninterrupted_run, step))
        sizes = checkpoints.read_about(get_step_folder(uninterrupted_run, step))["ids"]
        for name in managed_schema().managed:
            table = managed_schema().tables[name]
            plain = ReferenceIdMap(table.rows, table.ids, SEED)
            features = [feature for feature, spec in SPARSE.items() if spec["table"] == name]
            for number, batch in enumerate(random_id_batches()[:step]):
                plain.step(number, [i for f in features for i in batch.bags[f][0].tolist()])
            ids = sorted(plain.rows, key=splitmix64)
            assert stored[f"ids/{name}/id"] == ids
            assert stored[f"ids/{name}/sightings"] == [plain.rows[i][1] for i in ids]
            assert stored[f"ids/{name}/last"] == [plain.rows[i][2] for i in ids]
            waiting = sorted(plain.waiting, key=splitmix64)
            assert stored.get(f"ids/{name}/waiting_id", []) == waiting
            counts = [plain.waiting[i][0] for i in waiting]
            assert stored.get(f"ids/{name}/waiting_sightings", []) == counts
            assert sizes[name]["rows"] == len(ids) and sizes[name]["waiting"] == len(waiting)
            assert len(stored.get(f"ids/{name}/left", [])) == sizes[name]["left"]


def return_to_middle(rank, world, whole):
    """Train, load the ids of an earlier step into the maps, and return (loaded, stored) tensors of ids."""
    step = build_step_on_rank(managed_config(world, {}, "adagrad"), managed_schema())
    list(step.train(iter(make_own_batches(rank, world)), STEPS))
    folder = get_step_folder(whole, MIDDLE_STEP)
    state = LogicalState(step.model, step.optimizer)
    load_with_ids(folder, state.tensors(), step.maps, read_index(folder)["about"])
    loaded = {name: list_local_parts(value)[0].tolist() for name, value in gather_ids(step.maps)[0].items()}
    return loaded, read_stored_ids(folder)


def test_run_returns_to_ids_of_an_earlier_step(uninterrupted_run):
    """With train.early_stopping.restore_best, the weights and ids of the best step replace those of the last one."""
    ((loaded, stored),) = run_on_ranks(1, return_to_middle, uninterrupted_run)
    assert loaded == stored


@pytest.mark.slow
@pytest.mark.parametrize("world,sharding", [(2, "row_wise"), (3, "table_wise"), (1, "row_wise")])
def test_managed_ids_resume_on_another_world_size(uninterrupted_run, world, sharding, tmp_path):
    root = str(tmp_path)
    run_on_ranks(2, run, "row_wise", root, 0, MIDDLE_STEP)
    run_on_ranks(world, run, sharding, root, MIDDLE_STEP, STEPS)
    folders = [get_step_folder(place, STEPS) for place in (uninterrupted_run, root)]
    one, other = map(checkpoints.read_tensors, folders)
    torch.testing.assert_close(other, one, rtol=0, atol=2e-6)
    differing = checkpoints.differing_tensors(*folders)
    assert not (differing if world == 2 else [name for name in differing if name.startswith("ids/")])


def test_draining_the_pipeline_does_not_change_training(uninterrupted_run, tmp_path):
    (ahead, other) = run_on_ranks(2, run, "row_wise", str(tmp_path), 0, STEPS, (4,))
    assert ahead == other, "all ranks prefetch at the same steps"
    assert ahead[0] and not ahead[MIDDLE_STEP - 1] and not ahead[2 * MIDDLE_STEP - 1] and not ahead[-1]
    folders = [get_step_folder(str(place), STEPS) for place in (tmp_path, uninterrupted_run)]
    assert checkpoints.differing_tensors(*folders) == []


def test_stored_rows_are_found_without_ranks(uninterrupted_run):
    folder = get_step_folder(uninterrupted_run, STEPS)
    stored, index = read_stored_ids(folder), read_index(folder)
    for name in managed_schema().managed:
        ids, table = stored[f"ids/{name}/id"], managed_schema().tables[name]
        found = read_id_rows(folder, index, name, table)(torch.tensor([*ids, 5, 6])).tolist()
        assert found[:-2] == stored[f"ids/{name}/row"] and min(found[-2:]) >= table.own_rows


def save_alone_and_concurrently(rank, world, root):
    """Save in the middle of training, synchronously and while rows get new ids; return both folders."""
    made = managed_config(world, {"sharding_type": "row_wise"}, "adagrad")
    step = build_step_on_rank(made, managed_schema())
    state, go = LogicalState(step.model, step.optimizer), Event()
    rows = RowSnapshot(step.model, state.tables)
    step.managed.on_write = rows.preserve_rows
    plain = rows.pieces
    rows.pieces = lambda *a, **k: go.wait(20) and plain(*a, **k)
    alone = CheckpointWriter(f"{root}/alone", CheckpointSection(async_save=False))
    beside = CheckpointWriter(f"{root}/next", CheckpointSection(), rows=rows)
    local = make_own_batches(rank, world)
    for number, _ in enumerate(step.train(iter(local), STEPS), 1):
        if number == MIDDLE_STEP:
            alone.save(number, state.tensors(), {})
            beside.save(number, state.tensors(), {})
    go.set()
    return [saver.collect_outcome().folder for saver in (alone, beside)]


def test_reassigned_rows_do_not_change_a_running_save(tmp_path):
    alone, beside = run_on_ranks(2, save_alone_and_concurrently, str(tmp_path))[0]
    assert checkpoints.differing_tensors(alone, beside) == []


def run_warm_start(rank, world, folder):
    """Warm-start from a checkpoint and train; return each table's keys, rows and last steps at the start."""
    made = managed_config(world, {"sharding_type": "row_wise"}, "adagrad")
    made.warm_start.from_ = folder
    step = build_step_on_rank(made, managed_schema())
    begin(step, made, managed_schema())
    states = {name: part.state().rows.in_order() for name, part in step.maps.items()}
    local = make_own_batches(rank, world)
    assert len(list(step.train(iter(local), STEPS))) == STEPS
    return {name: [v.tolist() for v in (e.keys, e.fields["row"], e.fields["last"])] for name, e in states.items()}


@pytest.mark.slow
def test_warm_start_takes_over_managed_ids(uninterrupted_run):
    folder = get_step_folder(uninterrupted_run, STEPS)
    stored, got = read_stored_ids(folder), run_on_ranks(3, run_warm_start, folder)
    for name in managed_schema().managed:
        keys, rows, last = ([v for answer in got for v in answer[name][i]] for i in range(3))
        assert keys == [splitmix64(i) for i in stored[f"ids/{name}/id"]]
        assert rows == stored[f"ids/{name}/row"] and set(last) == {-1}


def test_warm_start_rejects_another_number_of_hashed_rows():
    made = managed_config(1, {"sharding_type": "row_wise"}, "sgd")
    made.warm_start.tables = {"user": "resize"}
    old, new = (
        managed_schema({**TABLES, "user": {"rows": rows, "dim": 8, "out_of_range": "hash"}}) for rows in (15, 30)
    )
    with pytest.raises(SchemaError, match="15 × 8 with hashed ids in the checkpoint") as error:
        resolve_warm_starts(made, old, new)
    assert "set warm_start.tables.user=new, or" in error.value.do


@pytest.mark.parametrize(
    "table,policy,message",
    [
        ({"rows": 15, "dim": 8}, "exact", "15 × 8 in the schema, but 15 × 8 with managed ids"),
        ({"rows": 15, "dim": 8}, "resize", "warm_start.tables.user=new"),
        ({"rows": 20, "dim": 8, "ids": "managed"}, "resize", "warm_start.tables.user=new"),
        ({"rows": 15, "dim": 8, "ids": {"fallback_rows": 2}}, "exact", "(fallback rows: 2) in"),
    ],
)
def test_warm_start_rejects_incompatible_managed_tables(table, policy, message):
    made = managed_config(1, {"sharding_type": "row_wise"}, "sgd")
    made.warm_start.tables = {"user": policy}
    new = managed_schema({**TABLES, "user": table})
    with pytest.raises(SchemaError) as error:
        resolve_warm_starts(made, managed_schema(), new)
    assert message in str(error.value) and "data.schema=CHECKPOINT/checkpoint.json" in error.value.do
    made.warm_start.tables = {"user": "new"}
    assert resolve_warm_starts(made, managed_schema(), new)["user"].policy == "new"
