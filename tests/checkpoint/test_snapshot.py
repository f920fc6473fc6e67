"""Tables saved while training changes them: the checkpoint holds the state at the start of the save."""

from threading import Event, Timer

import checkpoints
import pytest
from ranks import run_on_ranks
from small import build_step_on_rank, make_batches, make_small_config, train_step

from raytrec.checkpoint import snapshot
from raytrec.checkpoint.save import CheckpointWriter
from raytrec.checkpoint.state import LogicalState
from raytrec.compat.torch_ import list_local_parts
from raytrec.config.training import CheckpointSection

CASES = {
    "rows": ({"sharding_type": "row_wise"}, "rowwise_adagrad", 2),
    "columns": ({"sharding_type": "column_wise"}, "adagrad", 2),
    "whole": ({"sharding_type": "table_wise"}, "sgd", 2),
    "files": ({"sharding_type": "row_wise", "compute_kernel": "fused_mmap"}, "rowwise_adagrad", 3),
    "a dense update": ({"sharding_type": "row_wise", "compute_kernel": "dense"}, "adagrad", 2),
    "copies": ({"sharding_type": "data_parallel"}, "adagrad", 2),
}


def save_alone_and_concurrently(rank, world, plan, optimizer, root, room):
    """Save once while training is paused, and once at the same step while training continues.

    Args:
        room: bytes reserved for rows that are set aside, or None.

    Returns:
        The folders, the names of copied tensors, and how often training reported a wait.
    """
    step = build_step_on_rank(make_small_config(world, plan, optimizer))
    state, local = LogicalState(step.model, step.optimizer), make_batches(8, rank, world)[1]
    go, waits = Event(), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshot, "WAIT_INTERVAL_S", 0.01)
        if room is not None:
            patch.setattr(snapshot, "MIN_ASIDE_BYTES", room)
        rows = snapshot.RowSnapshot(step.model, state.tables, lambda: waits.append(1))
        plain = rows.pieces
        patch.setattr(rows, "pieces", lambda *a, **k: go.wait(20) and plain(*a, **k))
        train_step(step, local[:3])
        folders = [checkpoints.save_checkpoint(f"{root}/alone", step, 3, async_save=False)]
        beside = CheckpointWriter(f"{root}/next", CheckpointSection(), rows=rows)
        copied, copy = set(), beside._host.copy

        def note(tensors):
            copied.update(name for name, value in tensors.items() if list_local_parts(value))
            return copy(tensors)

        patch.setattr(beside._host, "copy", note)
        for number, batch in enumerate(local[3:5]):  # twice, so that slots are reused
            beside.save(3 + number, state.tensors(), {})
            if room is not None:
                Timer(0.3, go.set).start()
            train_step(step, [batch])
            go.set()
            outcome = beside.collect_outcome()
            if outcome.error:
                raise outcome.error
            folders.append(outcome.folder)
            if not number:
                folders.append(checkpoints.save_checkpoint(f"{root}/alone", step, 4, async_save=False))
            go.clear()
    assert all(not shard._aside and not len(shard._slots) for shard in rows._shards.values())
    return folders, copied, len(waits)


@pytest.mark.slow
@pytest.mark.parametrize("way,room", [*((way, None) for way in CASES), ("rows", 100)])
def test_concurrent_save_matches_a_standalone_save(way, room, tmp_path):
    plan, optimizer, world = CASES[way]
    found = run_on_ranks(world, save_alone_and_concurrently, plan, optimizer, str(tmp_path), room)
    folders, copied, _ = found[0]
    alone, beside, later_alone, later_beside = folders
    assert checkpoints.differing_tensors(alone, beside) == []
    assert checkpoints.differing_tensors(later_alone, later_beside) == []
    assert checkpoints.differing_tensors(alone, later_alone) != [], "the step between the saves changed the state"
    assert any(name.startswith("tables/") for name in copied) == (way in ("a dense update", "copies"))
    assert all(bool(waits) == bool(room) for *_, waits in found), "training waits only without space"
