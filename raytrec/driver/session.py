"""The Ray of a command, and the warm process that its workers are forked from.

Imports little: a command calls `begin_early` before its other imports.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from raytrec.cluster.lifeline import RAYLET, RayLost
from raytrec.cluster.session import in_job, is_stuck, ray_session, started_here, stays_here
from raytrec.cluster.warm import cool_down, warm_up
from raytrec.common.storage import relative

if TYPE_CHECKING:
    from raytrec.config.run_config import RunConfig

T = TypeVar("T")


@contextmanager
def session_of(config: RunConfig) -> Iterator[None]:
    """The Ray of a command that starts workers (cluster.session.ray_session), forked from a warm process."""
    address = config.scaling.address
    with warm_workers(address), ray_session(address, local_cpus(config)):
        yield


def run_in_session(config: RunConfig, failed: Callable[[str, bool], None], work: Callable[[], T]) -> T:
    """Does a run's work in a Ray session; again in a new one where the local Ray's raylet has ended.

    That counts against scaling.max_failures. All processes of the Ray before have ended by then, so that none
    still writes. A cluster that was joined is not ours to start; and Ray ends a process when its GCS has been
    gone for a minute.

    Args:
        failed: called with the failure that ended all workers, and whether they are started again.
        work: resumes from the newest checkpoint when it is called again.

    Raises:
        RayLost: it cannot be started again, or too often.
    """
    left = config.scaling.max_failures
    while True:
        try:
            with session_of(config):
                ours = started_here()
                return work()
        except RayLost as lost:
            left -= 1
            again = ours and lost.part == RAYLET and left >= 0 and not is_stuck()
            failed(lost.what, again)
            if not again:
                do = f"resume from the last checkpoint: {resume_command(config)}"
                raise RayLost(lost.what, where=lost.where, do=do) from None


def resume_command(config: RunConfig, command: str = "train") -> str:
    """Return the command that resumes a run, or a search (tune); in a job, what its user does."""
    if in_job():
        return "submit the same again"
    return f"raytrec {command} --resume {relative(Path(config.run.dir))}"


def local_cpus(config: RunConfig) -> int:
    """Logical CPUs of a local cluster: those of the workers and their readers."""
    return int(config.scaling.max_workers * bundle(config, "cpu")["CPU"])


def bundle(config: RunConfig, device: str, others_read: bool = False) -> dict[str, float]:
    """What Ray sets aside for a worker.

    This has the CPUs of the worker's readers, whose tasks therefore ask for none. Tasks that did would wait
    for ever where workers, or the paused tasks of another stream, hold all CPUs: an evaluation begins while
    those of training have still to hand over what they have read.

    Args:
        others_read: whether all rows are read on nodes without GPUs, whose CPUs then serve for that.
    """
    scaling = config.scaling
    cpus: float = scaling.cpus_per_worker + (0 if others_read else config.data.readers)
    return {"CPU": cpus} | ({"GPU": 1.0} if device == "cuda" else {})


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
    "raytrec.worker.observers",
    "raytrec.data.stream",
    "raytrec.data.rows",
    "torchrec.metrics.rec_metric",  # and with it torchmetrics and PIL, for the first step
)


def begin_early() -> None:
    """Starts the warm process before it is certain that this command will have its own Ray.

    A process that has imported Ray is not a command that begins.
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

    if ray.is_initialized():  # a caller's, and so is a warm process that it may have
        yield
        return
    if stays_here(address):
        warm_up(MODULES, ON_RAY)
    try:
        yield
    finally:
        cool_down()
