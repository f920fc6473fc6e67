"""The memory of every process of a run, while it trains epoch after epoch: who grows, and by how much.

    python benchmarks/memory.py [--minutes 30] [--epochs 50] [--smallest]

Trains on a small synthetic data set, whose epochs are seconds long, so that what is kept for each epoch
shows. Every few seconds the memory of all processes of the run is read from the kernel
(/proc/PID/smaps_rollup): what is the process's own (anonymous), and its share of what several map (the object
store). A line is fitted through the own memory after the warm-up, the first quarter. Fails when a process of
raytrec's grows by more than LIMIT; Ray's are named and not judged.

Writes benchmarks/results/memory.json and docs/images/memory.png.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep, strftime
from typing import Annotated

import matplotlib
import numpy as np
import typer
from documents import keep
from rich.console import Console
from rich.table import Table

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from processes import MARK, OURS, Marked, command_of, read, role

HERE = Path(__file__).parent
RESULTS, PICTURE = HERE / "results" / "memory.json", HERE.parent / "docs" / "images" / "memory.png"
LIMIT = 1.0  # MiB a minute
WARM_UP = 0.25  # of the time: imports, first batches, caches


@dataclass(frozen=True)
class Sample:
    """A process at one moment.

    Attributes:
        minute: since the beginning.
        own, shared: its anonymous memory and its share of shared memory, in MiB.
        threads: how many.
    """

    minute: float
    own: float
    shared: float
    threads: int


@dataclass(frozen=True)
class Growth:
    """A process's own memory after the warm-up, in MiB: at both ends, and the slope of a line through it."""

    first: float
    last: float
    per_minute: float
    per_epoch: float
    threads: tuple[int, int]

    @classmethod
    def of(cls, samples: list[Sample], epochs_per_minute: float) -> Growth:
        slope = float(np.polyfit([s.minute for s in samples], [s.own for s in samples], 1)[0])
        ends = samples[0], samples[-1]
        return cls(
            *(round(end.own, 1) for end in ends),
            round(slope, 2),
            round(slope / epochs_per_minute, 3),
            tuple(end.threads for end in ends),
        )


class Watched:
    """A `raytrec train` in the background, and what its processes have used so far."""

    def __init__(self, folder: Path, data: Path, workers: int):
        self.folder, self._samples = folder, defaultdict(list)
        self._marked = Marked(f"{MARK}={folder}")
        self._commands: dict[int, str] = {}
        places = [f"data.{part}={data / part}" for part in ("train", "valid", "test")]
        settings = [f"run.dir={folder}/run", f"scaling.num_workers={workers}", "train.epochs=1000000"]
        settings += ["train.eval_every_steps=500", "checkpoint.every_s=120"]
        source = folder / "config.yaml"
        source.write_text(f"data: {{train: {data / 'train'}}}\n")
        self._log = (folder / "log.txt").open("w")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "raytrec", "train", str(source), *places, *settings],
            env=os.environ | {MARK: str(folder)},
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        self._began = monotonic()

    @property
    def minutes(self) -> float:
        """Since the beginning."""
        return (monotonic() - self._began) / 60

    def epochs(self) -> float:
        """Trained so far."""
        try:
            start = next(e for e in self._lines("events.jsonl") if e["event"] == "start")
            step = max((line["step"] for line in self._lines("metrics.jsonl")), default=0)
        except (OSError, StopIteration):
            return 0.0
        return step / start["total"] * 1_000_000

    def _lines(self, name: str) -> Iterator[dict]:
        with open(self.folder / "run" / name, encoding="utf-8") as file:
            yield from (json.loads(line) for line in file if line.endswith("\n"))

    def look(self) -> None:
        """Takes a sample of every process."""
        minute = round(self.minutes, 3)
        for pid, command in self._processes():
            try:
                sizes = {
                    name: int(size) / 1024
                    for name, size in re.findall(r"(\w+):\s+(\d+) kB", read(pid, "smaps_rollup"))
                }
                threads = int(re.search(r"Threads:\s+(\d+)", read(pid, "status"))[1])
            except (OSError, TypeError):
                continue  # it has ended
            sample = Sample(minute, round(sizes["Pss_Anon"], 2), round(sizes["Pss_Shmem"], 2), threads)
            self._samples[pid].append(sample)
            if pid not in self._commands or "ray::IDLE" not in command:
                self._commands[pid] = command  # Ray's workers are called after what they do, while they do it

    def _processes(self) -> Iterator[tuple[int, str]]:
        for pid in self._marked.pids():
            with suppress(OSError):
                yield pid, command_of(pid)

    def by_name(self) -> dict[str, list[Sample]]:
        """Samples of each process under its role, numbered where several have it."""
        roles = {pid: role(command) for pid, command in self._commands.items()}
        names = {pid: list(roles.values())[:place].count(roles[pid]) for place, pid in enumerate(roles)}
        several = {each for each in roles.values() if list(roles.values()).count(each) > 1}
        return {
            f"{roles[pid]} {number}" if roles[pid] in several else roles[pid]: self._samples[pid]
            for pid, number in names.items()
        }

    def stop(self) -> None:
        """Ends the run as Ctrl-C does."""
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(120)
        finally:
            self.process.kill()
            self._log.close()


def main(
    minutes: Annotated[float, typer.Option(help="Train for at least so long.")] = 30.0,
    epochs: Annotated[int, typer.Option(help="… and for at least so many epochs.")] = 50,
    rows: Annotated[int, typer.Option(help="Rows of the synthetic data.")] = 60_000,
    workers: Annotated[int, typer.Option(help="Ranks.")] = 2,
    every: Annotated[float, typer.Option(help="Seconds between two looks.")] = 5.0,
    smallest: Annotated[bool, typer.Option(help="One minute, five epochs: does it work?")] = False,
) -> None:
    """Prints the table; without --smallest, writes memory.json and memory.png."""
    if smallest:
        minutes, epochs, every = 1.0, 5, 2.0
    with tempfile.TemporaryDirectory(prefix="memory-") as name:
        folder, data = Path(name), Path(name) / "data"
        prepare = ["prepare", "synthetic", "--out", str(data), "--rows", str(rows)]
        subprocess.run([sys.executable, "-m", "raytrec", *prepare], check=True, stdout=subprocess.DEVNULL)
        run = Watched(folder, data, workers)
        try:
            while run.process.poll() is None and (run.minutes < minutes or run.epochs() < epochs):
                run.look()
                sleep(every)
            trained, took, ended = run.epochs(), run.minutes, run.process.poll()
        finally:
            run.stop()
        if ended is not None:
            sys.exit(f"the run ended with exit code {ended}:\n{(folder / 'log.txt').read_text()[-2000:]}")
    late = {
        name: [sample for sample in samples if sample.minute > WARM_UP * took]
        for name, samples in run.by_name().items()
    }
    looks = max(len(samples) for samples in late.values())
    growth = {
        name: Growth.of(samples, trained / took) for name, samples in late.items() if len(samples) > looks / 2
    }
    title = f"{workers} workers, {took:.0f} minutes, {trained:.0f} epochs of {rows:,} rows"
    show(title, growth)
    grew = {name: g.per_minute for name, g in growth.items() if is_ours(name) and g.per_minute > LIMIT}
    if smallest:
        return
    keep(RESULTS, record(title, took, trained, growth, run.by_name()))
    draw(title, growth, run.by_name())
    if grew:
        sys.exit(f"more than {LIMIT} MiB a minute: {grew}")


def is_ours(name: str) -> bool:
    """Whether raytrec's code runs there."""
    return name.split(" ")[0] in OURS


def show(title: str, growth: dict[str, Growth]) -> None:
    """A table, ours first."""
    table = Table(title=title)
    for column in ("process", "MiB after warm-up", "at the end", "MiB a minute", "MiB an epoch", "threads"):
        table.add_column(column, justify="left" if column == "process" else "right", no_wrap=True)
    for name in sorted(growth, key=lambda name: (not is_ours(name), name)):
        g = growth[name]
        figures = f"{g.first:.0f}", f"{g.last:.0f}", f"{g.per_minute:+.2f}", f"{g.per_epoch:+.3f}"
        table.add_row(
            name if is_ours(name) else f"{name} (Ray's)", *figures, " to ".join(map(str, g.threads))
        )
    Console(width=120).print(table)


def record(
    title: str, took: float, epochs: float, growth: dict[str, Growth], samples: dict[str, list[Sample]]
) -> dict:
    """The content of memory.json: of each process its growth, and at every half minute what it had."""
    processes = {}
    for name, g in growth.items():
        step = max(1, round(len(samples[name]) / (2 * took)))
        points = [[round(s.minute, 1), s.own, s.shared, s.threads] for s in samples[name][::step]]
        processes[name] = {"ours": is_ours(name), **g.__dict__, "minute_own_shared_threads": points}
    made = strftime("%Y-%m-%d")
    return {"title": title, "made": made, "minutes": took, "epochs": epochs, "processes": processes}


def draw(title: str, growth: dict[str, Growth], samples: dict[str, list[Sample]]) -> None:
    """Own memory over time: raytrec's processes above, Ray's below."""
    figure, axes = plt.subplots(2, 1, sharex=True, figsize=(9, 8), layout="constrained")
    for axis, ours in zip(axes, (True, False), strict=True):
        for name in sorted(name for name in growth if is_ours(name) is ours):
            # matplotlib leaves out names with an underscore at the front
            label = f"{name.lstrip('_')}: {growth[name].per_minute:+.2f} MiB/min"
            axis.plot([s.minute for s in samples[name]], [s.own for s in samples[name]], label=label)
        axis.set_ylabel(f"MiB of own memory, {'raytrec' if ours else 'Ray'}")
        axis.set_ylim(bottom=0)
        axis.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    axes[0].set_title(title)
    axes[1].set_xlabel("minutes")
    figure.savefig(PICTURE, dpi=110)


if __name__ == "__main__":
    typer.run(main)
