"""Ray Train workers whose GPUs are stand-ins, on a Ray that counts GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

from raytrec.worker.rendezvous import OwnAddressBackend, OwnAddressConfig


class StandInBackend(OwnAddressBackend):
    """Gives each worker its stand-in before its process group begins."""

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        if backend_config.backend == "nccl":
            worker_group.execute(enter)
        super().on_start(worker_group, backend_config)


class StandInConfig(OwnAddressConfig):
    """Configuration of a StandInBackend."""

    @property
    def backend_cls(self) -> type:
        return StandInBackend


def enter() -> None:
    """This process has GPUs from now on: those that Ray lets it see."""
    from standin import cuda

    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")
    _contexts.append(cuda(count=len(seen)))
    _contexts[-1].__enter__()


_contexts: list[Any] = []  # never left: a worker's process ends with its run


@contextmanager
def workers_with_stand_ins() -> Iterator[None]:
    """A block in which the workers of runs have stand-ins for the GPUs that Ray counts.

    They must find this module: by PYTHONPATH.
    """
    with (
        patch("raytrec.worker.rendezvous.OwnAddressConfig", StandInConfig),
        patch("raytrec.driver.nodes.built_for", lambda: "cuda"),
    ):
        yield


@contextmanager
def local_ray(gpus: int) -> Iterator[None]:
    """A local Ray that counts so many GPUs; the workers of runs have stand-ins for them."""
    import ray

    from raytrec.cluster.session import ray_session

    counted = patch("ray.init", partial(ray.init, num_gpus=gpus))
    with counted, workers_with_stand_ins() if gpus else nullcontext(), ray_session(num_cpus=8):
        yield
