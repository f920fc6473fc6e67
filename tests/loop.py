"""The loop of raytrec/worker/loop.py on one rank of on_ranks, without Ray and without files of data."""

import json
from dataclasses import dataclass
from itertools import count
from types import SimpleNamespace

import small

ROWS = 12  # of a global batch of small.batches


class Said(list):
    """In the place of the hub's handle."""

    put = property(lambda self: self)

    def remote(self, message):
        self.append(json.loads(json.dumps(message)))  # what is said must be JSON


class Pulse:
    """A heartbeat that nobody hears."""

    def __init__(self):
        from raytrec.common.messages import Command

        self.command, self.device = Command.GO, lambda: None

    def tick(self, phase=None, step=None):
        pass

    def confirm(self):
        pass


@dataclass
class Loop:
    """What a test of one rank's loop can reach.

    Attributes:
        local: this rank's batches.
        error: that ended it, as text.
    """

    rank: object
    step: object
    survival: object
    observation: object
    progress: object
    batches: object
    local: list
    said: Said
    error: str | None = None

    def train(self, steps, after=None):
        """Trains so many steps and ends as a run does.

        Args:
            after: called with the loop at each step, before what the ranks agree on.
        """
        from raytrec.common.errors import RunError

        try:
            self.observation.begin()
            for outputs in self.step.train(self.batches, steps):
                self.progress.count(ROWS, outputs)
                if self.progress.step % self.rank.task.config.train.log_every_steps == 0:
                    self.rank.tell(kind="train", step=self.progress.step, **self.progress.report())
                self.observation.after_step(ROWS)
                if after:
                    after(self)
                self.survival.after_step(outputs)
            self.survival.finish()
        except RunError as error:
            self.error = str(error)
            self.survival._saver.taken()  # what has begun to be written is there when the test looks
        return self


def make(rank, world, steps, changes, folder, spoil=None, plan="row_wise"):
    """A Loop over random batches; `spoil(rank, local batches)` changes them first.

    Args:
        folder: of the run.
    """
    import torch
    import torch.distributed as dist

    from raytrec.config.run_config import load_config
    from raytrec.metrics.sums import Sums
    from raytrec.worker.build import build_step
    from raytrec.worker.checkpointing import Survival
    from raytrec.worker.context import Rank, Task
    from raytrec.worker.nonfinite import Recent
    from raytrec.worker.observe import Observation
    from raytrec.worker.progress import Progress

    on_gpu = dist.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    settings = [f"run.dir={folder}", *changes]
    config, said = load_config(small.config(world, {"sharding": plan}), settings), Said()
    step, sharding = build_step(config, small.SCHEMA, device)
    _, local = small.batches(steps, rank, world)
    if spoil:
        spoil(rank, local)
    for number, batch in zip(count(), local):
        batch.step = number
    read = [batch.pin_memory() for batch in local] if on_gpu else local
    task = Task(config, small.SCHEMA, {}, SimpleNamespace(put=said), f"{folder}/checkpoints")
    here = Rank(rank, world, device, task, Pulse(), 0)
    here.report = lambda checkpoint, step: None
    batches, progress = Recent(iter(read), 0), Progress(Sums(device))
    survival = Survival(here, step, sharding, progress, steps)
    survival.batches = batches
    observation = Observation(here, step, survival.state, progress, batches, steps)
    survival.before_save = observation.before_save
    return Loop(here, step, survival, observation, progress, batches, local, said)
