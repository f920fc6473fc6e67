"""Context of a worker: its task, rank, device and data streams, and its reports to the driver."""

from __future__ import annotations

import os
import sys
import uuid
from dataclasses import dataclass, field, replace
from typing import Any

from raytrec.common.machine import bind_to_gpu_node
from raytrec.common.messages import Message, Phase, Warn, compute_heartbeat_interval
from raytrec.common.storage import join_uri
from raytrec.compat.versions import require_versions
from raytrec.config.features import resolve_features
from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema
from raytrec.data.fragments import Dataset
from raytrec.data.pages.decode import SKIPPED_ROWS_FILE, ReadErrorPolicy
from raytrec.worker.heartbeat import Heartbeat


@dataclass(repr=False)  # Ray's dashboard shows the repr
class WorkerTask:
    """Task that the driver passes to every rank.

    Attributes:
        datasets: Datasets by name: "train", "valid", "test", "items" (eval.retrieval) and "predict"; datasets
            that the task does not need are omitted.
        coordinator: Actor started by driver.coordinator.start_coordinator.
        checkpoint: Folder that contains all checkpoints of the run (training), or folder of the checkpoint to read
            (evaluation, prediction).
        fingerprint: Hash of the training data's row groups; "" if nothing is trained.
        folder: Folder that is appended to sys.path, so that the configuration can name modules in the folder.
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
    """Position of this process in the worker group, with its device, task and heartbeat.

    Attributes:
        index: Rank of the process, from 0 to `world` - 1.
        world: Number of ranks.
        device: Device of the rank.
        task: Task of all ranks.
        heartbeat: Heartbeat of the rank.
        attempt: Number of worker groups that this driver started before this one.
        network: Network chosen by NCCL; see rendezvous.read_chosen_network.
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
        """Configure this Ray Train worker process, register it with the coordinator, and return its context.

        This is a collective operation: every rank must call it. On CPU, torch uses scaling.cpus_per_worker threads,
        because ranks share the machine's cores.

        Raises:
            RunError: A package on this rank's node has an unsupported version.
        """
        require_versions()
        import ray.train
        import ray.train.torch
        import torch
        import torch.distributed as dist

        from raytrec.worker.process import prepare_process
        from raytrec.worker.rendezvous import read_chosen_network

        prepare_process(task.config.train, bool(task.schema.managed))
        if task.folder not in sys.path:
            sys.path.append(task.folder)
        ray_context = ray.train.get_context()
        device = ray.train.torch.get_device()
        if device.type == "cuda":
            torch.cuda.set_device(device)
            if task.config.scaling.bind_cpus:
                bind_to_gpu_node(str(device))
        # With a GPU, the number of threads is Ray's OMP_NUM_THREADS. Ranks forked after the import of torch
        # would ignore this variable, so the number is set here.
        on_gpu, cpus = device.type == "cuda", task.config.scaling.cpus_per_worker
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)) if on_gpu else cpus)
        index, world, group = ray_context.get_world_rank(), ray_context.get_world_size(), [uuid.uuid4().hex]
        dist.broadcast_object_list(group)
        node = ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id()
        reply = task.coordinator.enter.remote(group[0], index, world, os.getpid(), *node)
        attempt = ray.get(reply, timeout=60)
        lease_s = task.config.scaling.hang_timeout_s
        heartbeat = Heartbeat(task.coordinator, group[0], index, lease_s, compute_heartbeat_interval(world))
        rank_context = cls(index, world, device, task, heartbeat, attempt, read_chosen_network())
        if rank_context.network == "Socket" and ray_context.get_local_world_size() < world:
            text = 'NCCL uses TCP between hosts, which may be slow; see "Configure the network" in docs/gpu.md'
            rank_context.report(Warn(text=text))
        return rank_context

    def stream(self, name: str, order: Any):
        """Return this rank's stream of batches over a dataset, or None if the task has no dataset of this name.

        Streams of all datasets except "train" report each batch as progress to the heartbeat. The training loop reports
        its batches itself.

        Args:
            name: Name of the dataset.
            order: Order of the rows; see data.stream.Stream.
        """
        from raytrec.data.row_exchange import RowExchange
        from raytrec.data.stream import Stream

        if name not in self.task.datasets:
            return None
        data, exchange = self.task.config.data, None
        features = resolve_features(self.task.schema, self.task.config.model)
        if name == "train" and self.world > 1 and data.balance != "none":
            exchange = RowExchange(data.balance, self.task.datasets[name].form, features)
            self.heartbeat.is_exchanging = lambda: exchange.is_waiting
        # Skipped rows are recorded in the run folder; an evaluation of a checkpoint has no run folder.
        skipped = join_uri(self.task.config.run.dir, SKIPPED_ROWS_FILE) if "train" in self.task.datasets else None
        stream = Stream(
            self.task.datasets[name],
            order,
            rank=self.index,
            world=self.world,
            readers=data.readers,
            read_on=data.read_on,
            faults=ReadErrorPolicy(data.on_error == "skip", skipped),
            buffer_bytes=int(data.buffer_gib * 2**30),
            pin_memory=self.device.type == "cuda",
            features=features,
            train=name == "train",
            exchange=exchange,
        )
        return stream if name == "train" else _MonitoredStream(stream, self.heartbeat)

    def close(self) -> None:
        """Stop the heartbeat; call after this rank has finished its work."""
        self.heartbeat.close()

    def report(self, message: Message) -> None:
        """Send a message to the driver if this is rank 0."""
        if self.index == 0:
            self.report_from_any_rank(message)

    def report_from_any_rank(self, message: Message) -> None:
        """Send a message to the driver from any rank, without waiting for delivery."""
        self.task.coordinator.put.remote(message)

    def enter_phase(self, text: str, kind: str) -> None:
        """Report the next activity of this rank to the coordinator and, if this is rank 0, to the user.

        Args:
            text: Description of the activity for the user.
            kind: Phase for the coordinator, one of driver.coordinator.SLOW_PHASES.
        """
        self.heartbeat.tick(kind)
        self.report(Phase(text=text))


@dataclass
class _MonitoredStream:
    """Wrapper of a stream that reports each batch as progress to the heartbeat."""

    stream: Any
    heartbeat: Heartbeat

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def narrow(self, dataset: Dataset) -> _MonitoredStream:
        """Return a monitored stream over `dataset`, which is a part of this stream's dataset."""
        return _MonitoredStream(replace(self.stream, dataset=dataset), self.heartbeat)

    def batches(self):
        return self.heartbeat.count_batches(self.stream.batches(), "evaluate")
