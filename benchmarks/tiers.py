"""Memory use and speed of tables in memory (fused) and in a file (fused_mmap).

    python benchmarks/tiers.py [--gib 1] [--steps 100] [--turns 20] [--kernels fused,fused_mmap]

One rank without Ray trains DLRM with one table of --gib GiB, including row-wise Adagrad's state, and 8
features of 0 to 4 ids per row, on 2,048 rows per step.

Memory: for each kernel, a process initializes the table, trains --steps steps, saves the table, and saves it
again during training. Another process restores the checkpoint and continues.

÷ table   peak of the process's private and shared memory in the phase, less the memory before the table was
          created, divided by the bytes of weights and state. Pages of a table's file are excluded, because the
          system can drop them
resumed   yes if the losses after restoring equal those of the first process, bit for bit

Speed: one process trains a table with each kernel in turns of 16 steps. Ids are uniform or skewed. Uniform ids
are the worst case for a table in a file, because almost every id is on a different page. Of skewed ids, half
are from 3 % of the rows.

ms per step   median over turns
equal         yes if all losses equal those of the first kernel, bit for bit

Short memory: a table of --short-gib GiB is trained by several variants in turns of 16 new steps, with lookups by
a power law with exponent 1.05 (tiers_short.py). A cgroup limits memory, including the pages of files, to the
size of the process without the table plus a quarter of the table. This requires the right to create memory
cgroups (v1). On other machines, memory is not limited and no measurements are stored.

A table larger than memory: --gib 30 --steps 32 --kernels fused_mmap --turns 0 --short-gib 0, with twice as
much free space in --folder. Short memory alone: --kernels "".

Writes benchmarks/results/tiers.json and the tables in docs/benchmarks.md and docs/sharding.md.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from threading import Event, Thread
from time import perf_counter
from typing import Annotated, Any

import harness
import typer
from harness import Grid, take_turns
from psutil import virtual_memory
from rank_group import on_ranks
from tiers_short import run_short, short_table
from tiers_side import BATCHES, DIM, IDS, ROW_BYTES, Settings, Trained, own_memory, set_up_once

SAMPLE_S = 0.002
WARM_UP = 2  # number of turns that are not counted
PHASES = ("initialize", "train", "save", "save while training", "restore")


@dataclass
class Phase:
    """Cost of a phase: peak bytes of the process's anonymous and shared memory, and seconds."""

    memory: int = 0
    seconds: float = 0.0


@contextmanager
def watched(phase: Phase, base_bytes: int) -> Iterator[None]:
    """Record the duration and the peak memory of the block.

    Args:
        phase: Record to fill in.
        base_bytes: Number of bytes to subtract from the measured memory.
    """
    over = Event()

    def look() -> None:
        while not over.wait(SAMPLE_S):
            phase.memory = max(phase.memory, own_memory() - base_bytes)

    thread, began = Thread(target=look), perf_counter()
    thread.start()
    try:
        yield
    finally:
        phase.seconds = perf_counter() - began
        over.set()
        thread.join()


def first_run(rank: int, device: Any, settings: Settings) -> tuple[dict[str, dict], list[float]]:
    """Initialize, train and save; return memory and seconds by phase, and the losses since the last save began."""
    set_up_once(settings)
    base_bytes, phases = own_memory(), {name: Phase() for name in PHASES[:4]}
    with watched(phases["initialize"], base_bytes):
        trained = Trained(settings, settings.rows, fill=True)
    with watched(phases["train"], base_bytes):
        trained.train(settings.steps)
    with watched(phases["save"], base_bytes):
        trained.save()
    with watched(phases["save while training"], base_bytes):
        losses = trained.save_while_training()
    return {name: asdict(phase) for name, phase in phases.items()}, losses


def second_run(rank: int, device: Any, settings: Settings) -> tuple[dict[str, dict], list[float]]:
    """Restore and train; return memory and seconds of the phase "restore", and the losses after restoring."""
    set_up_once(settings)
    base_bytes, phase = own_memory(), Phase()
    trained = Trained(settings, settings.rows, fill=False)
    with watched(phase, base_bytes):
        trained.restore()
    return {"restore": asdict(phase)}, trained.train(BATCHES)


def run_in_turns(rank: int, device: Any, each: list[Settings], turns: int) -> list[dict[str, Any]]:
    """Train all kernels in turns; return their speed and whether losses are equal, for each kind of ids."""
    set_up_once(each[0])
    rigs = {settings.kernel: Trained(settings, settings.rows, fill=True) for settings in each}
    lines = []
    for ids in IDS:
        losses: dict[str, list[float]] = {kernel: [] for kernel in rigs}

        def turn(kernel: str, ids: str = ids, losses: dict[str, list[float]] = losses) -> float:
            began = perf_counter()
            losses[kernel] += rigs[kernel].train(BATCHES, ids)
            return (perf_counter() - began) / BATCHES

        seconds = take_turns({kernel: lambda kernel=kernel: turn(kernel) for kernel in rigs}, turns, WARM_UP)
        first, *others = losses.values()
        medians = {kernel: median(took) for kernel, took in seconds.items()}
        lines.append({"ids": ids, "seconds": medians, "equal": all(other == first for other in others)})
    return lines


def measure_memory(settings: Settings) -> dict[str, Any]:
    """Return the memory and seconds of a kernel's phases, and True if resuming reproduces the losses."""
    ((first, first_losses),) = on_ranks(1, first_run, settings)
    ((second, resumed),) = on_ranks(1, second_run, settings)
    phases, size = first | second, settings.rows * ROW_BYTES
    return {
        "kernel": settings.kernel,
        "resumed": first_losses[:BATCHES] == resumed,
        "memory": {name: phase["memory"] / size for name, phase in phases.items()},
        "seconds": {name: phase["seconds"] for name, phase in phases.items()},
    }


def measure_short(folder: Path, gib: float, smallest: bool) -> None:
    """Measure and print the speed with limited memory, and store the results if a cgroup limited memory."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        found = run_short(place, *((0.25, 1, 1) if smallest else (gib, 16, 8)))
    text = short_table(found).markdown()
    print(f"{text}\n\nlosses are {'' if found['equal'] else 'NOT '}equal")
    if found["bounded"] and not smallest:
        harness.publish("tiers", harness.load("tiers") | {"short": found}, text, "docs/sharding.md")


def main(
    gib: Annotated[float, typer.Option(help="Size of the table and its state in GiB.")] = 1.0,
    steps: Annotated[int, typer.Option(help="Number of training steps before the table is saved.")] = 100,
    turns: Annotated[int, typer.Option(help="Number of turns of each kernel for speed; 0: no turns.")] = 20,
    kernels: Annotated[str, typer.Option(help="Kernels, separated by commas.")] = "fused,fused_mmap",
    folder: Annotated[Path, typer.Option(help="Folder for checkpoints and the tables' files.")] = Path("data"),
    short_gib: Annotated[float, typer.Option(help="Size in GiB of the table with limited memory; 0: skip.")] = 0.25,
    smallest: harness.Smallest = False,
) -> None:
    """Measure and print the tables that the module docstring describes; without --smallest, store the results."""
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    if short_gib:
        measure_short(folder, short_gib, smallest)
    rows = int((0.01 if smallest else gib) * 2**30) // ROW_BYTES
    steps, turns = (5, 2) if smallest else (steps, turns)
    chosen, lines, speed = [], [], []
    for kernel in harness.split(kernels):
        with tempfile.TemporaryDirectory(dir=folder) as place:
            chosen.append(Settings(kernel, rows, steps, place))
            lines.append(measure_memory(chosen[-1]))
    if not chosen:
        return
    show_memory(lines, rows)
    if turns:
        with tempfile.TemporaryDirectory(dir=folder) as place:
            (speed,) = on_ranks(1, run_in_turns, [replace(one, folder=place) for one in chosen], turns)
        show_speed(speed)
    if not smallest:
        content = {"rows": rows, "dim": DIM, "steps": steps, "turns": turns, "memory": lines, "speed": speed}
        alone = {"alone": content | {"host_memory": virtual_memory().total}}
        content = harness.load("tiers") | (content if speed else alone)
        harness.store("tiers", content)
        if "speed" in content:
            harness.fill(harness.BENCHMARKS_PAGE, "tiers", document(content))


def show_memory(lines: list[dict[str, Any]], rows: int) -> None:
    """Print the memory and the seconds of each kernel's phases."""
    header = ("kernel", *(f"{name}: ÷ table, s" for name in PHASES), "resumed")
    cells = [
        [
            line["kernel"],
            *(f"{line['memory'][name]:.2f}, {line['seconds'][name]:.1f}" for name in PHASES),
            "yes" if line["resumed"] else "no",
        ]
        for line in lines
    ]
    Grid(header, cells, f"{rows:,} rows of {DIM}, {rows * ROW_BYTES / 2**30:.2f} GiB with their state").show(150)


def speed_row(line: dict[str, Any]) -> list[str]:
    """Return a table row with each kernel's ms per step, and the ratio of the last to the first."""
    each = list(line["seconds"].values())
    return [line["ids"], *(f"{1000 * seconds:.1f}" for seconds in each), f"{each[-1] / each[0]:.2f}"]


def show_speed(lines: list[dict[str, Any]]) -> None:
    """Print the speed of the kernels for each kind of ids."""
    header = ("ids", *lines[0]["seconds"], "last ÷ first", "equal")
    rows = [[*speed_row(line), "yes" if line["equal"] else "no"] for line in lines]
    Grid(header, rows, "ms per step").show()


def document(results: dict[str, Any]) -> str:
    """Return the text for docs/benchmarks.md: memory and seconds of each phase, and the speed of training."""
    rows = [
        [f"`{line['kernel']}`: peak memory ÷ table", *(f"{line['memory'][name]:.2f}" for name in PHASES)]
        for line in results["memory"]
    ]
    if alone := results.get("alone"):
        size, host = alone["rows"] * ROW_BYTES / 2**30, alone["host_memory"] / 2**30
        rows += [
            [
                f"`{line['kernel']}`, {size:,.0f} GiB on a {host:,.0f} GiB machine: {title}",
                *(f"{line[of][name]:,.{digits}f}" for name in PHASES),
            ]
            for line in alone["memory"]
            for title, of, digits in (("peak memory ÷ table", "memory", 2), ("seconds", "seconds", 0))
        ]
    first, *_, last = results["speed"][0]["seconds"]
    ratios = " and ".join(f"{speed_row(line)[-1]} ({line['ids']} ids)" for line in results["speed"])
    speed = f"Time per step, `{last}` ÷ `{first}`: {ratios}."
    return f"{Grid(('kernel', *PHASES), rows).markdown()}\n\n{speed}"


if __name__ == "__main__":
    typer.run(main)
