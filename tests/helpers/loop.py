"""The training loop of raytrec/worker/trainer.py on a rank of run_on_ranks, without Ray and data files."""

import json
from dataclasses import dataclass
from itertools import count
from types import SimpleNamespace

import small

BATCH_ROWS = 12  # rows of a global batch of small.make_batches
STOP = "stop"


class RecordedMessages(list):
    """Stand-in for the coordinator's actor handle that records messages."""

    put = property(lambda self: self)

    def remote(self, message):
        self.append({"kind": message.KIND, **json.loads(json.dumps(message.values()))})  # checks JSON types


class FakeHeartbeat:
    """Heartbeat without a coordinator."""

    def __init__(self):
        from raytrec.common.messages import Command

        self.command, self.find_unfinished, self.phase = Command.GO, lambda: None, "start"

    def tick(self, phase=None, step=None):
        self.phase = phase or self.phase

    def confirm(self):
        pass


@dataclass
class WorkerLoop:
    """Training loop of one rank and its parts.

    Attributes:
        local: batches of this rank.
        error: text of the error that ended the loop, or None.
        unsaved: text of the error of the checkpoint being written when the loop failed, or None.
    """

    context: object
    step: object
    checkpoints: object
    observers: list
    progress: object
    batches: object
    local: list
    said: RecordedMessages
    error: str | None = None
    unsaved: str | None = None

    def train(self, steps, after=None):
        """Train for some steps and finish like a run.

        Args:
            steps: number of steps.
            after: function called with the loop after each step, before checkpoints.after_step. If it returns
                STOP, training ends like that of a killed process.
        """
        from raytrec.common.errors import RunError

        deltas = self.checkpoints._deltas
        try:
            for observer in self.observers:
                observer.begin()
            for outputs in self.step.train(self.batches, steps):
                self.progress.count(BATCH_ROWS, outputs)
                if self.progress.step % self.context.task.config.train.log_every_steps == 0:
                    self.progress.end_window()
                self.progress.report(self.context)
                for observer in self.observers:
                    observer.after_step(BATCH_ROWS)
                if after and after(self) == STOP:
                    self.checkpoints._saver.close()
                    deltas and deltas.close()
                    return self
                self.checkpoints.after_step(outputs)
            self.progress.report(self.context, wait=True)
            self.checkpoints.finish()
        except RunError as error:
            self.error = str(error)
            saved = self.checkpoints._saver.collect_outcome()  # waits for the checkpoint being written
            self.unsaved = str(saved.error) if saved and saved.error else None
        return self


def make_worker_loop(
    rank,
    world,
    steps,
    changes,
    folder,
    spoil=None,
    plan="row_wise",
    schema=small.SCHEMA,
    kernel="fused",
    resume=False,
    **of,
):
    """Create a Loop over random batches.

    Args:
        rank: this rank.
        world: number of ranks.
        steps: number of batches.
        changes: config overrides, key=value.
        folder: run folder.
        spoil: function of (rank, local batches) that changes the batches, or None.
        plan: sharding type of all tables.
        schema: schema of the batches.
        kernel: compute kernel of all tables.
        resume: continue from the newest checkpoint in the run folder.
        of: other arguments of small.make_small_config (model, tasks, …).
    """
    import torch
    import torch.distributed as dist

    from raytrec.checkpoint.state import LogicalState
    from raytrec.config.features import resolve_features
    from raytrec.config.run_config import load_config
    from raytrec.metrics.selection import Selection
    from raytrec.metrics.sums import MetricSums
    from raytrec.tasks.task import resolve_tasks
    from raytrec.worker.build import begin_or_resume, build_step
    from raytrec.worker.checkpointing import CheckpointManager
    from raytrec.worker.context import WorkerContext, WorkerTask
    from raytrec.worker.nonfinite import RecentBatches
    from raytrec.worker.observers import make_observers
    from raytrec.worker.progress import Progress, RankRun

    on_gpu = dist.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    settings = [f"run.dir={folder}", *changes]
    tables = {"sharding_type": plan, "compute_kernel": kernel}
    config, said = load_config(small.make_small_config(world, tables, **of), settings), RecordedMessages()
    step, sharding = build_step(config, schema, device)
    features, learned = resolve_features(schema, config.model), resolve_tasks(config.tasks, schema)
    _, local = small.make_batches(steps, rank, world, schema=schema, features=features, tasks=learned)
    if spoil:
        spoil(rank, local)
    for number, batch in zip(count(), local):
        batch.step = number
    read = [batch.pin_memory() for batch in local] if on_gpu else local
    task = WorkerTask(config, schema, {}, SimpleNamespace(put=said), f"{folder}/checkpoints")
    context = WorkerContext(rank, world, device, task, FakeHeartbeat(), 0)
    sums = MetricSums(Selection.from_config(config, schema), device)
    progress, state = Progress(sums), LogicalState(step.model, step.optimizer)
    about = begin_or_resume(context, step, state, progress) if resume else None
    batches = RecentBatches(iter(read[progress.step :]), progress.step)
    run = RankRun(context, step, sharding, state, progress, batches, steps)
    observers = make_observers(run)
    checkpoints = CheckpointManager(run, observers, about)
    return WorkerLoop(context, step, checkpoints, observers, progress, batches, local, said)
