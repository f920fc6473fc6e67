"""How fast checkpoints are written and read, against plain files of the same bytes and torch's own storage.

    python benchmarks/checkpoint.py [--gib 1] [--rounds 3] [--folder data]

Four tables with one value of optimizer state a row, sharded by rows, are saved and loaded by 1 and by 2
processes over gloo, on this machine's disk. The variants take turns, so that a machine that grows slower does
so for all. What is printed is the median of the turns, of seconds and of the share of plain in the same turn.
A turn's time is that of the slowest rank.

plain       each rank writes its tensors to a file, one after the other, and syncs it; reads them into tensors
raytrec     ShardWriter and ShardReader in torch.distributed.checkpoint: checksums, planning, commit
torch       FileSystemWriter and FileSystemReader there, as they come: no checksums, pickled metadata

Files are read twice: as they lie in the system's page cache after writing, which is as fast as memory, and
from the disk, after the system has been told to forget them. (A virtual disk may have a cache of its own.)
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter
from typing import Annotated

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import typer
from documents import keep
from rank_group import join_group
from rich.console import Console
from rich.table import Table

from raytrec.checkpoint.save import Saver
from raytrec.checkpoint.storage import ShardReader, ShardWriter
from raytrec.compat.torch_ import Shard, ShardedTensor, ShardMetadata, sharded_tensor
from raytrec.config.training import CheckpointSection

RESULTS = Path(__file__).parent / "results" / "checkpoint.json"
TABLES, DIM = 4, 16
PIECE = 4 << 20  # bytes of a plain file at a time
TIMEOUT_S = 1200
State = dict[str, ShardedTensor]
VARIANTS = ("plain", "raytrec", "torch")
PHASES = ("write", "read, in memory", "read, from disk")


def tables(rank: int, world: int, rows: int, fill: bool) -> State:
    """TABLES tables of [rows, DIM] and as many states of [rows], sharded by rows; float32.

    Args:
        fill: with numbers, rather than zeros to load into.
    """
    found = {}
    for i in range(TABLES):
        for name, rest in ((f"tables/{i}/weight", (DIM,)), (f"tables/{i}/sum", ())):
            shards = [
                ShardMetadata(
                    [rows * r // world, *(0 for _ in rest)],
                    [rows * (r + 1) // world - rows * r // world, *rest],
                    f"rank:{r}/cpu",
                )
                for r in range(world)
            ]
            size = shards[rank].shard_sizes
            values = torch.randn(size) if fill else torch.full(size, 0.0)
            local = [Shard(values, shards[rank])]
            found[name] = sharded_tensor(local, shards, (rows, *rest), torch.float32)
    return found


def memories(state: State) -> list[memoryview]:
    """The bytes of this rank's shards."""
    return [memoryview(t.local_shards()[0].tensor.view(-1).view(torch.uint8).numpy()) for t in state.values()]


def plain_write(folder: Path, state: State) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"{dist.get_rank()}.bin", "wb", buffering=0) as file:
        for data in memories(state):
            for begin in range(0, len(data), PIECE):
                file.write(data[begin : begin + PIECE])
        os.fsync(file.fileno())


def plain_read(folder: Path, state: State) -> None:
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


def timed(call: Callable[[Path, State], object], folder: Path, state: State) -> float:
    """Seconds until all ranks are done."""
    dist.barrier()
    began = perf_counter()
    call(folder, state)
    dist.barrier()
    return perf_counter() - began


def forget(folder: Path) -> None:
    """Drops files from the page cache."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def turn(name: str, folder: Path, state: State, into: State) -> dict[str, float]:
    """One write and two reads of a variant, in seconds; checks what has been read; removes the files."""
    rank = dist.get_rank()
    found = {"write": timed(WRITE[name], folder, state)}
    for phase in PHASES[1:]:
        for data in memories(into):
            torch.frombuffer(data, dtype=torch.uint8).zero_()
        if rank == 0 and phase == "read, from disk":
            forget(folder)
        found[phase] = timed(READ[name], folder, into)
        for one, other in zip(state.values(), into.values(), strict=True):
            assert torch.equal(one.local_shards()[0].tensor, other.local_shards()[0].tensor), (name, phase)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder)
        os.sync()  # so that no variant waits for what another left
    return found


def copied(saver: Saver, step: int, state: State) -> float:
    """Seconds that a step of training waits for an asynchronous save, on the slowest rank."""
    saver.save(step, state, {})
    saved = saver.taken()
    assert saved is not None and saved.error is None
    waited = torch.tensor(saved.blocked_s)
    dist.all_reduce(waited, dist.ReduceOp.MAX)
    return float(waited)


def work(rank: int, world: int, folder: Path, rows: int, rounds: int, end) -> None:
    """One rank: all turns; rank 0 sends [{variant: {phase: seconds}}]."""
    join_group(rank, world, f"{folder}/store-{world}")
    state, into = tables(rank, world, rows, fill=True), tables(rank, world, rows, fill=False)
    saver = Saver(str(folder / f"saver-{world}"), CheckpointSection(keep_last=1, every_s=None))
    turns = []
    for i in range(rounds + 1):
        order = [VARIANTS[(i + k) % len(VARIANTS)] for k in range(len(VARIANTS))]  # each is first at times
        turns.append({name: turn(name, folder / f"{name}-{world}-{i}", state, into) for name in order})
        turns[-1]["raytrec"]["copy"] = copied(saver, i, state)
    if rank == 0:
        end.send(turns[1:])  # the first one loads code
    dist.destroy_process_group()


def measure(world: int, folder: Path, rows: int, rounds: int) -> list[dict]:
    context = get_context("spawn")
    here, there = context.Pipe(duplex=False)
    args = (world, folder, rows, rounds, there)
    processes = [context.Process(target=work, args=(rank, *args), daemon=True) for rank in range(world)]
    for process in processes:
        process.start()
    there.close()
    try:
        if not here.poll(TIMEOUT_S):
            raise TimeoutError(f"{world} processes did not end within {TIMEOUT_S} s")
        return here.recv()
    finally:
        for process in processes:
            process.join(30)
            process.kill()


def main(
    gib: Annotated[float, typer.Option(help="Of all tensors together.")] = 1.0,
    rounds: Annotated[int, typer.Option(help="Turns of each variant.")] = 3,
    folder: Annotated[Path, typer.Option(help="Where the files go, for the time being.")] = Path("data"),
    write: Annotated[bool, typer.Option(help="Write benchmarks/results/checkpoint.json.")] = True,
    smallest: Annotated[bool, typer.Option(help="The smallest sizes; writes nothing.")] = False,
) -> None:
    """Prints a table and writes benchmarks/results/checkpoint.json."""
    gib, rounds, write = (0.02, 1, False) if smallest else (gib, rounds, write)
    rows = int(gib * 2**30 / (TABLES * (DIM + 1) * 4))
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=folder) as place:
        for world in (1, 2):
            found[world] = summary(gib, measure(world, Path(place).absolute(), rows, rounds))
    show(gib, rounds, found)
    if write:
        values = {"gib": gib, "rounds": rounds, "cores": os.cpu_count(), "processes": found}
        RESULTS.parent.mkdir(exist_ok=True)
        keep(RESULTS, values)


def summary(gib: float, turns: list[dict]) -> dict[str, dict[str, dict[str, float]]]:
    """{phase: {variant: {seconds, gib_per_s, of_plain}}}, medians."""
    out: dict[str, dict] = {phase: {} for phase in PHASES}
    for phase in PHASES:
        for name in VARIANTS:
            seconds = statistics.median(turn[name][phase] for turn in turns)
            share = statistics.median(turn["plain"][phase] / turn[name][phase] for turn in turns)
            out[phase][name] = {"seconds": seconds, "gib_per_s": gib / seconds, "of_plain": share}
    waits = statistics.median(turn["raytrec"]["copy"] for turn in turns)
    share = statistics.median(turn["plain"]["write"] / turn["raytrec"]["copy"] for turn in turns)
    out["step waits"] = {"raytrec": {"seconds": waits, "gib_per_s": gib / waits, "of_plain": share}}
    return out


def show(gib: float, rounds: int, found: dict[int, dict]) -> None:
    table = Table(title=f"{gib:g} GiB, {os.cpu_count()} cores, median of {rounds}")
    for column in ("processes", "phase", "variant", "seconds", "GiB/s", "of plain"):
        text = column in ("phase", "variant")
        table.add_column(column, justify="left" if text else "right", no_wrap=True)
    for world, phases in found.items():
        for phase, variants in phases.items():
            for name, figures in variants.items():
                cells = [f"{value:.2f}" for value in figures.values()]
                last = name == VARIANTS[-1] or phase not in PHASES
                table.add_row(str(world), phase, name, *cells, end_section=last)
    console = Console()
    console.print(table)
    console.print(
        "plain: the same bytes in one file a rank, synced, nothing checked. Reads in memory are of files "
        "that the system still holds; from disk, of files that it has forgotten. The step waits for the copy "
        "that a thread then writes; its share is of a plain write."
    )


if __name__ == "__main__":
    typer.run(main)
