"""The Ray of a run: joined, or a local one that is started again when its raylet has ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

from raytrec.cluster.lifeline import RAYLET, RayLost
from raytrec.cluster.session import in_job, is_stuck, ray_session, started_here
from raytrec.common.storage import relative
from raytrec.config.run_config import RunConfig
from raytrec.driver.launch import local_cpus
from raytrec.driver.warm_workers import warm_workers

T = TypeVar("T")


class Failures(Protocol):
    """Who is told of failures: recorder.Watch."""

    def failed(self, cause: str, again: bool) -> None: ...


@contextmanager
def session_of(config: RunConfig, cpus: int | None = None) -> Iterator[None]:
    """The Ray of a command that starts workers (cluster.session.ray_session), forked from a warm process.

    Args:
        cpus: logical ones of a local Ray; default: those of the workers and their readers.
    """
    cpus = cpus or local_cpus(config)
    with warm_workers(config.scaling.address), ray_session(config.scaling.address, cpus):
        yield


def run_in_session(config: RunConfig, watch: Failures, work: Callable[[], T], cpus: int | None = None) -> T:
    """Does a run's work in a Ray session; again in a new one where the local Ray's raylet has ended.

    That counts against scaling.max_failures. All processes of the Ray before have ended by then, so that none
    still writes. A cluster that was joined is not ours to start; and Ray ends a process when its GCS has been
    gone for a minute.

    Args:
        watch: told when all workers have ended with it.
        work: resumes from the newest checkpoint when it is called again.
        cpus: as of `session_of`.

    Raises:
        RayLost: it cannot be started again, or too often.
    """
    left = config.scaling.max_failures
    while True:
        try:
            with session_of(config, cpus):
                ours = started_here()
                return work()
        except RayLost as lost:
            left -= 1
            again = ours and lost.part == RAYLET and left >= 0 and not is_stuck()
            watch.failed(lost.what, again)
            if not again:
                raise with_resume(lost, config) from None


def with_resume(lost: RayLost, config: RunConfig) -> RayLost:
    """The error, with how to resume the run."""
    do = f"resume from the last checkpoint: {resume_command(config)}"
    return RayLost(lost.what, where=lost.where, do=do)


def resume_command(config: RunConfig) -> str:
    """The command that resumes a run; of a job, what its user does."""
    if in_job():
        return "submit the same again"
    return f"raytrec train --resume {relative(Path(config.run.dir))}"
