"""A Ray Train worker group on the driver's side: what it needs, what it says, how its errors look."""

from __future__ import annotations

import hashlib
import os
import traceback
from pathlib import Path
from typing import Any

from raytrec.config import RunConfig
from raytrec.data.fragments import Dataset
from raytrec.data.placement import settle_here
from raytrec.embeddings.hosts import GIB, host_memory
from raytrec.embeddings.pins import check_pins
from raytrec.errors import ConfigError, RaytrecError, RunError, root_cause
from raytrec.redact import hide
from raytrec.schema import Schema
from raytrec.storage import open_filesystem
from raytrec.train.rank import Task
from raytrec.train.stop import Interrupted, Stop
from raytrec.train.watch import Watch


def local_cpus(config: RunConfig) -> int:
    """Logical CPUs of a local cluster: the workers', and one for each reader, which must not wait."""
    scaling = config.scaling
    return scaling.most * (scaling.cpus_per_worker + config.data.readers)


def _device(config: RunConfig) -> str:
    """cpu or cuda, after a look at what the cluster has.

    Raises:
        ConfigError: fewer GPUs or CPUs than the workers and their readers need, and no autoscaler that could
            start more: Ray would wait for ever. Or there is one, and nobody has said for which device.
    """
    import ray

    have, scaling, grows = ray.cluster_resources(), config.scaling, _grows()
    gpus, cpus = int(have.get("GPU", 0)), int(have.get("CPU", 0))
    if grows and not gpus and scaling.device == "auto":
        raise ConfigError(
            "the cluster has no GPU now, but may start nodes with some",
            where="scaling.device=auto",
            expected="cuda or cpu, where an autoscaler has to know for what it is to start nodes",
            do="set scaling.device=cuda, or scaling.device=cpu",
        )
    device = scaling.device if scaling.device != "auto" else ("cuda" if gpus else "cpu")
    if grows:  # the run says how many workers there is room for, while it waits
        return device
    if device == "cuda" and gpus < scaling.least:
        raise ConfigError(
            f"the cluster has {gpus} GPUs for {scaling.least} workers",
            where="scaling.workers, scaling.device",
            expected="one GPU for each worker",
            do="lower scaling.workers, or set scaling.device=cpu",
        )
    each = bundle(config, device)["CPU"]
    needed = int(scaling.least * each + (device == "cuda"))
    if cpus < needed:
        raise ConfigError(
            f"the cluster has {cpus} CPUs for {scaling.least} workers and their readers",
            where="scaling.workers, scaling.cpus_per_worker, data.readers",
            expected=f"at least {needed}: {each} for each worker"
            + (", and one to read" * (device == "cuda")),
            do="lower scaling.workers, or join a larger cluster",
        )
    return device


def _grows() -> bool:
    """Whether an autoscaler starts nodes: `ray up` and KubeRay give each node, the head too, a type."""
    import ray
    from ray._raylet import GcsClient
    from ray.autoscaler.v2.sdk import get_cluster_resource_state

    cluster = get_cluster_resource_state(GcsClient(address=ray.get_runtime_context().gcs_address))
    return any(node.ray_node_type_name for node in cluster.node_states)


def _check_pins(config: RunConfig, schema: Schema, device: str, local: bool) -> None:
    """Whether pins can be kept with every number of workers, as far as hosts and memory are known."""
    import ray

    plan, most = config.plan, config.scaling.most
    memory = int(plan.memory_gib * GIB) if plan.memory_gib else None
    there = ray.cluster_resources().get("GPU")  # not yet, where an autoscaler has still to start nodes
    if memory is None and device == "cuda" and there and (plan.together or plan.tables):
        memory = ray.get(ray.remote(num_gpus=1, num_cpus=0)(_gpu_memory).remote(), timeout=60)
    elif memory is None and device == "cpu" and local:
        memory = host_memory() // most
    for workers in range(config.scaling.least, most + 1):
        hosts = plan.ranks_per_host or (workers if local else None)
        check_pins(config, schema, device, world=workers, ranks_per_host=hosts, memory=memory)


def _gpu_memory() -> int:
    import torch

    return torch.cuda.get_device_properties(0).total_memory


def run_group(
    worker: str,
    config: RunConfig,
    schema: Schema,
    datasets: dict[str, Dataset],
    checkpoint: str,
    watch: Watch,
    *,
    saves: bool = False,
) -> dict[str, Any]:
    """Runs a function of `train.worker` on a Ray Train worker group; the figures that rank 0 reports.

    Args:
        checkpoint: the folder of all checkpoints, or the one to read.
        saves: whether the function saves, so that it can be started again and asked to stop.

    Raises:
        Interrupted: Ctrl-C or SIGTERM. RaytrecError: why the group failed, after all attempts.
    """
    import ray

    device, scaling = _device(config), config.scaling
    local = all(node["NodeManagerAddress"] == "127.0.0.1" for node in ray.nodes())
    _check_pins(config, schema, device, local)
    watch.console.phase("starting the workers")
    for name, value in RAY_TRAIN.items():
        os.environ.setdefault(name, value)
    import ray.train

    from raytrec.train import worker as workers
    from raytrec.train.hub import start_hub
    from raytrec.train.policies import FailuresWithReason, RoomOnNodes, Trainer
    from raytrec.train.rendezvous import OwnAddressTorchConfig

    settle_here()
    hub = start_hub(scaling.hang_s, scaling.timeout_s)
    places = bundle(config, device)
    ray_scaling = ray.train.ScalingConfig(
        num_workers=(scaling.least, scaling.most) if scaling.elastic else scaling.most,
        use_gpu=device == "cuda",
        resources_per_worker=places,
        placement_strategy="PACK" if device == "cuda" else "SPREAD",
    )
    room = RoomOnNodes(ray_scaling, hub, scaling.least, scaling.most, scaling.grow_every_s)
    failures = FailuresWithReason(ray.train.FailureConfig(), hub, scaling.max_failures if saves else 0)
    stop = Stop(hub, scaling.stop_s if saves else 0)
    task = Task(config, schema, datasets, hub, checkpoint, fingerprint(datasets.get("train")))
    trainer = Trainer(
        getattr(workers, worker),
        train_loop_config=task,
        torch_config=OwnAddressTorchConfig(
            backend="nccl" if device == "cuda" else "gloo", timeout_s=scaling.timeout_s
        ),
        scaling_config=ray_scaling,
        run_config=_ray_run(checkpoint if saves else f"{config.run.dir}/ray"),
        policies={"scaling_policy": room, "failure_policy": failures},
        on_signal=stop.install,
    )
    with stop, watch.reading(hub):
        try:
            trainer.fit()
        except Exception as error:
            if stop.signal is None:
                raise _explain(error, config, ray.get(hub.cause.remote(), timeout=10)) from None
    if watch.result is None and stop.signal is not None:
        raise Interrupted(stop.signal, watch.stopped_at)
    if watch.result is None:
        raise RunError("the workers ended without a result", where=config.run.dir)
    return watch.result


def bundle(config: RunConfig, device: str) -> dict[str, float]:
    """What Ray sets aside for a worker.

    Without GPUs this has the CPUs of the worker's readers, whose tasks then ask for none: workers that take
    all CPUs of the nodes that are left would wait for ever for data. With GPUs, other nodes read.
    """
    scaling = config.scaling
    if device == "cuda":
        return {"CPU": scaling.cpus_per_worker, "GPU": 1}
    return {"CPU": scaling.cpus_per_worker + config.data.readers}


# How soon the end, or an error, is seen; how long Ray waits for places that are not there after all; and no
# watcher for nodes that will go, because policies.RoomOnNodes looks for them sooner and needs no barrier.
RAY_TRAIN = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "20",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
}


def _ray_run(folder: str) -> Any:
    """Ray Train's own folder is that of the checkpoints, because it is told of those inside it only.

    What an earlier driver noted there is removed: half written, it would keep Ray Train from starting. Which
    checkpoint is the newest is found out by looking (checkpoint.files).
    """
    import ray.train

    filesystem, path = open_filesystem(f"{folder}/checkpoint_manager_snapshot.json")
    if filesystem.get_file_info(path).is_file:
        filesystem.delete_file(path)
    filesystem, path = open_filesystem(folder)  # rather than its address, which Ray Train would show
    place, _, name = path.rpartition("/")
    return ray.train.RunConfig(name=name, storage_path=place, storage_filesystem=filesystem)


def fingerprint(dataset: Dataset | None) -> str:
    """Of the row groups that the cursor counts: their files' names and rows, in order; not where they lie."""
    if dataset is None:
        return ""
    text = "\n".join(
        f"{group.path.rpartition('/')[2]} {group.index} {group.rows}" for group in dataset.groups
    )
    return hashlib.sha256(text.encode()).hexdigest()


def _explain(error: Exception, config: RunConfig, sentence: str) -> RaytrecError:
    """The error for people behind what Ray raised; the whole story goes to error.txt in the run folder."""
    cause = root_cause(error)
    story = Path(config.run.dir) / "error.txt"
    story.write_text(hide("".join(traceback.format_exception(error))))
    if isinstance(cause, RaytrecError):
        return cause
    last = [line for line in str(cause).splitlines() if line.strip()]
    return RunError(
        f"training failed: {sentence or (last[-1] if last else type(cause).__name__)}",
        where=f"the traceback is in {story}",
    )
