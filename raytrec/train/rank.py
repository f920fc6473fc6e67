"""One worker's place in the group: its task, its device, its streams, its clock."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from raytrec.config import RunConfig
from raytrec.data.faults import SKIPPED, Faults
from raytrec.data.fragments import Dataset
from raytrec.data.order import Order
from raytrec.schema import Schema


@dataclass
class Task:
    """What the driver hands to every rank.

    Attributes:
        datasets: "train", "valid", "test" → Dataset, as far as there are any.
        mailbox: ray.util.queue.Queue that rank 0 puts messages into (see `console` for their kinds).
        checkpoint: the folder to write (training) or to read (evaluation).
    """

    config: RunConfig
    schema: Schema
    datasets: dict[str, Dataset]
    mailbox: Any
    checkpoint: Path


@dataclass
class Rank:
    """This process's place in the worker group: its device, its streams, its voice."""

    index: int
    world: int
    device: Any
    task: Task

    @classmethod
    def enter(cls, task: Task) -> Rank:
        """Takes this Ray Train worker's place; one torch thread, because ranks share the machine's cores."""
        import ray.train
        import ray.train.torch
        import torch

        context = ray.train.get_context()
        device = ray.train.torch.get_device()
        if device.type == "cuda":
            torch.cuda.set_device(device)
        else:
            torch.set_num_threads(task.config.scaling.cpus_per_worker)
        return cls(context.get_world_rank(), context.get_world_size(), device, task)

    def stream(self, name: str, order: Order):
        """This rank's Stream of one of the task's datasets, or None when the task has none of that name."""
        from raytrec.data.stream import Stream

        if name not in self.task.datasets:
            return None
        data = self.task.config.data
        return Stream(
            self.task.datasets[name],
            order,
            rank=self.index,
            world=self.world,
            readers=data.readers,
            prefetch=data.prefetch,
            faults=Faults(data.on_error == "skip", f"{self.task.config.run.dir}/{SKIPPED}"),
            buffer_bytes=int(data.buffer_gib * 2**30),
            pin_memory=self.device.type == "cuda",
        )

    def tell(self, **message: Any) -> None:
        """Sends a message to the driver; only rank 0 speaks."""
        if self.index == 0:
            self.task.mailbox.put_nowait(message)


class Clock:
    """Rows per second of training: pauses are left out, and the first step, which sets everything up."""

    def __init__(self):
        self.seconds, self._rows, self._rows_before, self._last = 0.0, 0, None, 0.0

    def resume(self) -> None:
        """Starts anew after a pause."""
        self._last = perf_counter()

    def step(self, rows: int) -> None:
        """Notes that `rows` rows have been trained by now."""
        now = perf_counter()
        if self._rows_before is None:
            self._rows_before = rows
        else:
            self.seconds += now - self._last
        self._last, self._rows = now, rows

    @property
    def rows_per_s(self) -> float | None:
        """None until the second step."""
        return (self._rows - self._rows_before) / self.seconds if self.seconds else None
