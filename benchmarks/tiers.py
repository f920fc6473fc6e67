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
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from threading import Event, Thread
from time import perf_counter
from typing import Annotated, Any

import typer
from rank_group import join_group
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results" / "tiers.json"
DIM, FEATURES, BATCH, BATCHES, WARM_UP = 32, 8, 2048, 16, 20
ROW_BYTES = DIM * 4 + 4  # float32, and one value of state
SAMPLE_S = 0.002
PIECE = 10  # steps between two looks at whether it is saved
IDS = {"uniform": 1.0, "skewed": 5.0}  # the power to which a uniform number is raised
PHASES = ("initialise", "train", "save", "save while training", "restore")


@dataclass(frozen=True)
class Settings:
    """Of one run of one kernel."""

    kernel: str
    ids: str
    rows: int
    steps: int
    folder: str
    save: bool


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


class Trained:
    """A rank with a model over one table, and batches for it."""

    def __init__(self, settings: Settings, rows: int, *, fill: bool):
        import torch

        from raytrec.checkpoint.state import LogicalState
        from raytrec.worker.build import build_step

        self.config, self.schema = described(settings, rows)
        self.step, _ = build_step(self.config, self.schema, torch.device("cpu"), fill=fill)
        self.state = LogicalState(self.step.model, self.step.optimizer)

    def train(self, steps: int, ids: str) -> tuple[list[float], float]:
        """The losses of all steps, and seconds of those after the first few."""
        from itertools import cycle, islice

        batches = islice(cycle(self._batches(IDS[ids])), steps)
        losses, began = [], perf_counter()
        for number, outputs in enumerate(self.step.train(batches, steps)):
            losses.append(float(outputs.loss.detach()))
            if number == WARM_UP - 1:
                began = perf_counter()
        return losses, perf_counter() - began

    def _batches(self, power: float) -> list[Any]:
        import torch

        from raytrec.checks.parity.batches import local_batch, random_batches

        found = []
        for whole in random_batches(self.schema, BATCH, BATCHES, seed=1):
            batch, rows = local_batch(whole, self.schema, [0, BATCH], 0), self.schema.tables["t"].rows
            values = batch.sparse.values()
            values.copy_(((values.double() / rows) ** power * rows).long())
            values.copy_(values * 2_654_435_761 % rows)  # rows that are used often are not side by side
            found.append(batch)
        torch.manual_seed(0)
        return found

    def save(self, ids: str | None = None) -> list[float]:
        """Saves, in the place of what was saved before; with `ids`, trains until it is saved, and gives the
        losses."""
        from raytrec.checkpoint.save import Saver
        from raytrec.checkpoint.snapshot import RowSnapshot

        keeping = self.config.checkpoint.model_copy(update={"async_save": bool(ids), "keep_last": 1})
        rows = RowSnapshot(self.step.model, self.state.tables) if ids else None
        folder, losses = f"{self.config.run.dir}/checkpoints", []
        shutil.rmtree(folder, ignore_errors=True)
        saver = Saver(folder, keeping, rows=rows)
        saver.save(1, self.state.tensors(), {})
        while ids and (saver.busy or not losses):
            losses += self.train(PIECE, ids)[0]
        if error := saver.taken().error:
            raise error
        saver.close()
        return losses

    def restore(self) -> None:
        from raytrec.checkpoint.restore import restore

        assert restore(f"{self.config.run.dir}/checkpoints", self.state).folder


def described(settings: Settings, rows: int) -> tuple[Any, Any]:
    """The configuration and the schema."""
    from raytrec.config.run_config import RunConfig
    from raytrec.config.schema import Schema

    sparse = {f"f{i}": {"table": "t"} for i in range(FEATURES)}
    tables = {"t": {"rows": rows, "dim": DIM}}
    schema = Schema.parse({"labels": ["y"], "dense": ["a"], "sparse": sparse, "tables": tables}, "tiers")
    values = {
        "run": {"dir": settings.folder},
        "data": {"train": "unused", "global_batch_size": BATCH},
        "model": {"bottom_mlp": [DIM], "top_mlp": [DIM]},
        "plan": {"tables": {"t": {"sharding_type": "table_wise", "compute_kernel": settings.kernel}}},
    }
    return RunConfig.model_validate(values), schema


def begin(store: str, settings: Settings) -> int:
    """Joins a group of one, sets everything up that is set up once, and gives the memory that this takes."""
    join_group(0, 1, store)
    from raytrec.worker.memory import keep_freed_memory

    keep_freed_memory()
    small = Trained(replace(settings, folder=f"{settings.folder}/small"), 1000, fill=True)
    small.train(3, settings.ids)
    small.save(settings.ids)
    small.restore()
    return own_memory()


def first_run(store: str, settings: Settings) -> Outcome:
    """Initialises, trains and saves."""
    before, found = begin(store, settings), Outcome({name: Phase() for name in PHASES[:4]})
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
    before, found = begin(store, settings), Outcome({"restore": Phase()})
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
