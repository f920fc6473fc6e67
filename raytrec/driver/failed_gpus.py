"""GPUs that have failed are left out. Ray cannot take one away from a node, so their places are held."""

from __future__ import annotations

from time import monotonic
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raytrec.common.errors import GpuFailed
from raytrec.compat.ray_core import starts_nodes

PATIENCE_S = 10.0  # until the group's processes have given their GPUs back


class FailedGpus:
    """Those that this run leaves out, until its controller ends.

    Args:
        least: workers. A run without as many other GPUs could only wait.
    """

    def __init__(self, least: int):
        self._least = least
        self._held: list[Any] = []

    def leave_out(self, failed: GpuFailed) -> bool:
        """Takes a GPU for itself, so that no worker is given it; False where the run cannot do without it."""
        gpus = sum(node["Resources"].get("GPU", 0) for node in ray.nodes() if node["Alive"])
        if gpus - len(self._held) - 1 < self._least and not starts_nodes():
            return False
        node, gpu = failed.place
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        holder = ray.remote(num_cpus=0, num_gpus=1)(_Holder).options(scheduling_strategy=there)
        others, until = [], monotonic() + PATIENCE_S
        try:
            # Ray chooses among those that are free: all are taken until it is this one.
            while (left := until - monotonic()) > 0:
                others.append(holder.remote())
                if ray.get(others[-1].gpu.remote(), timeout=left) == gpu:
                    self._held.append(others.pop())
                    return True
        except (ray.exceptions.GetTimeoutError, ray.exceptions.RayActorError):
            pass
        finally:
            for other in others:
                ray.kill(other)
        return False


class _Holder:
    def gpu(self) -> str:
        return ray.get_runtime_context().get_accelerator_ids()["GPU"][0]
