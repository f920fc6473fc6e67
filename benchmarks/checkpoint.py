"""Speed of writing and reading checkpoints, compared with plain files and torch's own storage.

    python benchmarks/checkpoint.py [--gib 1] [--rounds 3] [--folder data]

Four row-wise sharded tables with one value of optimizer state per row are saved and loaded by 1 and by 2
processes over gloo, on this machine's disk. The variants take turns. The table shows medians over turns of the
seconds and of the ratio to plain in the same turn. The slowest rank determines the time of a turn.

plain       each rank writes its tensors sequentially to a file and syncs it; reads the file into tensors
raytrec     ShardWriter and ShardReader in torch.distributed.checkpoint: checksums, planning, commit
torch       unmodified FileSystemWriter and FileSystemReader: no checksums, pickled metadata

Files are read twice: from the system's page cache after writing, and from the disk after the files have been
dropped from the page cache. (A virtual disk may have another cache.) "step waits" is the time for which a
training step waits for the copy of an asynchronous save; its ratio is relative to a plain write.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from itertools import count
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import harness
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import typer
from harness import Grid, forget, median_ratio, take_turns
from rank_group import group_seconds, on_ranks

from raytrec.checkpoint.save import CheckpointWriter
from raytrec.checkpoint.storage import ShardReader, ShardWriter
from raytrec.compat.torch_ import Shard, ShardedTensor, ShardMetadata, make_sharded_tensor
from raytrec.config.training import CheckpointSection

TABLES, DIM = 4, 16
PIECE = 4 << 20  # bytes of a plain file read or written at a time
State = dict[str, ShardedTensor]
FROM_DISK, WAITS = "read, from disk", "step waits"
PHASES = ("write", "read, in memory", FROM_DISK)


def tables(rank: int, world: int, rows: int, fill: bool) -> State:
    """Return TABLES tables [rows, DIM] and as many optimizer states [rows], sharded by rows; float32.

    Args:
        rank: Number of the rank.
        world: Number of ranks.
        rows: Number of rows in each table.
        fill: True for random numbers; False for zeros, as destinations for loading.
    """
    tensors = {}
    for i in range(TABLES):
        for name, columns in ((f"tables/{i}/weight", (DIM,)), (f"tables/{i}/sum", ())):
            shards = [
                ShardMetadata(
                    [rows * r // world, *(0 for _ in columns)],
                    [rows * (r + 1) // world - rows * r // world, *columns],
                    f"rank:{r}/cpu",
                )
                for r in range(world)
            ]
            size = shards[rank].shard_sizes
            values = torch.randn(size) if fill else torch.full(size, 0.0)
            local = [Shard(values, shards[rank])]
            tensors[name] = make_sharded_tensor(local, shards, (rows, *columns), torch.float32)
    return tensors


def memories(state: State) -> list[memoryview]:
    """Return the memory of this rank's shards."""
    return [memoryview(t.local_shards()[0].tensor.view(-1).view(torch.uint8).numpy()) for t in state.values()]


def plain_write(folder: Path, state: State) -> None:
    """Write this rank's shards sequentially to one file, and sync the file."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"{dist.get_rank()}.bin", "wb", buffering=0) as file:
        for data in memories(state):
            for begin in range(0, len(data), PIECE):
                file.write(data[begin : begin + PIECE])
        os.fsync(file.fileno())


def plain_read(folder: Path, state: State) -> None:
    """Read this rank's file into its shards."""
    with open(folder / f"{dist.get_rank()}.bin", "rb", buffering=0) as file:
        for data in memories(state):
            for begin in range(0, len(data), PIECE):
                file.readinto(data[begin : begin + PIECE])


WRITE: dict[str, Callable[[Path, State], object]] = {
    "plain": plain_write,
    "raytrec": lambda folder, state: dcp.save(state, storage_writer=ShardWriter(str(folder), "a", {})),
    "torch": lambda folder, state: dcp.save(state, storage_writer=dcp.FileSystemWriter(folder)),
}
READ: dict[str, Callable[[Path, State], object]] = {
    "plain": plain_read,
    "raytrec": lambda folder, state: dcp.load(state, storage_reader=ShardReader(str(folder))),
    "torch": lambda folder, state: dcp.load(state, storage_reader=dcp.FileSystemReader(folder)),
}


def turn(name: str, folder: Path, state: State, into: State) -> dict[str, float]:
    """Write and read with a variant, verify the values and remove the files; return phase → seconds."""
    rank = dist.get_rank()
    seconds = {"write": group_seconds(lambda: WRITE[name](folder, state))}
    for phase in PHASES[1:]:
        for data in memories(into):
            torch.frombuffer(data, dtype=torch.uint8).zero_()
        if rank == 0 and phase == FROM_DISK:
            forget(folder.iterdir())
        seconds[phase] = group_seconds(lambda: READ[name](folder, into))
        for one, other in zip(state.values(), into.values(), strict=True):
            assert torch.equal(one.local_shards()[0].tensor, other.local_shards()[0].tensor), (name, phase)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder)
        os.sync()  # so that no variant waits for another variant's pages
    return seconds


def copied(saver: CheckpointWriter, step: int, state: State) -> float:
    """Save asynchronously, and return the seconds that a step waits, as the maximum over ranks."""
    saver.save(step, state, {})
    saved = saver.collect_outcome()
    assert saved is not None and saved.error is None
    waited = torch.tensor(saved.blocked_s)
    dist.all_reduce(waited, dist.ReduceOp.MAX)
    return float(waited)


def measure(
    rank: int, device: Any, world: int, folder: Path, rows: int, rounds: int
) -> dict[str, list[dict[str, float]]]:
    """Return a mapping from variant to the seconds by phase for each turn."""
    state, into = tables(rank, world, rows, fill=True), tables(rank, world, rows, fill=False)
    saver = CheckpointWriter(str(folder / f"saver-{world}"), CheckpointSection(keep_last=1, every_s=None))
    steps = count(1)

    def of_variant(name: str) -> dict[str, float]:
        found = turn(name, folder / f"{name}-{world}", state, into)
        return found | ({WAITS: copied(saver, next(steps), state)} if name == "raytrec" else {})

    return take_turns({name: lambda name=name: of_variant(name) for name in WRITE}, rounds, warm_up=1)


def rows_of(gib: float, world: int, turns: dict[str, list[dict[str, float]]]) -> list[list[str]]:
    """Return the rows of the table for a number of processes."""
    rows = []
    for phase in (*PHASES, WAITS):
        plain = [each["write" if phase == WAITS else phase] for each in turns["plain"]]
        for name in WRITE if phase != WAITS else ["raytrec"]:
            seconds = [each[phase] for each in turns[name]]
            figures = median(seconds), gib / median(seconds), median_ratio(plain, seconds)
            rows.append([str(world), phase, name, *(f"{value:.2f}" for value in figures)])
    return rows


def main(
    gib: Annotated[float, typer.Option(help="Total size of all tensors in GiB.")] = 1.0,
    rounds: harness.Rounds = 3,
    folder: Annotated[Path, typer.Option(help="Folder for temporary files.")] = Path("data"),
    smallest: harness.Smallest = False,
) -> None:
    """Measure all variants with 1 and 2 processes, and print the table."""
    gib, rounds = (0.02, 1) if smallest else (gib, rounds)
    rows = int(gib * 2**30 / (TABLES * (DIM + 1) * 4))
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=folder) as place:
        for world in (1, 2):
            turns = on_ranks(world, measure, world, Path(place).absolute(), rows, rounds)[0]
            lines += rows_of(gib, world, turns)
    title = f"{gib:g} GiB, {os.cpu_count()} cores, median of {rounds}"
    Grid(("processes", "phase", "variant", "seconds", "GiB/s", "× plain"), lines, title, left=3).show()


if __name__ == "__main__":
    typer.run(main)
