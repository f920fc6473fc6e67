"""Hot rows of file-backed tables that are cached in memory: which rows, saving, restoring and managed ids.

test_mapped.py trains with and without hot rows.
"""

from functools import partial
from threading import Event
from unittest.mock import patch

import checkpoints
import managed_ids
import pytest
import torch
from ranks import run_on_ranks
from small import build_step_on_rank, make_batches, make_small_config, train_step

from raytrec.checkpoint.save import CheckpointWriter
from raytrec.checkpoint.snapshot import RowSnapshot
from raytrec.checkpoint.state import LogicalState
from raytrec.checks.parity.sharded import ShardedRun
from raytrec.compat.fbgemm import find_resident_rows
from raytrec.compat.torchrec_ import iterate_sharded_kernels
from raytrec.config.training import CheckpointSection
from raytrec.embeddings.mapped import HotRowCache
from raytrec.embeddings.tables import tables
from raytrec.worker import build as building
from raytrec.worker.build import build_step

HOT_SHARE = 0.3  # share of rows in memory


def build_with_hot_rows(world, plan, optimizer, kernel, share, folder):
    """Build a Step whose tables keep this share of their rows in memory.

    The share is patched: for tables this small, TorchRec's planner counts more memory for ids than for rows.
    """
    made = make_small_config(world, plan | {"compute_kernel": kernel}, optimizer)
    made.plan.mmap_dir = folder
    with patch_hot_share(share):
        return build_step_on_rank(made)


def patch_hot_share(share):
    return patch.object(building, "estimate_hot_rows", lambda found, config, schema, world: [(share, 0.0)] * world)


def list_hot_caches(step):
    """Return the hot row cache of each kernel that has one."""
    return [hot for kernel in iterate_sharded_kernels(step.model) if (hot := find_resident_rows(kernel)) is not None]


def count_written_rows(places):
    """Return a list that records the number of rows each later call writes back to the file."""
    counts = []
    for hot in places:
        write = hot._write_back
        hot._write_back = lambda which, write=write: (counts.append(len(which)), write(which))
    return counts


def read_values(step):
    found = tables(step.model, step.optimizer).items()
    return {
        (name, kind): parts.dense()
        for name, table in found
        for kind, parts in {"weight": table.weight, **table.state}.items()
    }


def save_while_training(rank, world, kernel, share, folder):
    """Save during and after training; return the folders and the rows written back meanwhile."""
    step = build_with_hot_rows(world, {"sharding_type": "row_wise"}, "adagrad", kernel, share, folder)
    state, go = LogicalState(step.model, step.optimizer), Event()
    rows, local = RowSnapshot(step.model, state.tables), make_batches(16, rank, world)[1]
    read = rows.pieces
    rows.pieces = lambda *args, **named: go.wait(20) and read(*args, **named)
    train_step(step, local[:8])
    alone = checkpoints.save_checkpoint(f"{folder}/{kernel}-alone", step, 8)
    saver = CheckpointWriter(f"{folder}/{kernel}", CheckpointSection(keep_last=9), rows=rows)
    saver.save(8, state.tensors(), {})
    written = count_written_rows(list_hot_caches(step))
    train_step(step, local[8:])
    moved = sum(written)
    state.tensors()  # writes all rows back during the save
    go.set()
    first = saver.collect_outcome()
    if first.error:
        raise first.error
    saver.close()
    return alone, first.folder, checkpoints.save_checkpoint(f"{folder}/{kernel}-after", step, 16), moved


def resume_and_save(rank, world, kernel, share, folder):
    """Train, restore the checkpoint of two ranks and save it; train further and save again."""
    step = build_with_hot_rows(world, {"sharding_type": "table_wise"}, "adagrad", kernel, share, folder)
    local = make_batches(16, rank, world)[1]
    train_step(step, local[:4])
    checkpoints.restore_newest(f"{folder}/fused", step)
    again = checkpoints.save_checkpoint(f"{folder}/{kernel}-{world}-begun", step, 8)
    assert not any(hot._filled for hot in list_hot_caches(step))
    train_step(step, local[8:])
    assert not share or all(hot._filled for hot in list_hot_caches(step))
    return again, checkpoints.save_checkpoint(f"{folder}/{kernel}-{world}", step, 16)


@pytest.mark.slow
def test_hot_rows_save_and_resume_like_tables_in_memory(tmp_path):
    folder = str(tmp_path)
    of_memory, found = (
        run_on_ranks(2, save_while_training, kernel, share, folder)[0]
        for kernel, share in (("fused", 0.0), ("fused_mmap", 0.5))
    )
    assert found[3] > 0
    for one, other in zip(of_memory[:3], found[:3], strict=True):
        assert checkpoints.differing_tensors(one, other) == []
    assert checkpoints.differing_tensors(found[0], found[1]) == [] != checkpoints.differing_tensors(found[1], found[2])
    begun, expected = run_on_ranks(1, resume_and_save, "fused", 0.0, folder)[0]
    hot_begun, hot = run_on_ranks(1, resume_and_save, "fused_mmap", HOT_SHARE, folder)[0]
    assert checkpoints.differing_tensors(begun, hot_begun) == [] == checkpoints.differing_tensors(begun, of_memory[0])
    assert checkpoints.differing_tensors(expected, hot) == []


def train_with_managed_ids(rank, world, kernel, share, folder):
    made = managed_ids.managed_config(world, {"sharding_type": "row_wise", "compute_kernel": kernel}, "adagrad")
    made.plan.mmap_dir = folder
    with patch_hot_share(share):
        bounds = [0, 5, managed_ids.ROWS]
        run = ShardedRun(build_step, made, managed_ids.managed_schema(), torch.device("cpu"), bounds)
    run.train(managed_ids.random_id_batches())
    return read_values(run.step), sum(hot._filled for hot in list_hot_caches(run.step))


@pytest.mark.slow
def test_reassigned_hot_rows_start_with_initial_values(tmp_path):
    (expected, _), _ = run_on_ranks(2, train_with_managed_ids, "fused", 0.0, str(tmp_path))
    (found, filled), _ = run_on_ranks(2, train_with_managed_ids, "fused_mmap", 0.9, str(tmp_path))
    assert filled and expected.keys() == found.keys()
    assert all(torch.equal(expected[key], found[key]) for key in expected)


def test_cache_evicts_only_rows_not_in_use():
    weights = torch.arange(12.0).reshape(12, 1).repeat(1, 4)
    hot = HotRowCache([weights], 10)  # plus two cache slots
    look_up = partial(hot.look_up, trains=True)
    for times in (1, 2, 3):
        assert look_up(torch.tensor([7, 3])).tolist() == ([7, 3] if times < 3 else [11, 10])
    weights[10:] += 100  # simulate an update of cached rows
    for times in (1, 2, 3, 4):  # at the third lookup the clock hand finds both in use
        assert look_up(torch.tensor([7, 5, 5])).tolist() == ([11, 5, 5] if times < 4 else [11, 10, 10])
    assert weights[:, 0].tolist() == [0, 1, 2, 103, 4, 5, 6, 7, 8, 9, 5, 107]
    assert hot.look_up(torch.tensor([3, 7]), trains=False).tolist() == [3, 11]
    assert hot.read(weights[:10], torch.tensor([7, 3]))[:, 0].tolist() == [107, 103]
    assert hot.take_hit_share() == 4 / 18 and hot.take_hit_share() is None
    hot.flush()
    assert weights[:10, 0].tolist() == [0, 1, 2, 103, 4, 5, 6, 107, 8, 9]
