"""A rank of the points of `benchmarks/growth.py`: a run's loop, without Ray, on batches in memory."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from time import process_time
from typing import Any

from rank_group import join_group

BLOCKS, BATCHES = 5, 4  # of which the cheapest counts; different batches
NEVER = 10**9


@dataclass(frozen=True)
class Point:
    """Sizes.

    Attributes:
        rows, dim: of each feature's table.
        bag: ids of each feature in each row.
        batch: rows of a rank.
        what: "step"; "record": what a step costs more when it is probed and recorded; "save": a checkpoint.
    """

    features: int
    rows: int
    dim: int
    bag: int
    batch: int
    workers: int
    what: str = "step"


class Unheard:
    """In the place of a heartbeat and of the coordinator."""

    command = 0
    put = property(lambda self: self)

    def __getattr__(self, name: str) -> Callable:
        return lambda *_: None


def schema_of(point: Point) -> Any:
    from raytrec.config.schema import Schema

    names = [f"f{number}" for number in range(point.features)]
    values = {
        "labels": ["y"],
        "dense": ["d"],
        "sparse": {name: {"table": name} for name in names},
        "tables": {name: {"rows": point.rows, "dim": point.dim} for name in names},
    }
    return Schema.parse(values, "growth")


def batches_of(point: Point, schema: Any) -> Iterator[Any]:
    """The same few for ever, numbered as the stream numbers them."""
    import torch
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    from raytrec.data.batch import Batch

    made, batch = [], point.batch
    for _ in range(BATCHES):
        ids = torch.randint(0, point.rows, (point.features * batch * point.bag,))
        sparse = KeyedJaggedTensor(
            list(schema.sparse),
            ids,
            lengths=torch.full((point.features * batch,), point.bag, dtype=torch.int32),
            stride=batch,
            length_per_key=[batch * point.bag] * point.features,
        )
        labels = torch.randint(0, 2, (batch, 1)).float()
        rows = batch * point.workers
        made.append(Batch(torch.randn(batch, 1), sparse, labels, torch.ones(batch), rows))
    step = 0
    while True:
        yield replace(made[step % BATCHES], step=step)
        step += 1


class Loop:
    """What raytrec/worker/loop.py does between two reports."""

    def __init__(self, point: Point, rank: int, folder: str, every_steps: int):
        import torch

        from raytrec.checkpoint.state import LogicalState
        from raytrec.config.run_config import RunConfig
        from raytrec.metrics.selection import Selection
        from raytrec.metrics.sums import Sums
        from raytrec.worker.build import build_step
        from raytrec.worker.checkpointing import CheckpointManager
        from raytrec.worker.context import WorkerContext, WorkerTask
        from raytrec.worker.nonfinite import RecentBatches
        from raytrec.worker.observers import make_observers
        from raytrec.worker.progress import Progress, RankRun

        schema, device, self.rows = schema_of(point), torch.device("cpu"), point.batch * point.workers
        config = RunConfig.model_validate(
            {
                "run": {"dir": folder},
                "data": {"train": "unused/train", "global_batch_size": self.rows},
                "scaling": {"num_workers": point.workers},
                # Whose cost is in proportion to the features: DLRM's dot products grow with their square.
                "model": {"name": "dcn", "cross_layers": 1, "cross_rank": 1, "top_mlp": [8]},
                "checkpoint": {"every_s": None},
                "tracking": {"every_steps": every_steps},
                "checks": {"every_steps": None, "at_checkpoints": False},
            }
        )
        task = WorkerTask(config, schema, {}, Unheard(), f"{folder}/checkpoints")
        context = WorkerContext(rank, point.workers, device, task, Unheard(), 0)
        self.step, plan = build_step(config, schema, device)
        self.progress = Progress(Sums(Selection.of_config(config, schema), device))
        self.batches = RecentBatches(batches_of(point, schema), 0)
        state = LogicalState(self.step.model, self.step.optimizer)
        run = RankRun(context, self.step, plan, state, self.progress, self.batches, NEVER)
        self.observers = make_observers(run)
        self.checkpoints = CheckpointManager(run, self.observers.before_save)
        self.observers.begin()

    def train(self, steps: int) -> float:
        """CPU-ms of this rank a step."""
        began = process_time()
        for outputs in self.step.train(self.batches, steps):
            self.progress.count(self.rows, outputs)
            self.observers.after_step(self.rows)
            self.checkpoints.after_step(outputs)
        return (process_time() - began) / steps * 1e3

    def save(self) -> float:
        """CPU-ms of this rank a checkpoint."""
        self.train(1)  # there is one of the step before
        began = process_time()
        self.checkpoints.save(wait=True)
        return (process_time() - began) * 1e3


def measure(rank: int, workers: int, points: list[Point], steps: int, folder: str) -> None:
    """Leaves RANK.json in the folder: of each point cpu_ms, and of a checkpoint its bytes (on rank 0)."""
    import torch.distributed as dist

    join_group(rank, workers, f"{folder}/store")
    found = []
    for number, point in enumerate(points):
        found.append(MEASURES[point.what](point, rank, steps, f"{folder}/{number}"))
        gc.collect()  # models are cycles
        if rank == 0:
            print(point, found[-1], flush=True)
    Path(folder, f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def _least(measured: Callable[[], float]) -> float:
    return min(measured() for _ in range(BLOCKS))


def _step(point: Point, rank: int, steps: int, folder: str) -> dict[str, float]:
    loop = Loop(point, rank, folder, NEVER)
    loop.train(2)
    return {"cpu_ms": _least(lambda: loop.train(steps))}


def _record(point: Point, rank: int, steps: int, folder: str) -> dict[str, float]:
    loops = [Loop(point, rank, folder, every) for every in (1, NEVER)]
    for loop in loops:
        loop.train(2)
    recorded, ordinary = (_least(lambda loop=loop: loop.train(steps)) for loop in loops)
    return {"cpu_ms": recorded - ordinary}


def _save(point: Point, rank: int, steps: int, folder: str) -> dict[str, float]:
    loop = Loop(point, rank, folder, NEVER)
    loop.train(2)
    least = _least(loop.save)
    newest = max(Path(folder, "checkpoints").iterdir(), key=lambda path: path.stat().st_mtime)
    size = sum(path.stat().st_size for path in newest.rglob("*") if path.is_file())
    return {"cpu_ms": least, "bytes": size if rank == 0 else 0}


MEASURES = {"step": _step, "record": _record, "save": _save}
