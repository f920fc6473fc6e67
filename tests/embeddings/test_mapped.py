"""File-backed tables: training, saving and restoring are bit-identical to tables in memory."""

import ctypes
import errno
import mmap
import os
import sys
from pathlib import Path

import pytest
import sequence_schema
import torch
from ranks import run_on_ranks
from small import SCHEMA, build_step_on_rank, make_batches, make_small_config, train_step
from test_hot_rows import HOT_SHARE, count_written_rows, list_hot_caches, patch_hot_share
from waiting import wait_for

from raytrec.common.errors import RunError
from raytrec.common.memory import prefetch_pages
from raytrec.compat.fbgemm import find_resident_rows, measure_cache_hits
from raytrec.compat.torchrec_ import iterate_sharded_kernels
from raytrec.config.features import resolve_features
from raytrec.config.run_config import load_config
from raytrec.embeddings.mapped import MappedFileFactory
from raytrec.embeddings.tables import tables as tables_of
from raytrec.worker.build import build_step

LIBC = ctypes.CDLL(None)

# (plan.tables, by default with the tested kernel; optimizer; world size)
CASES = {
    "row-wise": ({"*": {"sharding_type": "row_wise"}}, "rowwise_adagrad", 2),
    "one of two": ({"*": {"sharding_type": "table_wise"}, "tag": {"compute_kernel": "fused"}}, "adagrad", 2),
    "columns, fp16": ({"*": {"sharding_type": "column_wise", "dtype": "fp16"}}, "adagrad", 2),
    "fewer rows than ranks": ({"*": {"sharding_type": "row_wise"}}, "sgd", 3),
    "one rank": ({"*": {"sharding_type": "table_wise"}}, "rowwise_adagrad", 1),
    "no state": ({"*": {"sharding_type": "row_wise"}}, "sgd", 2),
}


def make_settings(world, tables, optimizer, kernel, folder):
    plan = {name: {"compute_kernel": kernel} | line for name, line in tables.items()}
    made = make_small_config(world, {}, optimizer).model_dump(by_alias=True)
    return load_config(made | {"plan": {"tables": plan, "mmap_dir": folder}})


def train_and_locate(rank, world, tables, optimizer, kernel, share, folder):
    """Train some steps with this share of the rows in memory.

    Returns:
        Losses, weights and state, rows of shards, parts held by this rank, parts held in files, kernels, files,
        and the numbers of cached and of written-back rows.
    """
    schema = SCHEMA.model_copy(deep=True)
    schema.tables["tag"].rows = 2 if world == 3 else 5
    with patch_hot_share(share):
        step = build_step_on_rank(make_settings(world, tables, optimizer, kernel, folder), schema)
    caches, watched = list_hot_caches(step), tables_of(step.model)
    written = count_written_rows(caches)
    losses = [float(o.loss.detach()) for o in train_step(step, make_batches(16, rank, world, schema=schema)[1])]
    shares = [measure_cache_hits(each) for each in iterate_sharded_kernels(step.model) if find_resident_rows(each)]
    assert all(0 < hit_share <= 1 for hit_share in shares) and len(shares) == len(caches)
    moved = sum(hot._filled for hot in caches), sum(written)
    out, held, in_files, kernels = {}, set(), set(), {}
    for name, table in tables_of(step.model, step.optimizer).items():
        kernels[name] = table.kernel
        for kind, parts in {"weight": table.weight, **table.state}.items():
            out[name, kind] = parts.dense()
            for shard in (shard for shard in parts.local if shard.values.numel()):
                held.add((name, kind))
                if is_in_file(shard.values, folder):
                    in_files.add((name, kind))
    read = {
        name: shard.read(torch.arange(len(shard.rows)))
        for name, table in watched.items()
        for shard in table.weight.local
    }
    return losses, out, read, held, in_files, kernels, os.listdir(folder), moved


def is_in_file(values, folder):
    """Return True if the values are mapped from an unlinked file in this folder."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, rights, _, _, _, *name = line.split(maxsplit=5)
        begin, end = (int(number, 16) for number in place.split("-"))
        if begin <= values.data_ptr() < end:
            return rights == "rw-s" and name[0].startswith(folder) and name[0].endswith("(deleted)")
    return False


@pytest.mark.slow
@pytest.mark.parametrize("way", CASES)
def test_mapped_tables_train_like_tables_in_memory(way, tmp_path):
    """The tables are only in files, or the most frequent rows are also in memory."""
    case, in_memory = CASES[way], {"tag"} if way == "one of two" else set()
    expected = run_on_ranks(case[2], train_and_locate, *case[:2], "fused", 0.0, str(tmp_path))
    assert not any(in_files for _, _, _, _, in_files, *_ in expected)
    for share in (0.0, HOT_SHARE):
        found = run_on_ranks(case[2], train_and_locate, *case[:2], "fused_mmap", share, str(tmp_path))
        assert any(held for _, _, _, held, *_ in found)
        for (losses, values, read, held, in_files, kernels, names, moved), wanted in zip(found, expected, strict=True):
            assert losses == wanted[0] and values.keys() == wanted[1].keys() and not names
            for key, tensor in values.items():
                assert torch.equal(tensor, wanted[1][key]) and tensor.abs().sum() > 0, key
            assert all(torch.equal(read[name], wanted[2][name]) for name in read)
            mapped = {key for key in held if key[0] not in in_memory}
            assert share or in_files == mapped, "with hot rows, the last page of a file is in memory"
            assert kernels == {n: "fused" if n in in_memory else "fused_mmap" for n in ("user", "tag")}
            assert all(moved) == bool(share and mapped), "rows are cached and written back"


def train_by_id(rank, world, kernel, folder):
    schema = sequence_schema.make_mixed_schema()
    model, plan = {"name": "sequence", "max_length": 5}, {"sharding_type": "row_wise"}
    made = make_small_config(world, plan | {"compute_kernel": kernel}, model=model)
    made.plan.mmap_dir = folder
    features, step = resolve_features(schema, made.model), build_step_on_rank(made, schema)
    train_step(step, make_batches(3, rank, world, schema=schema, features=features)[1])
    found = tables_of(step.model)
    return {name: table.weight.dense() for name, table in found.items()}, found["item"].kernel


@pytest.mark.slow
def test_mapped_sequence_tables_train_like_tables_in_memory(tmp_path):
    ((expected, _), *_) = run_on_ranks(2, train_by_id, "fused", str(tmp_path))
    for found, kernel in run_on_ranks(2, train_by_id, "fused_mmap", str(tmp_path)):
        assert kernel == "fused_mmap"
        for name, values in expected.items():
            assert torch.equal(found[name], values)


def sum_unfilled_weights(rank, world):
    """Return the sum of absolute weights of tables that were not filled."""
    step, _ = build_step(make_small_config(world, {}), SCHEMA, torch.device("cpu"), fill=False)
    return sum(float(table.weight.dense().abs().sum()) for table in tables_of(step.model).values())


def test_torchrec_does_not_initialize_weights():
    assert run_on_ranks(1, sum_unfilled_weights) == [0.0]


def allocate_zeros(folder):
    plan = {"mmap_dir": str(folder)}
    files = MappedFileFactory(load_config({"data": {"train": "d/train"}, "plan": plan}))
    return files.allocate_zeros(["user"], 1 << 20, torch.float32)


def test_full_disk_and_tmpfs_are_rejected(tmp_path, monkeypatch):
    allocate_zeros(tmp_path / "new")
    assert not os.listdir(tmp_path)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(RunError, match=r"cannot create a file of 4 MiB for rows .* of user: No space left") as error:
        allocate_zeros(tmp_path / "new")
    assert str(tmp_path) in str(error.value) and "free up space" in error.value.do
    if Path("/dev/shm").is_dir():
        with pytest.raises(RunError, match="is on tmpfs, which keeps files in memory") as error:
            allocate_zeros("/dev/shm/tables")
        assert error.value.do == "set plan.mmap_dir to a writable folder on a local disk"


def count_resident_pages(values):
    """Return the number of the values' pages that are resident."""
    pages = (ctypes.c_ubyte * (values.nbytes // mmap.PAGESIZE))()
    LIBC.mincore(ctypes.c_void_p(values.data_ptr()), ctypes.c_size_t(values.nbytes), pages)
    return sum(page & 1 for page in pages)


@pytest.mark.skipif(sys.platform != "linux", reason="needs mincore of Linux")
def test_prefetch_pages_reads_the_whole_range(tmp_path):
    values = allocate_zeros(tmp_path)
    values.fill_(1)
    place, size, count = ctypes.c_void_p(values.data_ptr()), ctypes.c_size_t(values.nbytes), 1024
    assert count_resident_pages(values) == count == values.nbytes // mmap.PAGESIZE
    LIBC.msync(place, size, 4)  # MS_SYNC
    LIBC.madvise(place, size, 21)  # MADV_PAGEOUT
    if count_resident_pages(values):
        pytest.skip("this system does not page out memory on request")
    values[[0, 300_000, 700_000]].sum()
    assert count_resident_pages(values) == 3
    prefetch_pages(values.data_ptr(), values.nbytes // 2)
    wait_for(lambda: count_resident_pages(values) >= count // 2 + 1, "prefetched pages", 10)
    assert count_resident_pages(values) == count // 2 + 1
    other = torch.ones(10)  # not mapped from a file
    prefetch_pages(other.data_ptr(), other.nbytes)
