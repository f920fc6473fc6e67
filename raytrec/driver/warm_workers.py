"""The warm process of a command that will start workers: what it imports, and for how long it is there."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from raytrec.cluster.session import stays_here
from raytrec.cluster.warm import cool_down, warm_up

# What ranks, read tasks and Ray Train's controller import: first what does not import Ray.
MODULES = ("torch", "torchrec", "torch.distributed.checkpoint", "pandas", "pyarrow.dataset", "pydantic")
ON_RAY = (
    "ray.data",
    "ray.train.torch",
    "raytrec.driver.policies",
    "raytrec.driver.coordinator",
    "raytrec.worker.loop",
    "raytrec.worker.build",
    "raytrec.worker.checkpointing",
    "raytrec.worker.evaluate",
    "raytrec.worker.initial_state",
    "raytrec.worker.observers",
    "raytrec.data.stream",
    "raytrec.data.rows",
    "torchrec.metrics.rec_metric",  # and with it torchmetrics and PIL, for the first step
)


def begin_early() -> None:
    """Starts it before it is known for certain that this command will have a Ray of its own.

    A process that has imported Ray is no command that begins.
    """
    if stays_here(None) and "ray" not in sys.modules:
        warm_up(MODULES, ON_RAY)


@contextmanager
def warm_workers(address: str | None) -> Iterator[None]:
    """A block whose Ray, if it is a local one that is started there, has its workers forked.

    Of a cluster that is joined, workers are started by its own raylets.

    Args:
        address: scaling.address.
    """
    import ray

    if ray.is_initialized():  # somebody else's, and so is a warm process that it may have
        yield
        return
    if stays_here(address):
        warm_up(MODULES, ON_RAY)
    try:
        yield
    finally:
        cool_down()
