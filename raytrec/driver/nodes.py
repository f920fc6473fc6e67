"""What the cluster's nodes have for a run: asked by the driver before a worker starts; no GPU is taken."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from raytrec.common.installed import built_for
from raytrec.embeddings.planner.hosts import host_memory

ANSWER_S = 60.0  # a node that Ray counts may be gone, or may have to start a process first


@dataclass(frozen=True)
class GpuNode:
    """A node with GPUs.

    Attributes:
        address: of the node.
        gpus: as many as Ray counts.
        built_for: the device that its packages are for; None: it did not answer, or has no torch.
        gpu_memory: bytes of its smallest GPU that programs can use; None: not known.
        host_memory: bytes of main memory; None: not known.
    """

    address: str
    gpus: int
    built_for: str | None = None
    gpu_memory: int | None = None
    host_memory: int | None = None


def is_local() -> bool:
    """Whether all nodes are this machine, over loopback: then they share this process's environment."""
    import ray

    return all(node["NodeManagerAddress"] == "127.0.0.1" for node in ray.nodes())


def alive_nodes() -> list[dict[str, Any]]:
    import ray

    return [node for node in ray.nodes() if node["Alive"]]


def gpu_nodes() -> list[GpuNode]:
    """The nodes with GPUs, and what each of them says of itself; one that does not answer stays in the list.

    They are asked by tasks that need neither CPU nor GPU, so that others' work is no reason to wait.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

    nodes = [node for node in alive_nodes() if node["Resources"].get("GPU")]
    found = [GpuNode(node["NodeManagerAddress"], int(node["Resources"]["GPU"])) for node in nodes]
    if is_local():
        return [GpuNode(node.address, node.gpus, **look_here()) for node in found]
    look = ray.remote(num_cpus=0, max_retries=0)(look_here)
    asked = [look.options(scheduling_strategy=On(node["NodeID"], soft=False)).remote() for node in nodes]
    answered, _ = ray.wait(asked, num_returns=len(asked), timeout=ANSWER_S) if asked else ([], [])
    said = [_answer(ref) if ref in answered else {} for ref in asked]
    return [GpuNode(node.address, node.gpus, **each) for node, each in zip(found, said, strict=True)]


def _answer(ref: Any) -> dict[str, Any]:
    import ray

    try:
        return ray.get(ref)
    except ray.exceptions.RayError:  # the node has gone, or cannot start a process: workers will say so
        return {}


def look_here() -> dict[str, Any]:
    """What GpuNode has of the machine that this process runs on."""
    return {"built_for": built_for(), "gpu_memory": _gpu_memory(), "host_memory": host_memory()}


def _gpu_memory() -> int | None:
    """Bytes of this machine's smallest GPU, over NVML, which needs no context on it.

    The driver's reserve is not counted, as in torch's total_memory. Of a GPU that is cut into MIG instances
    only these are used, and which ones is not known here.
    """
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no library, or no driver
        return None
    try:
        visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
        names = [name for name in visible if name] or list(map(str, range(pynvml.nvmlDeviceGetCount())))
        return min(map(_usable_memory, names))
    except (pynvml.NVMLError, ValueError):
        return None
    finally:
        pynvml.nvmlShutdown()


def _usable_memory(name: str) -> int:
    """Of a GPU with this number or UUID, as in CUDA_VISIBLE_DEVICES.

    Raises:
        ValueError: it is cut into instances, or is one.
    """
    import pynvml

    if name.startswith("MIG"):
        raise ValueError(name)
    by_number, by_uuid = pynvml.nvmlDeviceGetHandleByIndex, pynvml.nvmlDeviceGetHandleByUUID
    handle = by_number(int(name)) if name.isdigit() else by_uuid(name)
    try:
        if pynvml.nvmlDeviceGetMigMode(handle)[0]:
            raise ValueError(name)
    except pynvml.NVMLError:  # a GPU without MIG
        pass
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    return memory.total - memory.reserved
