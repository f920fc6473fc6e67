"""A worker's rank, task, device, streams and reports."""

from __future__ import annotations

import os
import sys
import uuid
from dataclasses import dataclass, field
from typing import Any

from raytrec.common.messages import Message, Phase, Warn, beat_s
from raytrec.common.storage import join_uri
from raytrec.compat.versions import require_versions
from raytrec.config.features import resolve_features
from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema
from raytrec.data.fragments import Dataset
from raytrec.data.pages.decode import SKIPPED, Faults
from raytrec.worker.heartbeat import Heartbeat


@dataclass(repr=False)  # Ray's dashboard shows what is written of it: nothing
class WorkerTask:
    """What the driver hands to every rank.

    Attributes:
        datasets: "train", "valid", "test" and "items" (eval.retrieval) → Dataset, as far as there are any.
        coordinator: the actor of driver.coordinator.start_coordinator.
        checkpoint: the folder of all checkpoints (training), or the one to read (evaluation).
        fingerprint: of the training data's row groups; "" where nothing is trained.
        folder: where modules that the configuration names may be, besides Python's own path.
    """

    config: RunConfig
    schema: Schema
    datasets: dict[str, Dataset]
    coordinator: Any
    checkpoint: str
    fingerprint: str = ""
    folder: str = field(default_factory=os.getcwd)


@dataclass
class WorkerContext:
    """This process's place in the worker group: its rank, its device, its streams, its heartbeat.

    Attributes:
        index: its rank, of `world`.
        attempt: how many groups of this driver there were before.
        network: see rendezvous.chosen_network.
    """

    index: int
    world: int
    device: Any
    task: WorkerTask
    heartbeat: Heartbeat
    attempt: int
    network: str = ""

    @classmethod
    def enter(cls, task: WorkerTask) -> WorkerContext:
        """Takes this Ray Train worker's place; one torch thread, because ranks share the machine's cores.

        Raises:
            RunError: another version of a package is installed on this rank's node.
        """
        require_versions()
        import ray.train
        import ray.train.torch
        import torch
        import torch.distributed as dist

        from raytrec.worker.process import prepare_process
        from raytrec.worker.rendezvous import chosen_network

        prepare_process(task.config.train)
        if task.folder not in sys.path:
            sys.path.append(task.folder)
        context = ray.train.get_context()
        device = ray.train.torch.get_device()
        if device.type == "cuda":
            torch.cuda.set_device(device)
        # With a GPU as many as Ray sets; Ray is too late with them if a rank is forked with torch imported.
        on_gpu, cpus = device.type == "cuda", task.config.scaling.cpus_per_worker
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)) if on_gpu else cpus)
        index, world, group = context.get_world_rank(), context.get_world_size(), [uuid.uuid4().hex]
        dist.broadcast_object_list(group)
        node = ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id()
        entering = task.coordinator.enter.remote(group[0], index, world, os.getpid(), *node)
        attempt = ray.get(entering, timeout=60)
        lease_s = task.config.scaling.hang_timeout_s
        heartbeat = Heartbeat(task.coordinator, group[0], index, lease_s, beat_s(world))
        entered = cls(index, world, device, task, heartbeat, attempt, chosen_network())
        if entered.network == "Socket" and context.get_local_world_size() < world:
            entered.report(Warn(text="NCCL sends to other hosts over TCP (docs/gpu.md, NCCL)"))
        return entered

    def stream(self, name: str, order: Any):
        """Return this rank's Stream of a dataset, or None if the task has no dataset of that name.

        Each batch that is not trained on counts as progress (training counts its own).

        Args:
            order: As in data.stream.Stream.
        """
        from raytrec.data.stream import Stream

        if name not in self.task.datasets:
            return None
        data = self.task.config.data
        # Skipped rows are noted in the run folder; what is evaluated again has none to write to.
        skipped = join_uri(self.task.config.run.dir, SKIPPED) if "train" in self.task.datasets else None
        stream = Stream(
            self.task.datasets[name],
            order,
            rank=self.index,
            world=self.world,
            readers=data.readers,
            read_on=data.read_on,
            faults=Faults(data.on_error == "skip", skipped),
            buffer_bytes=int(data.buffer_gib * 2**30),
            pin_memory=self.device.type == "cuda",
            features=resolve_features(self.task.schema, self.task.config.model),
            train=name == "train",
        )
        return stream if name == "train" else _Watched(stream, self.heartbeat)

    def close(self) -> None:
        """This rank has done its work."""
        self.heartbeat.close()

    def report(self, message: Message) -> None:
        """Sends a message to the driver; only rank 0's go there."""
        if self.index == 0:
            self.report_from_all(message)

    def report_from_all(self, message: Message) -> None:
        """Sends a message to the driver, from any rank, without waiting for it."""
        self.task.coordinator.put.remote(message)

    def enter_phase(self, text: str, kind: str) -> None:
        """What this rank does from now on, for people and for the coordinator (coordinator.SLOW_PHASES)."""
        self.heartbeat.tick(kind)
        self.report(Phase(text=text))


@dataclass
class _Watched:
    """A Stream whose batches tick the heartbeat."""

    stream: Any
    heartbeat: Heartbeat

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def batches(self):
        return self.heartbeat.count_batches(self.stream.batches(), "evaluate")
