"""A Ray Train worker group on the driver's side: what it needs, what it says, how its errors look."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from raytrec.cluster.local_ray import last_words
from raytrec.cluster.session import logs_here, started_here
from raytrec.cluster.warm import PLACE
from raytrec.cluster.warm_nodes import WarmNodes, asks_for_forks
from raytrec.common.errors import ConfigError, RaytrecError, RunError, root_cause
from raytrec.common.installed import OTHER_DEVICE
from raytrec.common.redaction import hide
from raytrec.common.storage import open_filesystem, relative
from raytrec.compat.ray_core import starts_nodes
from raytrec.compat.ray_train_settings import (
    ENABLE_PREEMPTION_WATCHER,
    HEALTH_CHECK_INTERVAL_S,
    SNAPSHOT,
    WORKER_GROUP_START_TIMEOUT_S,
)
from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema
from raytrec.data.fragments import Dataset
from raytrec.data.stream import nodes_without_gpus
from raytrec.driver.failure_analysis import main_line
from raytrec.driver.nodes import GpuNode, alive_nodes, gpu_nodes, is_local
from raytrec.driver.recorder import Watch
from raytrec.driver.stop import Interrupted, Stop
from raytrec.driver.warm_workers import MODULES, ON_RAY
from raytrec.embeddings.planner.footprint import GIB
from raytrec.embeddings.planner.hosts import host_memory
from raytrec.embeddings.planner.validation import validate_constraints
from raytrec.worker.context import WorkerTask
from raytrec.worker.prediction_files import PredictionTask


def local_cpus(config: RunConfig) -> int:
    """Logical CPUs of a local cluster: those of the workers and their readers."""
    return int(config.scaling.max_workers * bundle(config, "cpu")["CPU"])


def _device(config: RunConfig, nodes: list[GpuNode], console: Any) -> str:
    """cpu or cuda, after a look at what the cluster has.

    Args:
        nodes: those with GPUs.

    Raises:
        ConfigError: fewer GPUs or CPUs than the workers and their readers need, and no autoscaler that could
            start more: Ray would wait for ever. Or there is one, and nobody has said for which device. Or
            scaling.device is cuda, and the packages of a node with GPUs are for CPUs.
    """
    scaling, grows = config.scaling, starts_nodes()
    if grows and not nodes and scaling.device == "auto":
        raise ConfigError(
            "the cluster has no GPU now, but may start nodes with some",
            where="scaling.device=auto",
            expected="cuda or cpu, where an autoscaler has to know for what it is to start nodes",
            do="set scaling.device=cuda, or scaling.device=cpu",
        )
    device = scaling.device if scaling.device != "auto" else ("cuda" if nodes else "cpu")
    if device == "cuda" and (wrong := [node.address for node in nodes if node.built_for == "cpu"]):
        what = f"torch is built for CPUs on {'this machine' if is_local() else ', '.join(wrong)}"
        if scaling.device == "cuda":
            raise ConfigError(
                what,
                where="scaling.device=cuda",
                expected="the packages of requirements/cuda.txt wherever there are GPUs",
                do=f"{OTHER_DEVICE.format(device='cuda')}; or set scaling.device=cpu",
            )
        console.note(
            f"there are GPUs, but {what}: training on CPUs. For GPUs: {OTHER_DEVICE.format(device='cuda')}"
        )
        device = "cpu"
    if not grows:  # else the run says how many workers there is room for, while it waits
        _check_room(config, device, sum(node.gpus for node in nodes))
    return device


def _check_room(config: RunConfig, device: str, gpus: int) -> None:
    """Whether the nodes, were nothing else there, hold the least number of workers.

    Raises:
        ConfigError: they do not.
    """
    least, places = config.scaling.min_workers, bundle(config, device, _others_read(device))
    if device == "cuda" and gpus < least:
        raise ConfigError(
            f"the cluster has {gpus} GPUs for {least} workers",
            where="scaling.num_workers, scaling.device",
            expected="one GPU for each worker",
            do="lower scaling.num_workers, or set scaling.device=cpu",
        )
    have = [node["Resources"] for node in alive_nodes()]
    if sum(int(min(node.get(name, 0) // n for name, n in places.items())) for node in have) < least:
        each = places["CPU"]
        beside = " beside GPUs" if device == "cuda" else ""
        cpus = int(sum(node.get("CPU", 0) for node in have if device == "cpu" or node.get("GPU")))
        raise ConfigError(
            f"the cluster has {cpus} CPUs{beside} for {least} workers and their readers",
            where="scaling.num_workers, scaling.cpus_per_worker, data.readers",
            expected=f"at least {int(least * each)}: {each} for each worker, on its own node",
            do="lower scaling.num_workers or data.readers, or join a larger cluster",
        )


def _others_read(device: str) -> bool:
    """Whether nodes without GPUs read for workers with GPUs, or may be started for it."""
    return device == "cuda" and (starts_nodes() or bool(nodes_without_gpus()))


def _check_constraints(config: RunConfig, schema: Schema, device: str, nodes: list[GpuNode]) -> None:
    """Whether constraints can be kept with every number of workers, as far as hosts and memory are known.

    Args:
        nodes: those with GPUs.
    """
    plan, most, local = config.plan, config.scaling.max_workers, is_local()
    memory = int(plan.memory_gib * GIB) if plan.memory_gib else None
    if memory is None and device == "cuda":
        memory = min((node.gpu_memory for node in nodes if node.gpu_memory), default=None)
    elif memory is None and local:
        memory = host_memory() // most
    for workers in range(config.scaling.min_workers, most + 1):
        validate_constraints(
            config,
            schema,
            device,
            world=workers,
            ranks_per_host=plan.ranks_per_host or (workers if local else None),
            memory=memory,
            host_share=_host_share(nodes, workers, local),
        )


def _host_share(nodes: list[GpuNode], workers: int, local: bool) -> int | None:
    """Bytes of main memory for each worker on GPUs, as far as nodes have said what they have."""
    if local:
        return host_memory() // workers
    known = [node for node in nodes if node.host_memory]
    return min((node.host_memory // min(node.gpus, workers) for node in known), default=None)


def run_group(
    worker: str | Callable[[WorkerTask], None],
    config: RunConfig,
    schema: Schema,
    datasets: dict[str, Dataset],
    checkpoint: str,
    watch: Watch,
    *,
    fingerprint: str = "",
    saves: bool = False,
    restarts: bool = False,
    predictions: PredictionTask | None = None,
    look: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Runs a function on a Ray Train worker group; the figures that rank 0 reports.

    Args:
        worker: the function, or its name in `worker.loop`.
        checkpoint: the folder of all checkpoints, or the one to read.
        fingerprint: of the training data (data.contents), which checkpoints hold.
        saves: whether the function saves, so that it can be started again and asked to stop.
        restarts: whether it can be started again although it does not save.
        predictions: see WorkerTask.
        look: called every half second while the group runs; a ConfigError that it raises ends the group.

    Raises:
        Interrupted: Ctrl-C or SIGTERM. RaytrecError: why the group failed, after all attempts.
    """
    import ray

    scaling = config.scaling
    nodes = gpu_nodes() if scaling.device != "cpu" else []
    device = _device(config, nodes, watch.console)
    _check_constraints(config, schema, device, nodes)
    watch.console.phase("starting the workers")
    for name, value in RAY_TRAIN.items():
        os.environ.setdefault(name, value)
    import ray.train

    from raytrec.cluster.lifeline import Lifeline, RayLost, wait_for
    from raytrec.compat.ray_train import ControlledTrainer, LateTorchConfig
    from raytrec.driver.coordinator import start_coordinator
    from raytrec.driver.policies import FailuresWithReason, RoomOnNodes
    from raytrec.worker import loop as workers

    coordinator = start_coordinator(scaling.hang_timeout_s, scaling.phase_timeout_s)
    others_read = _others_read(device)
    places = bundle(config, device, others_read)
    ray_scaling = ray.train.ScalingConfig(
        num_workers=(scaling.min_workers, scaling.max_workers) if scaling.elastic else scaling.max_workers,
        use_gpu=device == "cuda",
        resources_per_worker=places,
        placement_strategy="PACK" if device == "cuda" else "SPREAD",
    )
    room = RoomOnNodes(
        ray_scaling,
        coordinator,
        scaling.min_workers,
        scaling.max_workers,
        scaling.scale_up_interval_s,
        cpus_beside=scaling.max_workers * config.data.readers if others_read else 0,
        asks=not started_here(),
    )
    failures = FailuresWithReason(
        ray.train.FailureConfig(), coordinator, scaling.max_failures if saves or restarts else 0
    )
    stop = Stop(coordinator, scaling.shutdown_grace_s if saves else 0)
    lifeline = Lifeline(scaling.hang_timeout_s, own=started_here())
    task = WorkerTask(config, schema, datasets, coordinator, checkpoint, fingerprint, predictions=predictions)
    environment, look_now = _keep_warm(coordinator, watch, look)
    trainer = ControlledTrainer(
        worker if callable(worker) else getattr(workers, worker),
        train_loop_config=task,
        backend_config=LateTorchConfig(
            TORCH_CONFIG,
            {"backend": "nccl" if device == "cuda" else "gloo", "timeout_s": group_timeout(config, device)},
        ),
        scaling_config=ray_scaling,
        run_config=_ray_run(checkpoint if saves else f"{config.run.dir}/ray", environment),
        policies={"scaling_policy": room, "failure_policy": failures},
        own=started_here(),
        on_start=stop.install,
        wait=lambda ref: wait_for(ref, lifeline, look_now),
    )
    with stop, watch.reading(coordinator):
        try:
            trainer.fit()
        except RayLost as lost:
            _tell(lost, config)
            raise
        except ConfigError as error:
            if isinstance(error, ray.exceptions.RayError):  # a rank's
                raise _explain(error, config, _cause(coordinator)) from None
            stop.abort()
            raise
        except Exception as error:
            lifeline.confirm()
            if stop.signal is None:
                raise _explain(error, config, _cause(coordinator)) from None
    if watch.result is None and stop.signal is not None:
        raise Interrupted(stop.signal, watch.stopped_at)
    if watch.result is None:
        again = (
            f"raytrec train --resume {relative(Path(config.run.dir))}" if saves else "the same command again"
        )
        raise RunError("the workers ended without a result", where=config.run.dir, do=again)
    return watch.result


def _keep_warm(
    coordinator: Any, watch: Watch, look: Callable[[], None]
) -> tuple[dict[str, str], Callable[[], None]]:
    """Variables of the workers' environment, and what is to be called now and then, so that workers which
    start again are forked. On a Ray of our own even the first ones are (warm_workers.py)."""
    if started_here() or PLACE in os.environ:
        return WORKER_ENVIRONMENT, look
    environment = asks_for_forks(WORKER_ENVIRONMENT)
    nodes = WarmNodes(MODULES, ON_RAY, environment, coordinator.nodes.remote, watch.first_steps)

    def look_now() -> None:
        look()
        nodes.look()

    return environment, look_now


def _cause(coordinator: Any) -> str:
    """What the coordinator knows of the end; nothing where it has ended itself."""
    import ray

    try:
        return ray.get(coordinator.cause.remote(), timeout=10)
    except ray.exceptions.RayError:
        return ""


def bundle(config: RunConfig, device: str, others_read: bool = False) -> dict[str, float]:
    """What Ray sets aside for a worker.

    This has the CPUs of the worker's readers, whose tasks therefore ask for none. Tasks that did would wait
    for ever where workers, or the paused tasks of another stream, hold all CPUs: an evaluation begins while
    those of training have still to hand over what they have read.

    Args:
        others_read: whether there are, or may come, nodes without GPUs, whose CPUs then serve for that.
    """
    scaling = config.scaling
    cpus: float = scaling.cpus_per_worker + (0 if others_read else config.data.readers)
    return {"CPU": cpus} | ({"GPU": 1.0} if device == "cuda" else {})


def group_timeout(config: RunConfig, device: str) -> int:
    """Seconds that a collective may take.

    When NCCL's time is up it ends the process that waits, which would then be taken for the one that failed.
    The coordinator knows which rank the others wait for, and has time to say so first. Gloo raises an error.
    """
    scaling = config.scaling
    return scaling.phase_timeout_s + (int(scaling.hang_timeout_s) + 1 if device == "cuda" else 0)


TORCH_CONFIG = "raytrec.worker.rendezvous:OwnAddressTorchConfig"
# How soon the end, or an error, is seen; how long Ray waits for places that are not there after all; and no
# watcher for nodes that will go, because policies.RoomOnNodes looks for them sooner and needs no barrier.
RAY_TRAIN = {
    HEALTH_CHECK_INTERVAL_S: "0.5",
    WORKER_GROUP_START_TIMEOUT_S: "20",
    ENABLE_PREEMPTION_WATCHER: "0",
}
# Of ranks and of the read tasks that they start. glibc keeps freed memory in up to eight arenas a core, and
# each becomes as large as any thread's largest need: a rank grew by 8 MiB an epoch until all were in use.
WORKER_ENVIRONMENT = {"MALLOC_ARENA_MAX": "2"}


def _ray_run(folder: str, environment: dict[str, str]) -> Any:
    """Ray Train's own folder is that of the checkpoints, because it is told of those inside it only.

    What an earlier driver noted there is removed: half written, it would keep Ray Train from starting. Which
    checkpoint is the newest is found out by looking (checkpoint.files).
    """
    import ray.train

    filesystem, path = open_filesystem(f"{folder}/{SNAPSHOT}")
    if filesystem.get_file_info(path).is_file:
        filesystem.delete_file(path)
    filesystem, path = open_filesystem(folder)  # rather than its address, which Ray Train would show
    place, _, name = path.rpartition("/")
    return ray.train.RunConfig(
        name=name,
        storage_path=place,
        storage_filesystem=filesystem,
        worker_runtime_env={"env_vars": environment},
    )


def _explain(error: Exception, config: RunConfig, sentence: str) -> RaytrecError:
    """The error for people behind what Ray raised; the whole story goes to error.txt in the run folder."""
    cause = root_cause(error)
    where = _tell(error, config)
    if isinstance(cause, RaytrecError):
        return cause
    return RunError(
        f"training failed: {sentence or main_line(str(cause)) or type(cause).__name__}",
        where=where,
    )


def _tell(error: Exception, config: RunConfig) -> str:
    """Writes the whole story to error.txt, with what a Ray of our own, whose logs go with it, said last."""
    story, logs = Path(config.run.dir) / "error.txt", logs_here()
    try:
        said = last_words(logs) if logs else ""
        story.write_text(hide("".join(traceback.format_exception(error)) + said))
    except OSError as full:
        return f"the traceback could not be written to {story}: {full.strerror}"
    return f"the traceback is in {story}"
