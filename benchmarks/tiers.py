"""What a table takes of memory, and how fast it trains: in memory (fused), and in a file (fused_mmap).

    python benchmarks/tiers.py [--gib 1] [--steps 200] [--rounds 3] [--kernels fused,fused_mmap]

One rank without Ray trains DLRM over one table with row-wise Adagrad, of --gib with its state, from 8
features of 0 to 4 ids a row, 2,048 rows a step. Ids are uniform (the worst for a table in a file: nearly each
is of another page) and skewed (half of all ids are of 3 % of the rows). For each kernel, a process
initialises the table, trains, saves it, and saves it once more while it trains; another one restores that
and trains on.

memory ÷ table  the most memory of the process's own in that phase, less what it had before it made the table,
                over the bytes of weights and state. Pages of a table's file are not the process's own: the
                system takes them away when it wants them.
steps/s         the best of the rounds, in which the kernels take turns; the first steps are not counted
equal           whether the losses of all steps are those of the first kernel, bit for bit
resumed         whether the losses after restoring are those that the first process went on with, bit for bit

A table larger than memory: --gib 30 --kernels fused_mmap --rounds 1 --steps 30, with room for twice that in
--folder.
Prints a table and writes benchmarks/results/tiers.json.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from threading import Event, Thread
from time import perf_counter
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from tiers_side import DIM, IDS, PIECE, ROW_BYTES, WARM_UP, Settings, Trained, begin

RESULTS = Path(__file__).parent / "results" / "tiers.json"
SAMPLE_S = 0.002
PHASES = ("initialise", "train", "save", "save while training", "restore")


@dataclass
class Phase:
    """What a phase took: bytes of the process's own memory at most, and seconds."""

    memory: int = 0
    seconds: float = 0.0


@dataclass
class Outcome:
    """What a process has found.

    Attributes:
        losses: of the steps that are measured.
        seconds: of these, but for the first few.
        after: losses of steps after the last save, or after restoring it.
    """

    phases: dict[str, Phase]
    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0
    after: list[float] = field(default_factory=list)


def own_memory() -> int:
    """Bytes of this process's memory that are of no file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


@contextmanager
def watched(phase: Phase, before: int) -> Iterator[None]:
    """Notes a block's seconds, and the most memory in it beyond what was there before."""
    over = Event()

    def look() -> None:
        while not over.wait(SAMPLE_S):
            phase.memory = max(phase.memory, own_memory() - before)

    thread, began = Thread(target=look), perf_counter()
    thread.start()
    try:
        yield
    finally:
        phase.seconds = perf_counter() - began
        over.set()
        thread.join()


def first_run(store: str, settings: Settings) -> Outcome:
    """Initialises, trains and saves."""
    begin(store, settings)
    before, found = own_memory(), Outcome({name: Phase() for name in PHASES[:4]})
    with watched(found.phases["initialise"], before):
        made = Trained(settings, settings.rows, fill=True)
    with watched(found.phases["train"], before):
        found.losses, found.seconds = made.train(settings.steps, settings.ids)
    if settings.save:
        with watched(found.phases["save"], before):
            made.save()
        with watched(found.phases["save while training"], before):
            found.after = made.save(settings.ids)
    return found


def second_run(store: str, settings: Settings) -> Outcome:
    """Restores, and trains on."""
    begin(store, settings)
    before, found = own_memory(), Outcome({"restore": Phase()})
    made = Trained(settings, settings.rows, fill=False)
    with watched(found.phases["restore"], before):
        made.restore()
    found.after = made.train(PIECE, settings.ids)[0]
    return found


def outcome_of(run: Callable[[str, Settings], Outcome], settings: Settings) -> Outcome:
    """What a run, in a process of its own, has found."""
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(run, f"{folder}/store", settings).result()


def main(
    gib: Annotated[float, typer.Option(help="Of the table, with its state.")] = 1.0,
    steps: Annotated[int, typer.Option(help="Of training, in each run.")] = 200,
    rounds: Annotated[int, typer.Option(help="In which the kernels take turns.")] = 3,
    kernels: Annotated[str, typer.Option(help="With commas between.")] = "fused,fused_mmap",
    folder: Annotated[Path, typer.Option(help="Checkpoints and files of tables go there.")] = Path("data"),
    smallest: Annotated[bool, typer.Option(help="Does it still run?")] = False,
) -> None:
    """Prints a table; see the top of this file."""
    rows = int((0.01 if smallest else gib) * 2**30) // ROW_BYTES
    steps, rounds = (WARM_UP + 5, 1) if smallest else (steps, rounds)
    folder.mkdir(parents=True, exist_ok=True)
    names, found = kernels.split(","), {}
    for number in range(rounds):
        for ids in IDS:
            for kernel in names:
                with tempfile.TemporaryDirectory(dir=folder.absolute()) as place:
                    save = number == 0 and ids == "uniform"
                    settings = Settings(kernel, ids, rows, steps, place, save)
                    measure(found.setdefault((kernel, ids), {}), settings)
    lines = [line_of(kernel, ids, found, names[0], rows * ROW_BYTES) for kernel in names for ids in IDS]
    show(lines, rows)
    if not smallest:
        RESULTS.write_text(json.dumps({"rows": rows, "dim": DIM, "steps": steps, "lines": lines}, indent=1))


def measure(found: dict[str, Any], settings: Settings) -> None:
    """Adds one round of a kernel to what was found of it before."""
    first = outcome_of(first_run, settings)
    found["seconds"] = min(first.seconds, found.get("seconds", first.seconds))
    found.setdefault("losses", []).append(first.losses)
    if settings.save:
        second = outcome_of(second_run, settings)
        found["phases"] = first.phases | second.phases
        found["resumed"] = first.after[:PIECE] == second.after


def line_of(kernel: str, ids: str, found: dict, first: str, size: int) -> dict[str, Any]:
    """A line of the table."""
    own, steps = found[kernel, ids], len(found[kernel, ids]["losses"][0]) - WARM_UP
    phases = {name: asdict(phase) for name, phase in own.get("phases", {}).items()}
    return {
        "kernel": kernel,
        "ids": ids,
        "steps_per_s": steps / own["seconds"],
        "equal": own["losses"] == found[first, ids]["losses"],
        "resumed": own.get("resumed"),
        "memory": {name: phase["memory"] / size for name, phase in phases.items()},
        "seconds": {name: phase["seconds"] for name, phase in phases.items()},
    }


def show(lines: list[dict[str, Any]], rows: int) -> None:
    """Prints the lines."""
    table = Table(title=f"{rows:,} rows of {DIM}, {rows * ROW_BYTES / 2**30:.2f} GiB with their state")
    phases = [f"{name}: ÷ table, s" for name in PHASES]
    for column in ("kernel", "ids", "steps/s", "equal", "resumed", *phases):
        table.add_column(column)
    for line in lines:
        cells = [
            f"{line['memory'][name]:.2f}, {line['seconds'][name]:.1f}" if name in line["memory"] else ""
            for name in PHASES
        ]
        same = [{True: "yes", False: "no", None: ""}[line[name]] for name in ("equal", "resumed")]
        table.add_row(line["kernel"], line["ids"], f"{line['steps_per_s']:.1f}", *same, *cells)
    Console(width=160).print(table)


if __name__ == "__main__":
    typer.run(main)
