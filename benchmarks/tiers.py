"""What a table takes of memory, and how fast it trains: in memory (fused), and in a file (fused_mmap).

    python benchmarks/tiers.py [--gib 1] [--steps 100] [--turns 20] [--kernels fused,fused_mmap]

One rank without Ray trains DLRM over one table with row-wise Adagrad, of --gib with its state, from 8
features of 0 to 4 ids a row, 2,048 rows a step.

Memory: for each kernel, a process initialises the table, trains --steps, saves it, and saves it once more
while it trains; another one restores that and trains on.

÷ table   the most memory of the process's own in that phase, less what it had before it made the table, over
          the bytes of weights and state. Pages of a table's file are not the process's own: the system takes
          them away when it wants them.
resumed   whether the losses after restoring are those that the first process went on with, bit for bit

Speed: one process trains a table of each kernel, 16 steps at a time, in turns. Ids are uniform (the worst for
a table in a file: nearly each is of another page) and skewed (half of all ids are of 3 % of the rows).

ms a step the median over turns
equal     whether all losses are those of the first kernel, bit for bit

Short memory: a table of --short-gib is trained on several sides in turns, 16 new steps at a time, by lookups
of a power law of exponent 1.05 (tiers_short.py). Memory, with the pages of files, is bounded by a cgroup to
what the process takes without the table, and a quarter of it. That takes a machine on which this process may
make memory cgroups (v1); elsewhere nothing is bounded, and no figures are kept.

A table larger than memory: --gib 30 --steps 32 --kernels fused_mmap --turns 0 --short-gib 0, with room for
twice that in --folder. Short memory alone: --kernels "".

Prints three tables; writes benchmarks/results/tiers.json and the tables of docs/benchmarks.md and
docs/sharding.md.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from threading import Event, Thread
from time import perf_counter
from typing import Annotated, Any

import typer
from documents import fill, keep
from psutil import virtual_memory
from rich.console import Console
from rich.table import Table
from tiers_short import document_short, run_short
from tiers_side import BATCHES, DIM, IDS, ROW_BYTES, Settings, Trained, begin, own_memory

RESULTS = Path(__file__).parent / "results" / "tiers.json"
SAMPLE_S = 0.002
WARM_UP = 2  # turns that are not counted
WARM_UP_SHORT, TURNS_SHORT = 16, 8
PHASES = ("initialise", "train", "save", "save while training", "restore")


@dataclass
class Phase:
    """What a phase took: bytes of the process's own memory at most, and seconds."""

    memory: int = 0
    seconds: float = 0.0


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


def first_run(store: str, settings: Settings) -> tuple[dict[str, Phase], list[float]]:
    """Initialises, trains and saves: the phases, and the losses since the last save began."""
    begin(store, settings)
    before, phases = own_memory(), {name: Phase() for name in PHASES[:4]}
    with watched(phases["initialise"], before):
        made = Trained(settings, settings.rows, fill=True)
    with watched(phases["train"], before):
        made.train(settings.steps)
    with watched(phases["save"], before):
        made.save()
    with watched(phases["save while training"], before):
        losses = made.save_while_training()
    return phases, losses


def second_run(store: str, settings: Settings) -> tuple[dict[str, Phase], list[float]]:
    """Restores and trains on: the phase, and the losses."""
    begin(store, settings)
    before, phase = own_memory(), Phase()
    made = Trained(settings, settings.rows, fill=False)
    with watched(phase, before):
        made.restore()
    return {"restore": phase}, made.train(BATCHES)


def run_in_turns(store: str, each: list[Settings], turns: int) -> list[dict[str, Any]]:
    """Trains all kernels in turns; a line of the second table for each kind of ids."""
    begin(store, each[0])
    made = [Trained(settings, settings.rows, fill=True) for settings in each]
    lines = []
    for ids in IDS:
        seconds, losses = [[] for _ in each], [[] for _ in each]
        for turn in range(-WARM_UP, turns):
            for number in range(len(each)) if turn % 2 else reversed(range(len(each))):
                began = perf_counter()
                losses[number] += made[number].train(BATCHES, ids)
                if turn >= 0:
                    seconds[number].append((perf_counter() - began) / BATCHES)
        medians = {settings.kernel: median(took) for settings, took in zip(each, seconds, strict=True)}
        lines.append({"ids": ids, "seconds": medians, "equal": all(one == losses[0] for one in losses)})
    return lines


def outcome_of(run: Callable[..., Any], *inputs: Any) -> Any:
    """What a run, in a process of its own, has found."""
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(run, f"{folder}/store", *inputs).result()


def main(
    gib: Annotated[float, typer.Option(help="Of the table, with its state.")] = 1.0,
    steps: Annotated[int, typer.Option(help="Of training, before the table is saved.")] = 100,
    turns: Annotated[int, typer.Option(help="Of each kernel, to see its speed; 0: not looked at.")] = 20,
    kernels: Annotated[str, typer.Option(help="With commas between.")] = "fused,fused_mmap",
    folder: Annotated[Path, typer.Option(help="Checkpoints and files of tables go there.")] = Path("data"),
    short_gib: Annotated[
        float, typer.Option(help="Of the table where memory is short; 0: not looked at.")
    ] = 0.25,
    smallest: Annotated[bool, typer.Option(help="Does it still run?")] = False,
) -> None:
    """Prints the tables; see the top of this file."""
    folder.mkdir(parents=True, exist_ok=True)
    if short_gib:
        measure_short(folder, short_gib, smallest)
    rows = int((0.01 if smallest else gib) * 2**30) // ROW_BYTES
    steps, turns = (5, 2) if smallest else (steps, turns)
    if not each_of(kernels):
        return
    each, lines = [], []
    for kernel in each_of(kernels):
        with tempfile.TemporaryDirectory(dir=folder.absolute()) as place:
            each.append(Settings(kernel, rows, steps, place))
            lines.append(memory_of(each[-1]))
    show_memory(lines, rows)
    with tempfile.TemporaryDirectory(dir=folder.absolute()) as place:
        each = [replace(settings, folder=place) for settings in each]
        speed = outcome_of(run_in_turns, each, turns) if turns else []
    if speed:
        show_speed(speed)
    if not smallest:
        found = {"rows": rows, "dim": DIM, "steps": steps, "turns": turns, "memory": lines, "speed": speed}
        alone = {"alone": found | {"host_memory": virtual_memory().total}}
        found = keep_also(found if speed else alone)
        if "speed" in found:
            fill("docs/benchmarks.md", "tiers", document(found))


def each_of(names: str) -> list[str]:
    """What commas are between."""
    return [name for name in names.split(",") if name]


def keep_also(found: dict[str, Any]) -> dict[str, Any]:
    """Writes results in addition to those that are there; all of them."""
    every = (json.loads(RESULTS.read_text()) if RESULTS.exists() else {}) | found
    keep(RESULTS, every)
    return every


def measure_short(folder: Path, gib: float, smallest: bool) -> None:
    """Prints the third table."""
    with tempfile.TemporaryDirectory(dir=folder.absolute()) as place:
        found = run_short(place, *((0.25, 1, 1) if smallest else (gib, WARM_UP_SHORT, TURNS_SHORT)))
    text = document_short(found)
    print(f"{text}\n\nlosses are {'' if found['equal'] else 'NOT '}equal")
    if found["bounded"] and not smallest:
        keep_also({"short": found})
        fill("docs/sharding.md", "tiers", text)


def memory_of(settings: Settings) -> dict[str, Any]:
    """A line of the first table."""
    first, after = outcome_of(first_run, settings)
    second, resumed = outcome_of(second_run, settings)
    phases, size = first | second, settings.rows * ROW_BYTES
    return {
        "kernel": settings.kernel,
        "resumed": after[:BATCHES] == resumed,
        "memory": {name: phase.memory / size for name, phase in phases.items()},
        "seconds": {name: phase.seconds for name, phase in phases.items()},
    }


def show_memory(lines: list[dict[str, Any]], rows: int) -> None:
    """Prints the first table."""
    table = Table(title=f"{rows:,} rows of {DIM}, {rows * ROW_BYTES / 2**30:.2f} GiB with their state")
    for column in ("kernel", *(f"{name}: ÷ table, s" for name in PHASES), "resumed"):
        table.add_column(column)
    for line in lines:
        cells = [f"{line['memory'][name]:.2f}, {line['seconds'][name]:.1f}" for name in PHASES]
        table.add_row(line["kernel"], *cells, "yes" if line["resumed"] else "no")
    Console(width=120).print(table)


def show_speed(lines: list[dict[str, Any]]) -> None:
    """Prints the second table."""
    table = Table(title="ms a step")
    for column in ("ids", *lines[0]["seconds"], "last ÷ first", "equal"):
        table.add_column(column)
    for line in lines:
        each = list(line["seconds"].values())
        cells = [*(f"{1000 * seconds:.1f}" for seconds in each), f"{each[-1] / each[0]:.2f}"]
        table.add_row(line["ids"], *cells, "yes" if line["equal"] else "no")
    Console(width=120).print(table)


def document(found: dict[str, Any]) -> str:
    """Both tables in Markdown."""
    lines = [f"| memory ÷ table | {' | '.join(PHASES)} |", "|---|" + "---:|" * len(PHASES)]
    for line in found["memory"]:
        cells = " | ".join(f"{line['memory'][name]:.2f}" for name in PHASES)
        lines.append(f"| `{line['kernel']}` | {cells} |")
    kernels = list(found["speed"][0]["seconds"])
    lines += ["", f"| ids | {' | '.join(f'`{name}`, ms a step' for name in kernels)} | ratio |"]
    lines.append("|---|" + "---:|" * (len(kernels) + 1))
    for line in found["speed"]:
        each = list(line["seconds"].values())
        cells = " | ".join(f"{1000 * seconds:.1f}" for seconds in each)
        lines.append(f"| {line['ids']} | {cells} | {each[-1] / each[0]:.2f} |")
    return "\n".join([*lines, *(_alone(found["alone"]) if "alone" in found else [])])


def _alone(found: dict[str, Any]) -> list[str]:
    """A table that was measured by itself, in Markdown."""
    size, memory = found["rows"] * ROW_BYTES / 2**30, found["host_memory"] / 2**30
    lines = ["", f"| {size:,.0f} GiB, on a machine of {memory:,.0f} | {' | '.join(PHASES)} |"]
    lines.append("|---|" + "---:|" * len(PHASES))
    for line in found["memory"]:
        for title, of, digits in (("memory ÷ table", "memory", 2), ("s", "seconds", 0)):
            cells = " | ".join(f"{line[of][name]:,.{digits}f}" for name in PHASES)
            lines.append(f"| `{line['kernel']}`: {title} | {cells} |")
    return lines


if __name__ == "__main__":
    typer.run(main)
