"""The host copy that is written while training continues: page-locking, memory size and waits."""

from unittest.mock import patch

import pytest
import torch
from checkpoints import differing_tensors, read_tensors, restore_newest, save_checkpoint
from ranks import run_on_ranks
from small import build_step_on_rank, make_batches, make_small_config, train_step
from standin import use_stand_in_gpu
from torch.distributed._shard.sharded_tensor import ShardedTensor

from raytrec.checkpoint.save import CheckpointWriter
from raytrec.checkpoint.snapshot import HostStateBuffer
from raytrec.checkpoint.state import LogicalState
from raytrec.config.training import CheckpointSection

SIZES = (1025, 5, 1 << 20, (1 << 20) + 3, 3_000_001, 0)  # numbers of values: powers of two and slightly more


def make_state(device):
    tensors = {f"dense/{n}/value": torch.randn(n, device=device) for n in SIZES}
    tensors["dense/half/value"] = torch.randn(7, 3, device=device).half()
    tensors["dense/flag/value"] = torch.ones(3, dtype=torch.bool, device=device)
    return tensors | {"dense/w/step": torch.tensor(3.0)}  # torch keeps step counts in host memory


def count_bytes(tensors):
    return sum(value.nbytes for value in tensors.values())


def assert_same(copies, tensors):
    """Assert that these host tensors are copies of the others."""
    assert not any(copy.is_cuda for copy in copies.values())
    torch.testing.assert_close(copies, {name: value.cpu() for name, value in tensors.items()}, rtol=0, atol=0)


def test_gpu_copy_uses_page_locked_memory_of_state_size():
    with use_stand_in_gpu() as gpu:
        tensors, host = make_state("cuda"), HostStateBuffer()
        first = host.copy(tensors)
        assert count_bytes(tensors) <= gpu.pinned_bytes <= 1.1 * count_bytes(tensors)
        assert_same(first, tensors)
        assert host.note is None
        assert all(copy.is_pinned() for copy in first.values() if copy.numel())
        held = gpu.pinned_bytes
        for value in tensors.values():
            value.add_(1) if value.dtype != torch.bool else value.logical_not_()
        assert_same(host.copy(tensors), tensors)
        assert gpu.pinned_bytes == held, "the buffer is reused"
        assert_same(first, tensors)  # the first copy shares the buffer
        tensors["dense/5/value"] = torch.zeros(9, 9, device="cuda")
        assert_same(host.copy(tensors), tensors)
        assert gpu.pinned_bytes <= 1.1 * count_bytes(tensors)
        host.close()
        assert gpu.pinned_bytes == 0
        host.copy(tensors)
        del host
        assert gpu.pinned_bytes == 0, "memory is unlocked before unmapping, even without close()"


def test_gpu_copy_waits_once_for_its_own_stream():
    with use_stand_in_gpu() as gpu:
        tensors, host, other = make_state("cuda"), HostStateBuffer(), torch.cuda.Stream()
        del tensors["dense/0/value"]  # an empty tensor has no address, pinned or not
        other.work(30.0)  # unrelated work
        gpu.work(0.01)
        gpu.waits.clear()
        copies = host.copy(tensors)
        assert [wait.what for wait in gpu.waits] == ["Stream.synchronize"]
        assert_same(copies, tensors)
        host.close()


def test_unlockable_memory_is_used_with_a_warning():
    with use_stand_in_gpu() as gpu, patch("standin.device._Runtime.cudaHostRegister", lambda *_: 2):
        tensors, host = make_state("cuda"), HostStateBuffer()
        assert_same(host.copy(tensors), tensors)
        assert not gpu.pinned_bytes
        assert "could not be page-locked (cudaHostRegister failed with error 2)" in host.note
        assert_same(host.copy(tensors), tensors)
        assert host.note is None, "the warning appears once"


def test_cpu_ranks_do_not_touch_cuda():
    def touched(*_, **__):
        raise AssertionError("CUDA was touched")

    tensors, host = make_state("cpu"), HostStateBuffer()
    names = ("is_available", "synchronize", "current_stream", "cudart", "current_device", "_lazy_init")
    with patch.multiple(torch.cuda, **dict.fromkeys(names, touched)):
        copies = host.copy(tensors)
        assert_same(copies, tensors)
        host.close()
    assert_same(copies, tensors)  # pages are freed with the last tensor


def build_step_on(world, plan, optimizer, device):
    settings = make_small_config(world, plan, optimizer)
    settings.optim.dense.name = "adam"  # Adam keeps its step count in host memory
    return build_step_on_rank(settings, device=device)


def train_and_save(rank, world, plan, optimizer, device, root, asynchronous):
    """Train and save; return (checkpoint folder, devices of shards, devices of tables)."""
    step = build_step_on(world, plan, optimizer, device)
    state = LogicalState(step.model, step.optimizer)
    train_step(step, make_batches(3, rank, world)[1])
    saver = CheckpointWriter(root, CheckpointSection(async_save=asynchronous))
    tensors = state.tensors()
    sharded = [t for t in tensors.values() if isinstance(t, ShardedTensor)]
    devices = {str(shard.metadata.placement.device()) for t in sharded for shard in t.local_shards()}
    saver.save(3, tensors, {})
    train_step(step, make_batches(2, rank, world)[1])  # must not change the checkpoint
    saved = saver.collect_outcome()
    saver.close()
    if saved.error:
        raise saved.error
    return saved.folder, devices, {table.weight.device for table in state.tables.values()}


def restore_and_save(rank, world, plan, optimizer, device, root, target):
    """Restore a checkpoint and save the restored state."""
    step = build_step_on(world, plan, optimizer, device)
    restore_newest(root, step)
    return save_checkpoint(target, step, 3)


ROW_WISE, TABLE_WISE, COPIES = ({"sharding_type": way} for way in ("row_wise", "table_wise", "data_parallel"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan,then,optimizer,asynchronous",
    [
        (ROW_WISE, TABLE_WISE, "rowwise_adagrad", True),
        pytest.param(TABLE_WISE, ROW_WISE, "adagrad", True, marks=pytest.mark.survive),  # a rank can have no table
        pytest.param(COPIES, COPIES, "adam", True, marks=pytest.mark.survive),
        ({"sharding_type": "column_wise", "compute_kernel": "fused_uvm"}, ROW_WISE, "adagrad", False),
    ],
)
def test_gpu_and_cpu_checkpoints_are_interchangeable(plan, then, optimizer, asynchronous, tmp_path):
    folders = {}
    for device in ("cpu", "cuda"):
        root = str(tmp_path / device)
        ranks = run_on_ranks(2, train_and_save, plan, optimizer, device, root, asynchronous, device=device)
        folders[device] = ranks[0][0]
        for rank, (_, places, of_tables) in enumerate(ranks):
            here = torch.device("cpu") if device == "cpu" else torch.device("cuda", rank)
            assert of_tables == {here} and places <= {str(here)}
    one, other = (read_tensors(folders[device]) for device in ("cpu", "cuda"))
    torch.testing.assert_close(other, one, rtol=1e-6, atol=1e-6)
    for device, source in (("cuda", "cpu"), ("cpu", "cuda")):
        root, target = str(tmp_path / source), str(tmp_path / f"{source} to {device}")
        again = run_on_ranks(2, restore_and_save, then, optimizer, device, root, target, device=device)
        assert differing_tensors(folders[source], again[0]) == []
