"""Managed ids are saved in the middle of a pipelined run and restored on another number of ranks."""

from threading import Event

import checkpoints
import pytest
import torch
from managed_ids import ROWS, SEED, SPARSE, STEPS, TABLES, raw_batches, schema, settings
from plain_ids import PlainIds, key
from ranks import on_ranks
from small import build

from raytrec.checkpoint.files import folder_of
from raytrec.checkpoint.index import read_index
from raytrec.checkpoint.managed import allocate_ids, find_stored_rows, gather_ids, load_ids
from raytrec.checkpoint.restore import restore
from raytrec.checkpoint.rows import resolve_warm_starts
from raytrec.checkpoint.save import CheckpointWriter
from raytrec.checkpoint.state import LogicalState
from raytrec.checks.parity.batches import cuts, make_local_batch
from raytrec.common.errors import SchemaError
from raytrec.config.training import CheckpointSection
from raytrec.worker.build import begin
from raytrec.worker.checkpointing import make_row_snapshot

MIDDLE = 3


def own_batches(rank, world):
    return [make_local_batch(b, schema(), cuts(ROWS, world, "unequal"), rank) for b in raw_batches()]


def run(rank, world, sharding, root, first, last, drained=()):
    """Train from step `first` with the state in `root`; save in the middle and at the end.

    Args:
        drained: steps after which the pipeline is drained.
    """
    made = settings(world, {"sharding_type": sharding}, "adagrad")
    step = build(made, schema())
    state, saver = LogicalState(step.model, step.optimizer), CheckpointWriter(root, made.checkpoint)
    found = restore(root, state, more=lambda about: allocate_ids(about, step.maps))
    assert bool(found.folder) == bool(first)
    if found.folder:
        load_ids(step.maps, found.more, found.about)
        step.trained = first
    local = own_batches(rank, world)
    # The pipeline prefetches all batches it can; it is drained before the middle is saved.
    step.drain_every, ahead = MIDDLE, []
    for number, _ in enumerate(step.train(iter(local[first:]), STEPS - first), first + 1):
        ahead.append(step.ahead)
        if number in drained:
            step.drain()
        if number in (MIDDLE, STEPS):
            ids, about = gather_ids(step.maps)
            saver.save(number, state.tensors(), about | {"schema": schema().to_yaml()}, ids)
            assert saver.taken().error is None
        if number == last:
            break
    return ahead


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return the checkpoint folder of an uninterrupted run on two ranks."""
    root = str(tmp_path_factory.mktemp("whole"))
    on_ranks(2, run, "row_wise", root, 0, STEPS)
    return root


def ids_of(folder):
    return {name: v.tolist() for name, v in checkpoints.whole(folder).items() if name.startswith("ids/")}


def test_checkpoint_holds_the_trained_ids(undisturbed):
    for step in (MIDDLE, STEPS):
        stored = ids_of(folder_of(undisturbed, step))
        sizes = checkpoints.about(folder_of(undisturbed, step))["ids"]
        for name in schema().managed:
            plain = PlainIds(schema().tables[name].rows, schema().tables[name].ids, SEED)
            features = [feature for feature, spec in SPARSE.items() if spec["table"] == name]
            for number, batch in enumerate(raw_batches()[:step]):
                plain.step(number, [i for f in features for i in batch.bags[f][0].tolist()])
            ids = sorted(plain.rows, key=key)
            assert stored[f"ids/{name}/id"] == ids
            assert stored[f"ids/{name}/sightings"] == [plain.rows[i][1] for i in ids]
            assert stored[f"ids/{name}/last"] == [plain.rows[i][2] for i in ids]
            waiting = sorted(plain.waiting, key=key)
            assert stored.get(f"ids/{name}/waiting_id", []) == waiting
            counts = [plain.waiting[i][0] for i in waiting]
            assert stored.get(f"ids/{name}/waiting_sightings", []) == counts
            assert sizes[name]["rows"] == len(ids) and sizes[name]["waiting"] == len(waiting)
            assert len(stored.get(f"ids/{name}/left", [])) == sizes[name]["left"]


@pytest.mark.parametrize("world,sharding", [(2, "row_wise"), (3, "table_wise"), (1, "row_wise")])
def test_managed_ids_resume_on_another_world_size(undisturbed, world, sharding, tmp_path):
    root = str(tmp_path)
    on_ranks(2, run, "row_wise", root, 0, MIDDLE)
    on_ranks(world, run, sharding, root, MIDDLE, STEPS)
    one, other = (checkpoints.whole(folder_of(place, STEPS)) for place in (undisturbed, root))
    assert ids_of(folder_of(root, STEPS)) == ids_of(folder_of(undisturbed, STEPS))
    if world == 2:
        assert checkpoints.equal(folder_of(root, STEPS), folder_of(undisturbed, STEPS)) == []
    for name in one:
        torch.testing.assert_close(other[name], one[name], rtol=0, atol=2e-6)


def test_draining_the_pipeline_does_not_change_training(undisturbed, tmp_path):
    (ahead, other) = on_ranks(2, run, "row_wise", str(tmp_path), 0, STEPS, (4,))
    assert ahead == other, "all ranks prefetch at the same steps"
    assert ahead[0] and not ahead[MIDDLE - 1] and not ahead[2 * MIDDLE - 1] and not ahead[-1]
    assert checkpoints.equal(folder_of(str(tmp_path), STEPS), folder_of(undisturbed, STEPS)) == []


def test_stored_rows_are_found_without_ranks(undisturbed):
    folder = folder_of(undisturbed, STEPS)
    stored, index = ids_of(folder), read_index(folder)
    for name in schema().managed:
        ids, table = stored[f"ids/{name}/id"], schema().tables[name]
        found = find_stored_rows(folder, index, name, table, torch.tensor([*ids, 5, 6])).tolist()
        assert found[:-2] == stored[f"ids/{name}/row"] and min(found[-2:]) >= table.own_rows


def saved_beside(rank, world, root):
    """Save in the middle of training, once synchronously and once while rows get new ids; return both
    folders."""
    made = settings(world, {"sharding_type": "row_wise"}, "adagrad")
    step = build(made, schema())
    state, go = LogicalState(step.model, step.optimizer), Event()
    rows = make_row_snapshot(step, state, lambda: None)
    plain = rows.pieces
    rows.pieces = lambda *a, **k: go.wait(20) and plain(*a, **k)
    alone = CheckpointWriter(f"{root}/alone", CheckpointSection(async_save=False))
    beside = CheckpointWriter(f"{root}/next", CheckpointSection(), rows=rows)
    local = own_batches(rank, world)
    for number, _ in enumerate(step.train(iter(local), STEPS), 1):
        if number == MIDDLE:
            alone.save(number, state.tensors(), {})
            beside.save(number, state.tensors(), {})
    go.set()
    return [saver.taken().folder for saver in (alone, beside)]


def test_reassigned_rows_do_not_change_a_running_save(tmp_path):
    alone, beside = on_ranks(2, saved_beside, str(tmp_path))[0]
    assert checkpoints.equal(alone, beside) == []


def warmed(rank, world, folder):
    """Warm-start from a checkpoint and train; return each table's keys, rows and last steps at the start."""
    made = settings(world, {"sharding_type": "row_wise"}, "adagrad")
    made.warm_start.from_ = folder
    step = build(made, schema())
    begin(step, made, schema())
    states = {name: part.state().rows.in_order() for name, part in step.maps.items()}
    local = own_batches(rank, world)
    assert len(list(step.train(iter(local), STEPS))) == STEPS
    return {
        name: [values.tolist() for values in (e.keys, e.fields["row"], e.fields["last"])]
        for name, e in states.items()
    }


def test_warm_start_takes_over_managed_ids(undisturbed):
    folder = folder_of(undisturbed, STEPS)
    stored, got = ids_of(folder), on_ranks(3, warmed, folder)
    for name in schema().managed:
        keys, rows, last = ([v for answer in got for v in answer[name][i]] for i in range(3))
        assert keys == [key(i) for i in stored[f"ids/{name}/id"]]
        assert rows == stored[f"ids/{name}/row"] and set(last) == {-1}


@pytest.mark.parametrize(
    "table,policy,message",
    [
        ({"rows": 15, "dim": 8}, "exact", "15 × 8 in the schema, but 15 × 8 with managed ids"),
        ({"rows": 15, "dim": 8}, "resize", "warm_start.tables.user=new"),
        ({"rows": 20, "dim": 8, "ids": "managed"}, "resize", "warm_start.tables.user=new"),
        ({"rows": 15, "dim": 8, "ids": {"fallback_rows": 2}}, "exact", "2 of the rows for the fallback in"),
    ],
)
def test_warm_start_rejects_incompatible_managed_tables(table, policy, message):
    made = settings(1, {"sharding_type": "row_wise"}, "sgd")
    made.warm_start.tables = {"user": policy}
    new = schema({**TABLES, "user": table})
    with pytest.raises(SchemaError) as error:
        resolve_warm_starts(made, schema(), new)
    assert message in str(error.value)
    made.warm_start.tables = {"user": "new"}
    assert resolve_warm_starts(made, schema(), new)["user"].policy == "new"
