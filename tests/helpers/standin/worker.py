"""Ray Train workers with stand-in GPUs, on a Ray with simulated GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

from raytrec.worker.rendezvous import OwnAddressBackend, OwnAddressConfig


class StandInBackend(OwnAddressBackend):
    """Ray Train backend that sets up the stand-in of each worker before its process group."""

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        if backend_config.backend == "nccl":
            worker_group.execute(enter_stand_in)
        super().on_start(worker_group, backend_config)


class StandInConfig(OwnAddressConfig):
    """Configuration of a StandInBackend."""

    @property
    def backend_cls(self) -> type:
        return StandInBackend


def enter_stand_in() -> None:
    """Set up the stand-in with the GPUs that Ray assigned to this process."""
    from standin import use_stand_in_gpu

    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")
    _contexts.append(use_stand_in_gpu(count=len(seen)))
    _contexts[-1].__enter__()


_contexts: list[Any] = []  # never exited: the worker process ends with its run


@contextmanager
def use_stand_in_workers() -> Iterator[None]:
    """Give the workers of runs in this block stand-in GPUs.

    PYTHONPATH of the workers must include this package.
    """
    with (
        patch("raytrec.worker.rendezvous.OwnAddressConfig", StandInConfig),
        patch("raytrec.driver.nodes.get_build_device", lambda: "cuda"),
    ):
        yield


@contextmanager
def start_ray_with_stand_ins(gpus: int) -> Iterator[None]:
    """Start a local Ray with `gpus` simulated GPUs; workers of runs get stand-in GPUs."""
    import ray

    from raytrec.cluster.session import ray_session

    counted = patch("ray.init", partial(ray.init, num_gpus=gpus))
    with counted, use_stand_in_workers() if gpus else nullcontext(), ray_session(num_cpus=8):
        yield
