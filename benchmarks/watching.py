"""Cost of monitoring: steps without recording and checks, with the defaults, and with both every 10 steps.

    python benchmarks/watching.py [--workers 2] [--device cpu|cuda] [--rounds 15]

Three copies of one model (half of the tables table-wise, half row-wise; half of the features mean-pooled)
take turns of 100 steps in the same processes. The first copy runs without tracking and checks, the second with
their defaults (statistics every 100 steps, checks every 500), and the third with statistics and checks every
10 steps. The ranks send their messages to a process that writes the run folder and an MLflow store in SQLite,
on the same cores. The messages of a side's turn are written during the side's next turn, and a turn begins
when no message of another side is queued. The times within each round are compared.

Writes benchmarks/results/watching.json.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty
from statistics import fmean, stdev
from time import sleep
from typing import Annotated, Any

import harness
import torch
import torch.multiprocessing as mp
import typer
from harness import Grid, take_turns
from overhead import batches_of, config_of, schema_of
from rank_group import group_seconds, on_ranks

from raytrec.checkpoint.state import LogicalState
from raytrec.common.messages import Message
from raytrec.config.run_config import RunConfig, load_config
from raytrec.data.batch import Batch
from raytrec.driver.recorder import Record
from raytrec.driver.track import DeliveryProcess
from raytrec.metrics.selection import Selection
from raytrec.metrics.sums import MetricSums
from raytrec.tracking.mlflow_records import RecordReader
from raytrec.worker.build import build_step
from raytrec.worker.context import WorkerContext, WorkerTask
from raytrec.worker.nonfinite import RecentBatches
from raytrec.worker.observers import make_observers
from raytrec.worker.progress import Progress, RankRun

STEPS = 100
CHECKS = ("same_environment", "shards", "replicas", "parity", "conservation", "numerics")
SIDES: dict[str, dict[str, Any]] = {
    "off": {"tracking": {"every_steps": None}, "checks": dict.fromkeys(CHECKS, "off")},
    "default": {},
    "every 10 steps": {"tracking": {"every_steps": 10}, "checks": {"every_steps": 10}},
}


@dataclass
class Mailbox:
    """Object that replaces the coordinator and sends the messages of a side's ranks to the main process."""

    queue: Any
    side: int

    @property
    def put(self) -> Mailbox:
        """Return this object, whose `remote` sends a message like the coordinator's `put.remote`."""
        return self

    def remote(self, message: Message) -> None:
        """Send a message to the main process."""
        self.queue.put((self.side, message))


class Unheard:
    """Heartbeat that ignores all calls, because no coordinator is running."""

    def tick(self, phase: str | None = None, step: int | None = None) -> None:
        """Ignore a sign of progress."""
        pass


class Side:
    """Copy of the model with its own pipeline and observers, trained with one setting of recording and checks."""

    def __init__(self, config: RunConfig, rank: int, device: torch.device, mailbox: Mailbox):
        schema, world, rows = schema_of("half"), config.scaling.max_workers, config.data.global_batch_size
        task = WorkerTask(config, schema, {}, mailbox, "")
        context = WorkerContext(rank, world, device, task, Unheard(), 0)
        self._step, plan = build_step(config, schema, device)
        sums = MetricSums(Selection.from_config(config, schema), device)
        self._progress, self._rows, self._device = Progress(sums), rows, device
        state = LogicalState(self._step.model, self._step.optimizer)
        source = _endless(batches_of(rows // world, world, seed=rank))
        self._batches = RecentBatches(source, 0)
        self._observers = make_observers(
            RankRun(context, self._step, plan, state, self._progress, self._batches, 10**9)
        )
        for observer in self._observers:
            observer.begin()

    def turn(self) -> float:
        """Train STEPS steps, and return the seconds."""
        return group_seconds(self._train, self._device)

    def _train(self) -> None:
        for outputs in self._step.train(self._batches, STEPS):
            self._progress.count(self._rows, outputs)
            for observer in self._observers:
                observer.after_step(self._rows)


def _endless(batches: list[Batch]) -> Iterator[Batch]:
    step = 0
    while True:
        yield replace(batches[step % len(batches)], step=step)
        step += 1


def measure(
    rank: int, device: torch.device, workers: int, rounds: int, batch: int, queue: Any, turns: Any
) -> dict[str, list[float]]:
    """Run the sides in turns, and return side → seconds of each turn."""
    plain = config_of("both", workers, batch).model_dump(by_alias=True)

    def turn(number: int, side: Side) -> float:
        if rank == 0:
            queue.put((number, None))
            turns.acquire()  # waits until the messages of the other sides have been written
        return side.turn()

    sides = {
        name: Side(RunConfig.model_validate(plain | changes), rank, device, Mailbox(queue, number))
        for number, (name, changes) in enumerate(SIDES.items())
    }
    calls = {
        name: lambda number=number, side=side: turn(number, side) for number, (name, side) in enumerate(sides.items())
    }
    return take_turns(calls, rounds, warm_up=1)


def main(
    workers: Annotated[int, typer.Option(help="Number of ranks, each a process (on CUDA: a GPU).")] = 2,
    device: harness.Device = "cpu",
    rounds: harness.Rounds = 15,
    batch: Annotated[int, typer.Option(help="Number of rows in each rank's batch.")] = 512,
    smallest: harness.Smallest = False,
) -> None:
    """Compare the sides and print the table; without --smallest, write benchmarks/results/watching.json."""
    rounds = 2 if smallest else rounds  # an interval needs two rounds
    with tempfile.TemporaryDirectory() as name:
        folder, spawn = Path(name), mp.get_context("spawn")
        tracked = {"uri": f"sqlite:///{folder}/mlflow.db", "experiment": "benchmark"}
        run = {"name": "watching", "dir": name}
        config = load_config({"run": run, "data": {"train": "none"}, "tracking": tracked})
        (folder / "config.yaml").write_text(config.to_yaml())
        follower = DeliveryProcess(config, print)
        follower.ready()
        record, queue, turns = Record(folder, print), spawn.Queue(), spawn.Semaphore(0)
        messages: dict[int, list[Message]] = {side: [] for side in range(len(SIDES))}

        def write() -> None:
            with suppress(Empty):
                side, message = queue.get(timeout=0.5)
                if message is not None:
                    messages[side].append(message)
                    return
                while RecordReader(folder).waiting:
                    sleep(0.05)
                turns.release()
                earlier, messages[side] = messages[side], []
                for each in earlier:
                    record.store_message(each)

        args = (workers, rounds, batch, queue, turns)
        seconds = on_ranks(workers, measure, *args, device=device, meanwhile=write)[0]
        lost = follower.close("FINISHED")
    title = f"{workers} × {device}, {batch} rows a rank, {rounds} turns of {STEPS} steps"
    results = show(seconds, title)
    if not smallest:
        harness.store("watching", {"title": title, "sides": results})
    if lost:
        print(lost)


def show(seconds: dict[str, list[float]], title: str) -> dict[str, dict[str, float]]:
    """Print the table, and return side → ms per step, added share of time (mean), and its 95 % interval (low, high)."""
    results, rows = {}, []
    for name, of_side in seconds.items():
        # By default, checks run in one turn out of five, so means are compared instead of medians.
        added = [one / off - 1 for one, off in zip(of_side, seconds["off"], strict=True)]
        mean, error, ms = fmean(added), stdev(added) / len(added) ** 0.5, 1e3 * fmean(of_side) / STEPS
        low, high = mean - 2 * error, mean + 2 * error
        results[name] = {"ms": ms, "added": mean, "low": low, "high": high}
        compared = ["", ""] if name == "off" else [f"{mean:+.1%}", f"{low:+.1%} to {high:+.1%}"]
        rows.append([name, f"{ms:.1f}", *compared])
    Grid(("recording and checks", "ms per step", "added time", "95 % interval"), rows, title).show()
    return results


if __name__ == "__main__":
    typer.run(main)
