"""The loop of raytrec/worker/loop.py on one rank of on_ranks, without Ray and without files of data."""

import json
from dataclasses import dataclass
from itertools import count
from types import SimpleNamespace

import small

ROWS = 12  # of a global batch of small.batches


class Said(list):
    """In the place of the coordinator's handle."""

    put = property(lambda self: self)

    def remote(self, message):
        self.append({"kind": message.KIND, **json.loads(json.dumps(message.values()))})  # they must be JSON


class Heartbeat:
    """A heartbeat without a coordinator."""

    def __init__(self):
        from raytrec.common.messages import Command

        self.command, self.unfinished, self.phase = Command.GO, lambda: None, "start"

    def tick(self, phase=None, step=None):
        self.phase = phase or self.phase

    def confirm(self):
        pass

    def watch_device(self, unfinished):
        self.unfinished = unfinished


@dataclass
class Loop:
    """What a test of one rank's loop can reach.

    Attributes:
        local: this rank's batches.
        error: that ended it, as text.
        unsaved: the error of the checkpoint that was being written then, as text.
    """

    context: object
    step: object
    checkpoints: object
    observers: object
    progress: object
    batches: object
    local: list
    said: Said
    error: str | None = None
    unsaved: str | None = None

    def train(self, steps, after=None):
        """Trains so many steps and ends as a run does.

        Args:
            after: called with the loop at each step, before what the ranks agree on.
        """
        from raytrec.common.errors import RunError

        try:
            self.observers.begin()
            for outputs in self.step.train(self.batches, steps):
                self.progress.count(ROWS, outputs)
                if self.progress.step % self.context.task.config.train.log_every_steps == 0:
                    self.progress.end_window()
                self.progress.report(self.context)
                self.observers.after_step(ROWS)
                if after:
                    after(self)
                self.checkpoints.after_step(outputs)
            self.progress.report(self.context, wait=True)
            self.checkpoints.finish()
        except RunError as error:
            self.error = str(error)
            saved = self.checkpoints._saver.taken()  # what has begun to be written is there from now on
            self.unsaved = str(saved.error) if saved and saved.error else None
        return self


def make(
    rank,
    world,
    steps,
    changes,
    folder,
    spoil=None,
    plan="row_wise",
    schema=small.SCHEMA,
    kernel="fused",
    **of,
):
    """A Loop over random batches; `spoil(rank, local batches)` changes them first.

    Args:
        folder: of the run.
        of: model, tasks, … of small.config.
    """
    import torch
    import torch.distributed as dist

    from raytrec.checkpoint.state import LogicalState
    from raytrec.config.features import resolve_features
    from raytrec.config.run_config import load_config
    from raytrec.metrics.selection import Selection
    from raytrec.metrics.sums import Sums
    from raytrec.tasks.task import resolve_tasks
    from raytrec.worker.build import build_step
    from raytrec.worker.checkpointing import CheckpointManager
    from raytrec.worker.context import WorkerContext, WorkerTask
    from raytrec.worker.nonfinite import RecentBatches
    from raytrec.worker.observers import make_observers
    from raytrec.worker.progress import Progress, RankRun

    on_gpu = dist.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    settings = [f"run.dir={folder}", *changes]
    tables = {"sharding_type": plan, "compute_kernel": kernel}
    config, said = load_config(small.config(world, tables, **of), settings), Said()
    step, sharding = build_step(config, schema, device)
    features, learned = resolve_features(schema, config.model), resolve_tasks(config.tasks, schema)
    _, local = small.batches(steps, rank, world, schema=schema, features=features, tasks=learned)
    if spoil:
        spoil(rank, local)
    for number, batch in zip(count(), local):
        batch.step = number
    read = [batch.pin_memory() for batch in local] if on_gpu else local
    task = WorkerTask(config, schema, {}, SimpleNamespace(put=said), f"{folder}/checkpoints")
    context = WorkerContext(rank, world, device, task, Heartbeat(), 0)
    sums = Sums(Selection.from_config(config, schema), device)
    batches, progress = RecentBatches(iter(read), 0), Progress(sums)
    state = LogicalState(step.model, step.optimizer)
    run = RankRun(context, step, sharding, state, progress, batches, steps)
    observers = make_observers(run)
    checkpoints = CheckpointManager(run, observers.before_save)
    return Loop(context, step, checkpoints, observers, progress, batches, local, said)
