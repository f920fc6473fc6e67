"""What it costs to watch a run: steps with recording and checks off, as they come, and all the time.

    python benchmarks/watching.py [--workers 2] [--device cpu|cuda] [--rounds 15]

Three copies of one model (tables half table-wise, half row-wise, half of them means) take turns in the same
processes, 100 steps each: without tracking and checks; with their defaults (statistics every 100 steps,
checks every 500); with statistics and checks every 10 steps. What ranks say goes to a process that writes
the run folder and an MLflow store on sqlite, on the same cores: what a side has said in one turn is written
during its next, and a turn begins when nothing of another side's is left. Compared are the times of each
round.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty
from time import perf_counter, sleep
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import typer
from documents import keep
from overhead import batches_of, config_of, join, schema_of
from rich.console import Console
from rich.progress import Progress as Bar
from rich.table import Table

from raytrec.checkpoint.state import LogicalState
from raytrec.common.messages import Message
from raytrec.config.run_config import RunConfig, load_config
from raytrec.data.batch import Batch
from raytrec.driver.recorder import Record
from raytrec.driver.track import Follower
from raytrec.metrics.selection import Selection
from raytrec.metrics.sums import Sums
from raytrec.tracking.feed import Feed
from raytrec.worker.build import build_step
from raytrec.worker.context import WorkerContext, WorkerTask
from raytrec.worker.observers import make_observers
from raytrec.worker.progress import Progress, RankRun
from raytrec.worker.recent_batches import RecentBatches

RESULTS = Path(__file__).parent / "results" / "watching.json"
STEPS = 100
CHECKS = ("same_environment", "shards", "replicas", "parity", "conservation", "numerics")
SIDES: dict[str, dict[str, Any]] = {
    "off": {"tracking": {"every_steps": None}, "checks": dict.fromkeys(CHECKS, "off")},
    "default": {},
    "everything": {"tracking": {"every_steps": 10}, "checks": {"every_steps": 10}},
}


@dataclass
class Mailbox:
    """In the place of the coordinator: what ranks of a side say goes to the process that started them."""

    queue: Any
    side: int

    @property
    def put(self) -> Mailbox:
        return self

    def remote(self, message: Message) -> None:
        self.queue.put((self.side, message))


class Unheard:
    """In the place of a heartbeat."""

    def tick(self, phase: str | None = None, step: int | None = None) -> None:
        pass


class Side:
    """One of the copies, with its own model, pipeline and observers."""

    def __init__(self, config: RunConfig, rank: int, device: torch.device, mailbox: Mailbox):
        schema, world, rows = schema_of("half"), config.scaling.max_workers, config.data.global_batch_size
        task = WorkerTask(config, schema, {}, mailbox, "")
        context = WorkerContext(rank, world, device, task, Unheard(), 0)
        self._step, plan = build_step(config, schema, device)
        sums = Sums(Selection.of_config(config, schema), device)
        self._progress, self._rows, self._device = Progress(sums), rows, device
        state = LogicalState(self._step.model, self._step.optimizer)
        source = _endless(batches_of(rows // world, world, seed=rank))
        self._batches = RecentBatches(source, 0)
        self._observers = make_observers(
            RankRun(context, self._step, plan, state, self._progress, self._batches, 10**9)
        )
        self._observers.begin()

    def turn(self) -> float:
        """Seconds of STEPS steps."""
        dist.barrier()
        began = perf_counter()
        for outputs in self._step.train(self._batches, STEPS):
            self._progress.count(self._rows, outputs)
            self._observers.after_step(self._rows)
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
        return perf_counter() - began


def _endless(batches: list[Batch]) -> Iterator[Batch]:
    step = 0
    while True:
        yield replace(batches[step % len(batches)], step=step)
        step += 1


def measure(
    rank: int, workers: int, device: str, rounds: int, batch: int, folder: str, queue: Any, turns: Any
) -> None:
    """One rank; rank 0 leaves the seconds of every turn in the folder."""
    here = join(rank, workers, device, folder)
    plain = config_of("both", workers, batch).model_dump(by_alias=True)
    sides = [
        Side(RunConfig.model_validate(plain | changes), rank, here, Mailbox(queue, number))
        for number, changes in enumerate(SIDES.values())
    ]
    seconds = []
    with Bar(disable=rank > 0) as bar:
        for turn in bar.track(range(rounds + 1), description="rounds"):
            order = [(turn + i) % len(sides) for i in range(len(sides))]
            of_round = {}
            for side in order:
                if rank == 0:
                    queue.put((side, None))
                    turns.acquire()  # until the other sides' have been written
                of_round[side] = sides[side].turn()
            seconds.append([of_round[side] for side in range(len(sides))])
    if rank == 0:
        (Path(folder) / "times.json").write_text(json.dumps(seconds[1:]))  # the first warms up
    dist.barrier()
    dist.destroy_process_group()


def main(
    workers: Annotated[int, typer.Option(help="Ranks, each a process (on CUDA: a GPU).")] = 2,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    rounds: Annotated[int, typer.Option(help="Turns of each side.")] = 15,
    batch: Annotated[int, typer.Option(help="Rows of a batch on each rank.")] = 512,
    smallest: Annotated[bool, typer.Option(help="The smallest sizes; writes nothing.")] = False,
) -> None:
    """Prints the table and writes benchmarks/results/watching.json."""
    rounds = 2 if smallest else rounds  # an interval needs two
    with tempfile.TemporaryDirectory() as name:
        folder, queue = Path(name), mp.get_context("spawn").Queue()
        tracked = {"uri": f"sqlite:///{folder}/mlflow.db", "experiment": "benchmark"}
        run = {"name": "watching", "dir": name}
        config = load_config({"run": run, "data": {"train": "none"}, "tracking": tracked})
        (folder / "config.yaml").write_text(config.to_yaml())
        follower = Follower(config, print)
        follower.ready()
        record, turns = Record(folder), mp.get_context("spawn").Semaphore(0)
        said: dict[int, list[dict[str, Any]]] = {side: [] for side in range(len(SIDES))}
        ranks = mp.spawn(
            measure, (workers, device, rounds, batch, name, queue, turns), nprocs=workers, join=False
        )
        while not ranks.join(timeout=0.01):
            with suppress(Empty):
                side, message = queue.get(timeout=0.5)
                if message is not None:
                    said[side].append(message)
                    continue
                while Feed(folder).waiting:
                    sleep(0.05)
                turns.release()
                for earlier in said.pop(side):
                    record.keep(earlier)
                said[side] = []
        lost = follower.close("FINISHED")
        seconds = json.loads((folder / "times.json").read_text())
    title = f"{workers} × {device}, {batch} rows a rank, {rounds} turns of {STEPS} steps"
    results = _show(seconds, title)
    if not smallest:
        keep(RESULTS, {"title": title, "sides": results})
    if lost:
        print(lost)


def _show(seconds: list[list[float]], title: str) -> dict[str, dict[str, float]]:
    table = Table(title=title)
    for column in ("recording and checks", "ms a step", "added", "95 % interval"):
        table.add_column(column, justify="left" if column.startswith("rec") else "right", no_wrap=True)
    results = {}
    for side, name in enumerate(SIDES):
        # Checks come in one turn of five: means, not medians.
        ratios = [of_round[side] / of_round[0] - 1 for of_round in seconds]
        mean, error = statistics.fmean(ratios), statistics.stdev(ratios) / len(ratios) ** 0.5
        ms = statistics.fmean(of_round[side] for of_round in seconds) / STEPS * 1e3
        results[name] = {"ms": ms, "added": mean, "low": mean - 2 * error, "high": mean + 2 * error}
        interval = f"{mean - 2 * error:+.1%} to {mean + 2 * error:+.1%}" if side else ""
        table.add_row(name, f"{ms:.1f}", f"{mean:+.1%}" if side else "", interval)
    Console().print(table)
    return results


if __name__ == "__main__":
    typer.run(main)
