"""Checkpoint saves: nonfinite state is rejected, and older checkpoints are removed on a full disk."""

from pathlib import Path

import checkpoints
import pytest
import torch
from disks import small_disk
from ranks import run_on_ranks
from small import build_step_on_rank, make_small_config

from raytrec.checkpoint import files, save
from raytrec.checkpoint.files import remove_oldest, steps
from raytrec.checkpoint.index import write_index
from raytrec.checkpoint.restore import restore
from raytrec.checkpoint.save import CheckpointWriter, NonfiniteStateError
from raytrec.checkpoint.state import LogicalState, describe_tensor, find_nonfinite
from raytrec.checkpoint.storage import ShardWriter
from raytrec.config.training import CheckpointSection
from raytrec.metrics.selection import read_metric_displays

(BY_NE,) = [figure for figure in read_metric_displays() if figure.key == "ne"]


def build_state(world, sharding="row_wise"):
    """Return the LogicalState of a small model."""
    step = build_step_on_rank(make_small_config(world, {"sharding_type": sharding}))
    return LogicalState(step.model, step.optimizer)


def make_writer(state, root, **changes):
    return CheckpointWriter(str(root), CheckpointSection(**changes), unbounded=state.unbounded)


def save_and_wait(saver, step, tensors):
    saver.save(step, tensors, {})
    return saver.collect_outcome()


def save_broken_states(rank, world, root, asynchronous):
    """Return the errors of several saves.

    The first state is finite, three have a nonfinite value on rank 1, and the last two are finite saves of
    one step.
    """
    state = build_state(world)
    saves, found = make_writer(state, root, keep_last=9, async_save=asynchronous), []
    places = {
        "weights": state.tables["user"].weight.local[0].values,
        "state": state.tables["tag"].state["sum"].local[0].values,
        "dense": next(v for name, v in sorted(state.dense.items()) if name.endswith("weight/value")),
    }
    found.append(save_and_wait(saves, 1, state.tensors()).error)
    for number, (place, bad) in enumerate(zip(places, ("nan", "inf", "-inf"), strict=True), start=2):
        values = places[place].view(-1)
        before = values[-1].clone()
        if rank == 1:
            values[-1] = float(bad)
        found.append(save_and_wait(saves, number, state.tensors()).error)
        values[-1] = before
    found += [save_and_wait(saves, 9, state.tensors()).error for _ in range(2)]
    saves.close()
    return found


@pytest.mark.parametrize("asynchronous", [True, False])
def test_nonfinite_state_is_never_saved(tmp_path, asynchronous):
    answers = run_on_ranks(2, save_broken_states, str(tmp_path), asynchronous)
    assert list(map(str, answers[0])) == list(map(str, answers[1])), "the ranks do not agree"
    good, weights, state, dense, *last = answers[0]
    assert good is None and last == [None, None]
    assert all(isinstance(error, NonfiniteStateError) for error in (weights, state, dense))
    assert "step 2 contains NaN or infinity: table user's weight on rank 1" in weights.what
    assert "table tag's sum on rank 1" in state.what and "step 3" in state.where
    assert "head.model.bottom.0.weight on rank 1" in dense.what
    assert steps(str(tmp_path)) == [9, 1], "the other checkpoints have no files"
    assert len(list((tmp_path / "step-0000000009").glob("*.bin"))) == 2, "only files of the last attempt"
    assert checkpoints.read_tensors(tmp_path / "step-0000000009")


def test_find_nonfinite_covers_all_dtypes():
    large = torch.full((1000,), 3e38)
    tensors = {
        "tables/a/weight": large,  # the sum overflows
        "tables/a/sum": torch.tensor([1.0, float("inf"), float("-inf")]),
        "tables/b/weight": torch.tensor([1.0, float("nan")], dtype=torch.bfloat16),
        "tables/c/weight": torch.full((70000,), 60000.0, dtype=torch.float16),
        "tables/d/weight": torch.zeros(0, 8),
        "dense/m.w/value": torch.tensor([1e300], dtype=torch.float64),
        "dense/m.w/step": torch.tensor(3),
        "dense/mask/value": torch.tensor([float("-inf")]),
    }
    assert find_nonfinite(tensors) == ["tables/a/sum", "tables/b/weight", "dense/mask/value"]
    assert find_nonfinite(tensors, frozenset({"dense/mask/value"})) == ["tables/a/sum", "tables/b/weight"]
    assert describe_tensor("tables/a.b/sum") == "table a.b's sum"
    assert describe_tensor("dense/m.w/value") == "m.w" and describe_tensor("dense/m.w/exp_avg") == "m.w's exp_avg"


def find_nonfinite_with_mask(rank, world):
    """Return the tensors of a model with a mask that may be infinite, and its nonfinite tensors."""
    step = build_step_on_rank(make_small_config(world, {"sharding_type": "row_wise"}))
    step.head.model.register_buffer("mask", torch.tensor([0.0, float("-inf")]))
    state = LogicalState(step.model, step.optimizer)
    return sorted(state.unbounded), find_nonfinite(state.tensors(), state.unbounded)


def test_infinite_mask_buffer_is_allowed():
    [(unbounded, bad)] = run_on_ranks(1, find_nonfinite_with_mask)
    assert unbounded == ["dense/head.model.mask/value"] and bad == []


def save_repeatedly(rank, world, root, keep_last, unseen):
    """Return (error, note, steps with a checkpoint) after each of several saves."""
    state = build_state(world)
    tensors = state.tensors() | {"dense/padding/value": torch.ones(1 << 20)}  # 4 MiB
    saves, found = make_writer(state, root, keep_last=keep_last), []
    with pytest.MonkeyPatch.context() as patch:
        if unseen:  # as with a disk quota
            patch.setattr(save, "measure_free_bytes", lambda root: None)
        for number in range(1, 6):
            saved = save_and_wait(saves, number, tensors)
            torch.distributed.barrier()
            whole = [s for s in steps(root) if (Path(root) / f"step-{s:010d}/checkpoint.json").exists()]
            found.append((saved.error, saved.note, whole))
            torch.distributed.barrier()
        saves.close()
    return found


@pytest.mark.parametrize("unseen", [False, True], ids=["free space is known", "a quota"])
def test_full_disk_removes_the_oldest_checkpoint_first(tmp_path, unseen):
    with small_disk(tmp_path / "disk", "11m") as place:
        (place / "c/step-0000000099").mkdir(parents=True)
        answers = run_on_ranks(2, save_repeatedly, str(place / "c"), 2, unseen)
        found = answers[0]
        assert [error for error, _, _ in found] == [None] * 5, "every save had enough space"
        assert [there for _, _, there in found] == [[1], [2, 1], [3, 2], [4, 3], [5, 4]]
        said = [note for _, note, _ in found if note]
        assert len(said) == 1 and "no space for 2 checkpoints" in said[0], said
        assert "step-0000000001" in said[0]
        files = [path for path in (place / "c").rglob("*.bin")]
        assert len(files) == 4, "two ranks, two checkpoints, no files of failed saves"
        whole = checkpoints.read_tensors(place / "c/step-0000000005")
        assert whole["dense/padding/value"].sum() == 1 << 20


@pytest.mark.parametrize("unseen", [False, True], ids=["free space is known", "a quota"])
def test_full_disk_keeps_the_only_checkpoint(tmp_path, unseen):
    with small_disk(tmp_path / "disk", "6m") as place:
        (_, *failed), other = run_on_ranks(2, save_repeatedly, str(place / "c"), 1, unseen)
        assert [str(e) for e, _, _ in failed] == [str(e) for e, _, _ in other[1:]], "the ranks do not agree"
        for error, _, there in failed:
            assert there == [1] and "No space left" in error.what
            assert "4.0 MiB are needed" in error.expected and "keep_last=1 needs space for two" in error.do
        assert checkpoints.read_tensors(place / "c/step-0000000001")["dense/padding/value"].sum() == 1 << 20


def lose_rank_after_commit(rank, world, root):
    """Save while the collective after the commit fails, as if another rank had been killed; return the error."""
    state, commit = build_state(world), save.dcp.save

    def fail_after_commit(*arguments, **options):
        commit(*arguments, **options)
        raise RuntimeError("Connection reset by peer")

    saves = make_writer(state, root)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save.dcp, "save", fail_after_commit)
        error = save_and_wait(saves, 1, state.tensors()).error
    saves.close()
    return str(error), restore(root, state).folder


def save_without_memory(rank, world, root):
    """Save while no memory can be allocated; return the error."""

    def fail(*_):
        raise MemoryError("cannot allocate 4 GiB")

    state = build_state(world)
    saves = make_writer(state, root)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardWriter, "prepare_local_plan", fail)
        error = save_and_wait(saves, 1, state.tensors()).error
    saves.close()
    return str(error)


def test_failed_save_states_the_error_of_the_rank(tmp_path):
    (error,) = run_on_ranks(1, save_without_memory, str(tmp_path))
    assert "the checkpoint cannot be saved: cannot allocate 4 GiB" in error


def test_committed_checkpoint_is_kept_if_a_rank_is_lost(tmp_path):
    ((error, folder),) = run_on_ranks(1, lose_rank_after_commit, str(tmp_path))
    assert "Connection reset by peer" in error and folder == files.get_step_folder(str(tmp_path), 1)


def write_checkpoint(root, step, ne):
    """Write a checkpoint without tensors and with an evaluation."""
    folder = Path(files.get_step_folder(str(root), step))
    folder.mkdir(exist_ok=True)
    about = {"evaluation": {"ne": ne}}
    write_index(str(folder), {"attempt": "a", "block_bytes": 8, "tensors": {}, "about": about})


def test_remove_oldest_keeps_newest_and_best(tmp_path):
    for step, ne in ((1, 0.9), (2, 0.5), (3, 0.8), (4, 0.7)):
        write_checkpoint(tmp_path, step, ne)
    gone = [remove_oldest(str(tmp_path), 1, BY_NE) for _ in range(3)]
    assert [g and g[-1] for g in gone] == ["1", "3", None]
    assert steps(str(tmp_path)) == [4, 2]


def test_index_is_read_again_only_after_a_change(tmp_path, monkeypatch):
    read, original = [], files.read_index
    monkeypatch.setattr(files, "read_index", lambda folder: read.append(folder[-1]) or original(folder))
    for step in (1, 2, 3):
        write_checkpoint(tmp_path, step, 0.5 + step / 10)
    files.keep(str(tmp_path), 3, 0, BY_NE)
    assert read == ["3", "2", "1"]
    write_checkpoint(tmp_path, 4, 0.1)
    files.keep(str(tmp_path), 3, 0, BY_NE)
    assert read[3:] == ["4"] and steps(str(tmp_path)) == [4, 3, 2]
    write_checkpoint(tmp_path, 2, 0.05)
    files.keep(str(tmp_path), 1, 1, BY_NE)
    assert read[4:] == ["2"] and steps(str(tmp_path)) == [4, 2]


def restore_past_nonfinite(rank, world, root):
    """Save a finite and a nonfinite checkpoint and restore; return the errors and the restored checkpoint."""
    state = build_state(world)
    saves = make_writer(state, root)
    errors = [save_and_wait(saves, 1, state.tensors()).error]
    save.find_nonfinite, kept = lambda *_: [], save.find_nonfinite  # earlier versions did not check
    if rank == 1:
        state.tables["user"].state["sum"].local[0].values[0] = float("inf")
    errors.append(save_and_wait(saves, 2, state.tensors()).error)
    save.find_nonfinite = kept
    saves.close()
    found = restore(root, state)
    return errors, found.folder, found.skip_reasons, find_nonfinite(state.tensors())


def test_restore_skips_nonfinite_checkpoint(tmp_path):
    for errors, folder, skip_reasons, bad in run_on_ranks(2, restore_past_nonfinite, str(tmp_path)):
        assert errors == [None, None] and folder.endswith("step-0000000001") and bad == []
        assert "NaN or infinity: table user's sum on rank 1" in skip_reasons[0]
        assert "step-0000000002" in skip_reasons[0]


def collect_save_plan(rank, world, root):
    """Return the save plan that this rank sends to rank 0."""

    state, sent, prepare = build_state(world, "table_wise"), [], ShardWriter.prepare_local_plan
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardWriter, "prepare_local_plan", lambda self, p: sent.append(p) or prepare(self, p))
        assert save_and_wait(make_writer(state, root), 1, state.tensors()).error is None
    (plan,) = sent
    return len(state.tensors()), [item.index.fqn for item in plan.items], plan.planner_data


def test_save_plan_names_only_own_tensors(tmp_path):
    """Names of all tensors from every rank would need ranks × tables entries on rank 0."""
    first, other = run_on_ranks(2, collect_save_plan, str(tmp_path))
    both = set(first[1]) & set(other[1])
    assert len({*first[1], *other[1]}) == first[0] and not any(name.startswith("tables/") for name in both)
    assert first[2] is None and other[2] is None
