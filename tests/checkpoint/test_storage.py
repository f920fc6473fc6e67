"""Storage of tensors: other shardings, damage, full disks, killed writers, memory use; no pickle."""

import errno
import io
import json
import os
import pickle
import pickletools
import subprocess
import sys
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path

import checkpoints
import disks
import pytest
import torch
import torch.distributed.checkpoint as dcp
import warm
from pyarrow import fs
from ranks import run_on_ranks
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardedTensorMetadata
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties
from torch.distributed._shard.sharding_spec import ShardMetadata
from torch.distributed.checkpoint.api import CheckpointException
from waiting import wait_for

import raytrec.common.storage
from raytrec.checkpoint import index, rawfile, storage
from raytrec.checkpoint.files import find
from raytrec.checkpoint.index import INDEX, CheckpointError, read_index
from raytrec.checkpoint.storage import ShardReader, ShardWriter
from raytrec.common import reading
from raytrec.common.errors import DataError, RunError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
BLOCK = 64  # bytes; small tensors span several blocks
DTYPES = list(storage.DTYPES.values())
TENSOR_SPECS = {
    "rows": ((37, 5), torch.float32),
    "columns": ((19, 12), torch.float32),
    "grid": ((23, 10), torch.bfloat16),
    "uneven": ((11, 3, 2), torch.float64),
    "gaps": ((9, 4), torch.int32),
    "wide": ((3, 100), torch.float32),  # rows longer than a block
    "per_row": ((41,), torch.float32),
    "nothing": ((0, 4), torch.float32),
}
# Cut → (number of row parts, number of column parts).
CUTS = {"rows": (4, 1), "columns": (1, 3), "grid": (3, 2), "few": (2, 2), "one": (1, 1)}


def draw_values(shape, dtype, seed):
    """Return random bits as a tensor; floats include NaNs."""
    draw = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel()
    if dtype == torch.bool:
        return torch.randint(0, 2, (count,), generator=draw).bool().reshape(shape)
    raw = torch.randint(0, 256, (count * dtype.itemsize,), generator=draw, dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def view_bytes(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def is_same(one, other):
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(view_bytes(one), view_bytes(other))


def make_spans(size, parts, gap):
    """Return uneven spans as [(start, length)]; `gap` adds an empty span before each span."""
    borders = [-(-size * i * i // (parts * parts)) for i in range(parts + 1)]
    found = [(a, b - a) for a, b in pairwise(borders)]
    return [span for a, n in found for span in ([(a, 0)] if gap else []) + [(a, n)]]


def take_shard(whole, box):
    """Return the values of the shard described by a ShardMetadata."""
    for d, (offset, size) in enumerate(zip(box.shard_offsets, box.shard_sizes, strict=True)):
        whole = whole.narrow(d, offset, size)
    return whole.contiguous()


def shard_tensor(whole, cut, rank, world, gap):
    """Return a ShardedTensor with this rank's shards, assigned round-robin starting with the last rank."""
    row_parts, column_parts = CUTS[cut]
    dim, wide = whole.dim(), make_spans(whole.shape[1], column_parts, False) if whole.dim() > 1 else [(0, 0)]
    boxes = [
        ([row, column, 0][:dim], [rows, columns, *whole.shape[2:]][:dim])
        for row, rows in make_spans(whole.shape[0], row_parts, gap)
        for column, columns in wide
    ]
    metadata = [
        ShardMetadata(offsets, sizes, f"rank:{(world - 1 + i) % world}/cpu") for i, (offsets, sizes) in enumerate(boxes)
    ]
    local = [Shard(take_shard(whole, box), box) for box in metadata if box.placement.rank() == rank]
    every = ShardedTensorMetadata(metadata, whole.size(), TensorProperties(dtype=whole.dtype))
    return ShardedTensor._init_from_local_shards_and_global_metadata(local, every)


def make_state(rank, world, cuts, empty=False):
    """Return a state dict, its sharded tensors in full and its plain tensors.

    If `empty` is set, the state dict contains zeros to be loaded into.
    """
    wholes = {name: draw_values(shape, dtype, i) for i, (name, (shape, dtype)) in enumerate(TENSOR_SPECS.items())}
    plain = {f"plain/{dtype}": draw_values((7, 3), dtype, 50 + i) for i, dtype in enumerate(DTYPES)}
    plain |= {"scalar": torch.tensor(3.25), "count": torch.tensor(7, dtype=torch.int64)}
    plain |= {"turned": draw_values((6, 9), torch.float32, 90).t(), "empty": torch.empty(0)}
    live = {name: torch.zeros_like(whole) if empty else whole for name, whole in wholes.items()}
    found = {
        # torch cannot save two shards with the same offset on one rank.
        name: shard_tensor(whole, cuts[name], rank, world, gap=name == "gaps" and (empty or world > 1))
        for name, whole in live.items()
    }
    found |= {name: torch.zeros_like(t) if empty else t for name, t in plain.items()}
    return found, wholes, plain


SAVED_CUTS = {name: name if name in CUTS else "rows" for name in TENSOR_SPECS} | {"wide": "few", "nothing": "one"}


def save(rank, world, folder):
    storage.BLOCK_BYTES = BLOCK
    tensors, _, _ = make_state(rank, world, SAVED_CUTS)
    dcp.save(tensors, storage_writer=ShardWriter(folder, "a", {"step": 5, "who": [1, "x", None]}))


def load_and_compare(rank, world, folder, cuts):
    """Return the names of tensors that were not restored correctly."""
    tensors, wholes, plain = make_state(rank, world, cuts, empty=True)
    dcp.load(tensors, storage_reader=ShardReader(folder))
    wrong = [name for name, tensor in plain.items() if not is_same(tensors[name], tensor)]
    for name, whole in wholes.items():
        for shard in tensors[name].local_shards():
            if not is_same(shard.tensor, take_shard(whole, shard.metadata)):
                wrong.append(f"{name} at {shard.metadata.shard_offsets}")
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("writers", [1, 2, 3])
def test_other_shardings_read_identical_bits(writers, tmp_path):
    folder = str(tmp_path / "new" / "step-5")
    run_on_ranks(writers, save, folder)
    saved = read_index(folder)
    assert saved["about"] == {"step": 5, "who": [1, "x", None]}
    files = [chunk["file"] for entry in saved["tensors"].values() for chunk in entry["chunks"]]
    assert sorted(set(files)) == [f"a-{rank:05d}.bin" for rank in range(writers)]
    assert sorted(p.name for p in Path(folder).iterdir()) == sorted({*files, INDEX})
    plain = [c["file"] for name, e in saved["tensors"].items() if "plain" in name for c in e["chunks"]]
    assert len(plain) == len(DTYPES), "equal copies are stored once"
    assert all(c["start"] % 64 == 0 for e in saved["tensors"].values() for c in e["chunks"])
    for readers, cut in [(1, "one"), (1, "grid"), (2, "rows"), (2, "columns"), (3, "few"), (3, "grid")]:
        cuts = dict.fromkeys(TENSOR_SPECS, cut) | {"nothing": "one"}
        assert run_on_ranks(readers, load_and_compare, folder, cuts) == [[]] * readers, (readers, cut)


def save_copies(rank, world, folder):
    dcp.save({f"t{i}": torch.full((50,), i) for i in range(9)}, storage_writer=ShardWriter(folder, "a", {}))


def test_ranks_share_writing_of_replicated_tensors(tmp_path):
    run_on_ranks(3, save_copies, str(tmp_path))
    entries = read_index(str(tmp_path))["tensors"].values()
    files = [chunk["file"] for entry in entries for chunk in entry["chunks"]]
    assert sorted(files) == [f"a-{rank:05d}.bin" for rank in range(3) for _ in range(3)]


def save_alone(folder, tensors, attempt="a", **about):
    dcp.save(tensors, storage_writer=ShardWriter(str(folder), attempt, about), no_dist=True)


def load_alone(folder, tensors):
    out = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    dcp.load(out, storage_reader=ShardReader(str(folder)), no_dist=True)
    return out


def get_failure(call, *args):
    """Return the CheckpointError that torch wraps."""
    with pytest.raises(CheckpointException) as raised:
        call(*args)
    (error, _), *_ = raised.value.failures.values()
    assert isinstance(error, CheckpointError), error
    assert pickle.loads(pickle.dumps(error)).where == error.where
    return error


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(storage, "BLOCK_BYTES", BLOCK)


@pytest.fixture
def saved_checkpoint(small_blocks, tmp_path):
    tensors = {"first": draw_values((10, 5), torch.float32, 1), "second": draw_values((33,), torch.int64, 2)}
    save_alone(tmp_path / "c", tensors)
    return tmp_path / "c", tensors


def read_chunk(folder, name):
    (found,) = read_index(str(folder))["tensors"][name]["chunks"]
    return found


@pytest.mark.slow
def test_any_flipped_data_bit_is_detected(saved_checkpoint):
    folder, tensors = saved_checkpoint
    path = folder / "a-00000.bin"
    good = path.read_bytes()
    starts = {name: read_chunk(folder, name)["start"] for name in tensors}
    for at in range(len(good)):
        name = "first" if at < starts["second"] else "second"
        within = at - starts[name]
        path.write_bytes(good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])
        if within >= tensors[name].nbytes:  # padding between two tensors
            assert load_alone(folder, tensors).keys() == tensors.keys()
            continue
        error = get_failure(load_alone, folder, tensors)
        block = within // BLOCK * BLOCK
        end = starts[name] + min(block + BLOCK, tensors[name].nbytes) - 1
        assert "checksum" in error.what
        assert error.where == f"{path}, tensor {name}, bytes {starts[name] + block} to {end}"
    path.write_bytes(good)
    assert all(is_same(tensor, tensors[name]) for name, tensor in load_alone(folder, tensors).items())


def test_load_reads_only_needed_blocks(saved_checkpoint):
    folder, tensors = saved_checkpoint
    path = folder / "a-00000.bin"
    start = read_chunk(folder, "first")["start"]
    checkpoints.flip_lowest_bit(path, start + 150)  # row 7
    with record_reads() as read:
        assert is_same(load_alone(folder, {"second": tensors["second"]})["second"], tensors["second"])
    second = read_chunk(folder, "second")["start"]
    assert sorted(read) == [second + i * BLOCK for i in range(5)]


@contextmanager
def record_reads():
    """Record the file offsets that are read."""
    read, places = rawfile.Source.read, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rawfile.Source, "read", lambda self, at, into: places.append(at) or read(self, at, into))
        yield places


def collect_read_offsets(rank, world, folder):
    """Return the offsets read by this rank for its rows of one table and half the columns of another."""
    cuts = {"rows": "rows", "columns": "few"}
    with record_reads() as places:
        tensors = {n: shard_tensor(torch.zeros(40, 4), cut, rank, world, gap=False) for n, cut in cuts.items()}
        dcp.load(tensors, storage_reader=ShardReader(folder))
    return sorted(places)


def test_rank_reads_each_needed_block_once(small_blocks, tmp_path):
    save_alone(tmp_path, {name: torch.rand(40, 4) for name in ("rows", "columns")})
    start = {name: read_chunk(tmp_path, name)["start"] // BLOCK for name in ("rows", "columns")}
    # Blocks have 4 rows. The rows are cut at 3, 10 and 23; each rank has every other part.
    rows = [(*range(3, 10), *range(23, 40)), (*range(3), *range(10, 23))]
    for rank, places in enumerate(run_on_ranks(2, collect_read_offsets, str(tmp_path))):
        expected = {start["rows"] + row // 4 for row in rows[rank]}
        expected |= {start["columns"] + block for block in range(10)}
        assert [place // BLOCK for place in places] == sorted(expected)


def test_missing_or_truncated_data_is_detected(saved_checkpoint):
    folder, tensors = saved_checkpoint
    path = folder / "a-00000.bin"
    good = path.read_bytes()
    path.write_bytes(good[:-5])
    error = get_failure(load_alone, folder, tensors)
    assert "5 bytes too early" in error.what
    assert str(path) in error.where and "second" in error.where
    path.unlink()
    error = get_failure(load_alone, folder, tensors)
    assert "No such file" in error.what and str(path) in error.where and "first" in error.where


@pytest.mark.slow
def test_any_damage_to_the_index_is_detected(saved_checkpoint):
    folder, tensors = saved_checkpoint
    path = folder / INDEX
    good = path.read_bytes()
    for at in range(len(good)):
        for bad in (good[:at], good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :]):
            path.write_bytes(bad)
            with pytest.raises(CheckpointError) as error:
                read_index(str(folder))
            assert error.value.where == str(path)
    path.write_bytes(good.replace(b'"format":1', b'"format":2'))
    with pytest.raises(CheckpointError, match="has format 2"):
        read_index(str(folder))
    path.write_bytes(good[:100])
    assert "damaged" in get_failure(load_alone, folder, tensors).what
    path.unlink()
    assert "no complete checkpoint" in get_failure(load_alone, folder, tensors).what


def test_index_with_missing_shard_is_rejected(saved_checkpoint):
    """An index with a valid hash can still describe an incomplete checkpoint."""
    folder, tensors = saved_checkpoint
    content = {k: v for k, v in read_index(str(folder)).items() if k not in ("format", "sha256")}
    content["tensors"]["second"]["chunks"][0]["sizes"] = [32]
    index.write_index(str(folder), content)
    assert "the chunks of tensor second" in get_failure(load_alone, folder, tensors).what
    content["tensors"]["second"]["chunks"][0] |= {"sizes": [33], "file": "../a-00000.bin"}
    index.write_index(str(folder), content)
    assert "invalid file name '../a-00000.bin'" in get_failure(load_alone, folder, tensors).what


def test_checkpoints_do_not_use_pickle(saved_checkpoint, monkeypatch):
    folder, tensors = saved_checkpoint

    def never(*_, **__):
        raise AssertionError("pickle was called")

    names = [(pickle, n) for n in ("load", "loads", "dump", "dumps", "Unpickler", "Pickler")]
    for module, name in [*names, (torch, "load"), (torch, "save")]:
        monkeypatch.setattr(module, name, never)
    save_alone(folder.parent / "again", tensors)
    found = load_alone(folder.parent / "again", tensors)
    assert all(is_same(tensor, tensors[name]) for name, tensor in found.items())
    monkeypatch.undo()
    for path in (folder.parent / "again").iterdir():
        if path.name == INDEX:
            json.loads(path.read_bytes())
        with pytest.raises((ValueError, UnicodeDecodeError)):
            pickletools.dis(path.read_bytes(), out=io.StringIO())


def test_find_reports_a_file_in_place_of_a_folder(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"cannot be listed.*Not a directory"):
        find(tmp_path / "file")


def test_load_reports_an_invalid_path():
    with pytest.raises(DataError, match="cannot open the path"):
        storage.load("unknown://bucket/checkpoint", {"a": torch.zeros(1)})


def test_save_rejects_unsupported_values(small_blocks, tmp_path):
    assert "'a' is not a tensor" in get_failure(save_alone, tmp_path / "c", {"a": 3, "b": torch.zeros(2)}).what
    assert "complex64" in get_failure(save_alone, tmp_path / "c", {"a": torch.zeros(2, dtype=torch.complex64)}).what
    for value in (float("nan"), torch.zeros(2)):
        with pytest.raises(CheckpointError, match="JSON"):
            ShardWriter(str(tmp_path), "a", {"loss": value})
    assert not (tmp_path / "c" / INDEX).exists()


def test_new_attempt_replaces_the_index_and_keeps_old_files(saved_checkpoint):
    folder, tensors = saved_checkpoint
    other = {name: tensor.flip(0) for name, tensor in tensors.items()}
    error = get_failure(save_alone, folder, other)
    assert "File exists" in error.what
    assert all(is_same(t, tensors[n]) for n, t in load_alone(folder, tensors).items()), "attempts use distinct files"
    save_alone(folder, other, attempt="b")
    assert all(is_same(t, other[n]) for n, t in load_alone(folder, tensors).items())
    assert sorted(p.name for p in folder.iterdir()) == ["a-00000.bin", "b-00000.bin", INDEX]


def test_data_is_synced_before_the_index_is_committed(tmp_path, monkeypatch):
    done, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (done.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda a, b: (done.append("commit"), replace(a, b)))
    folder = tmp_path / "new" / "step"
    save_alone(folder, {"a": torch.ones(8)})
    parts = [folder / "a-00000.bin", folder, f"{folder}/{INDEX}.partial-a"]
    before = sorted(map(str, [tmp_path, tmp_path / "new", *parts]))
    assert sorted(done[: done.index("commit")]) == before
    assert done[done.index("commit") + 1 :] == [str(folder)]


@pytest.fixture
def small_disk(tmp_path):
    """Mount a file system of 1 MiB."""
    with disks.small_disk(tmp_path / "disk", "1m") as place:
        yield place


def test_full_disk_keeps_the_previous_checkpoint(small_disk):
    tensors = {"a": draw_values((50_000,), torch.uint8, 0)}
    save_alone(small_disk / "one", tensors)
    large = {"a": draw_values((200_000,), torch.uint8, 1), "b": torch.zeros(1_000_000, dtype=torch.uint8)}
    for folder in (small_disk / "two", small_disk / "one"):
        error = get_failure(lambda folder=folder: save_alone(folder, large, attempt="b"))
        assert "No space left" in error.what and error.where == f"{folder}/b-00000.bin"
        assert not (folder / "b-00000.bin").exists(), "space for the next attempt is freed"
    assert not (small_disk / "two" / INDEX).exists()
    assert is_same(load_alone(small_disk / "one", tensors)["a"], tensors["a"])


def test_full_disk_during_index_write_keeps_the_old_index(small_disk):
    """The data fit on the disk, but the index does not."""
    save_alone(small_disk / "one", {"a": torch.ones(8)})
    before = (small_disk / "one" / INDEX).read_bytes()
    room = os.statvfs(small_disk)
    data = torch.zeros((room.f_bavail - 3) * room.f_frsize, dtype=torch.uint8)
    error = get_failure(lambda: save_alone(small_disk / "one", {"a": data}, attempt="b", text="x" * 50_000))
    assert "No space left" in error.what and error.where.endswith(INDEX)
    assert (small_disk / "one" / INDEX).read_bytes() == before
    assert not [p for p in (small_disk / "one").iterdir() if "partial" in p.name]
    assert torch.equal(load_alone(small_disk / "one", {"a": torch.zeros(8)})["a"], torch.ones(8))


def test_unwritable_folder_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    error = get_failure(save_alone, tmp_path / "file" / "c", {"a": torch.ones(8)})
    assert error.where == str(tmp_path / "file" / "c") and "cannot be written" in error.what


def save_with_full_disk(rank, world, folder):
    """Save while the disk of rank 1 is full; return the failures."""

    def full(self, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(rawfile.RawFileWriter, "write", full)
        with pytest.raises(CheckpointException) as raised:
            dcp.save({f"t{rank}": torch.ones(5)}, storage_writer=ShardWriter(folder, "b", {}))
    return {r: (str(e.where), type(e).__name__) for r, (e, _) in raised.value.failures.items()}


def test_save_error_of_one_rank_reaches_all_ranks(tmp_path):
    folder = str(tmp_path / "c")
    expected = {1: (f"{folder}/b-00001.bin", "InsufficientSpaceError")}
    assert run_on_ranks(2, save_with_full_disk, folder) == [expected] * 2
    assert not (tmp_path / "c" / INDEX).exists()


def save_to_private_folder(rank, world, folder):
    """Save to a folder that the other rank cannot see; return the failures."""
    with pytest.raises(CheckpointException) as raised:
        dcp.save({f"t{rank}": torch.ones(5)}, storage_writer=ShardWriter(f"{folder}/{rank}", "b", {}))
    return [e.what for e, _ in raised.value.failures.values()]


def test_unshared_checkpoint_folder_is_detected(tmp_path):
    for (what,) in run_on_ranks(2, save_to_private_folder, str(tmp_path)):
        assert "b-00001.bin, written by a worker, is missing" in what
    assert not list(tmp_path.glob(f"*/{INDEX}"))


def write_large_checkpoint(connection, folder):
    torch.set_num_threads(1)
    storage.BLOCK_BYTES = 1 << 16
    tensors = dict.fromkeys([f"t{i}" for i in range(500)], torch.ones(1 << 20))
    dcp.save(tensors, storage_writer=ShardWriter(folder, "b", {}), no_dist=True)
    connection.send("ended")


def test_killed_writer_leaves_no_partial_checkpoint(tmp_path):
    save_alone(tmp_path / "c", {"a": torch.ones(8)})
    for folder, survives in ((tmp_path / "c", True), (tmp_path / "d", False)):
        pid, connection = warm.fork(write_large_checkpoint, str(folder))
        try:
            wait_for(lambda f=folder: any(p.stat().st_size for p in f.glob("b-*.bin")), "checkpoint data")
        finally:
            warm.kill_and_wait([pid])
        with pytest.raises((EOFError, ConnectionResetError)):
            connection.recv()  # the writer was killed before it sent a message
        if survives:
            assert torch.equal(load_alone(folder, {"a": torch.zeros(8)})["a"], torch.ones(8))
        else:
            assert not (folder / INDEX).exists()
            with pytest.raises(CheckpointError, match="no complete checkpoint"):
                read_index(str(folder))


LARGE_BYTES = 1 << 27


def measure_memory(end, folder):
    """Send the bytes needed in addition to the tensors: save, save a view, load, load with a cast."""
    torch.set_num_threads(1)

    def status(key):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(key):
                return int(line.split()[1]) << 10

    def extra(call):
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak to the current value
        before = status("VmRSS")
        call()
        return status("VmHWM") - before

    large = {"w": torch.arange(LARGE_BYTES // 4, dtype=torch.float32).view(-1, 16)}
    for turn, tensors in enumerate([{"w": torch.ones(40_000, 16)}, large]):  # the first turn loads code
        found, place = [], f"{folder}/{turn}"
        save = partial(dcp.save, tensors, storage_writer=ShardWriter(place, "a", {}), no_dist=True)
        found.append(extra(save))
        # A view of columns uses the code path for non-contiguous tensors.
        view, writer = {"w": tensors["w"][:, 3:11]}, ShardWriter(f"{place}v", "a", {})
        found.append(extra(partial(dcp.save, view, storage_writer=writer, no_dist=True)))
        for into in (torch.ones_like(tensors["w"]), torch.ones_like(tensors["w"], dtype=torch.float64)):
            reader = ShardReader(place)
            found.append(extra(partial(dcp.load, {"w": into}, storage_reader=reader, no_dist=True)))
            assert torch.equal(into, tensors["w"].to(into.dtype))
    end.send(found)


@pytest.mark.slow
def test_save_and_load_need_little_extra_memory(tmp_path):
    pid, end = warm.fork(measure_memory, str(tmp_path))
    try:
        assert end.poll(120), "no answer"
        figures = dict(zip(("save", "save view", "load", "cast"), end.recv(), strict=True))
    finally:
        warm.kill_and_wait([pid])
    assert all(extra < 0.2 * LARGE_BYTES for extra in figures.values()), figures


class FlakyObjectStore(fs.FileSystemHandler):
    """An object store backed by a local folder; its first requests fail."""

    def __init__(self, root, failures=0):
        self.root, self.left, self.tries = Path(root), failures, 0

    def _answer(self):
        self.tries += 1
        if self.left:
            self.left -= 1
            raise OSError("503 slow down")

    def get_type_name(self):
        return "store"

    def get_file_info(self, paths):
        return fs.LocalFileSystem().get_file_info([str(self.root / path) for path in paths])

    def open_input_stream(self, path):
        self._answer()
        return fs.LocalFileSystem().open_input_stream(str(self.root / path))

    def open_input_file(self, path):
        self._answer()
        return fs.LocalFileSystem().open_input_file(str(self.root / path))

    def open_output_stream(self, path, metadata):
        if path.endswith(INDEX):
            self._answer()
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        return fs.LocalFileSystem().open_output_stream(str(self.root / path))


for name in fs.FileSystemHandler.__abstractmethods__ - set(vars(FlakyObjectStore)):
    setattr(FlakyObjectStore, name, lambda self, *_: None)
FlakyObjectStore.__abstractmethods__ = frozenset()


def test_object_store_requests_are_retried(small_blocks, tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "RETRY_DELAYS_S", (0.01, 0.01, 0.01))
    store = FlakyObjectStore(tmp_path)

    def open_store(uri):
        return fs.PyFileSystem(store), uri.removeprefix("store://")

    for module in (index, rawfile, raytrec.common.storage):
        monkeypatch.setattr(module, "open_filesystem", open_store)
    tensors = {"a": draw_values((40, 3), torch.float32, 1), "b": draw_values((5, 9), torch.bfloat16, 2).t()}
    store.left = 2
    save_alone("store://bucket/c", tensors, note="x")
    store.left = 3
    assert read_index("store://bucket/c")["about"] == {"note": "x"}
    store.left = 2
    assert all(is_same(t, tensors[n]) for n, t in load_alone("store://bucket/c", tensors).items())
    assert "File exists" in get_failure(lambda: save_alone("store://bucket/c", tensors)).what
    assert sorted(p.name for p in (tmp_path / "bucket/c").iterdir()) == ["a-00000.bin", INDEX]
    store.left = 99
    assert "503" in get_failure(lambda: save_alone("store://bucket/d", tensors)).what
    assert not (tmp_path / "bucket/d" / INDEX).exists()
    store.left = 99
    with pytest.raises(CheckpointError, match="503 slow down") as error:
        read_index("store://bucket/c")
    assert "up to 4 attempts" in error.value.expected
    store.left = 0
    checkpoints.flip_lowest_bit(tmp_path / "bucket/c/a-00000.bin", 70)
    assert "tensor a, bytes 64 to 127" in get_failure(load_alone, "store://bucket/c", tensors).where


def test_driver_reads_index_without_torch(saved_checkpoint):
    code = (
        "import sys; from raytrec.checkpoint.index import read_index;"
        "assert not {'torch', 'numpy', 'pyarrow'} & set(sys.modules); read_index(sys.argv[1]);"
        "import raytrec.checkpoint.rows; assert not {'torch', 'ray'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(saved_checkpoint[0])], check=True, timeout=60)
