"""The `raytrec` command, extended to record when the command and its ranks reach certain moments.

    START_MOMENTS=FILE python benchmarks/moments.py train CONFIG

Each line of FILE is a Moment. benchmarks/start.py uses this script.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

FILE = "START_MOMENTS"
RANK, FIRST = "rank began", "first step"


@dataclass(frozen=True)
class Moment:
    """Time at which a part of a run's start ended.

    Attributes:
        name: Name of the moment.
        unix_s: Time in seconds since 1970.
        pid: Id of the process that recorded the moment.
    """

    name: str
    unix_s: float
    pid: int


def note(name: str) -> None:
    """Append a moment, reached now, to the file."""
    line = json.dumps(asdict(Moment(name, time.time(), os.getpid()))) + "\n"
    with open(os.environ[FILE], "a", encoding="utf-8") as file:
        file.write(line)


def after(owner: Any, name: str, moment: str, once: bool = False) -> None:
    """Replace a function with one that records a moment each time, or only the first time, it returns."""
    function, calls = getattr(owner, name), []

    def noting(*args: Any, **options: Any) -> Any:
        value = function(*args, **options)
        if not (once and calls):
            note(moment)
        calls.append(moment)
        return value

    setattr(owner, name, noting)


def timed_train_worker(task: Any) -> None:
    """Run `train_worker` on a rank and record the rank's moments."""
    note(RANK)
    from raytrec.data.stream import PrefetchIterator
    from raytrec.worker import checkpointing, loop, observers, trainer
    from raytrec.worker.context import WorkerContext

    entered = WorkerContext.enter

    def enter(task: Any) -> WorkerContext:
        context = entered(task)
        note("entered")
        return context

    WorkerContext.enter = enter  # type: ignore[method-assign]
    after(trainer, "build_step", "built")
    after(checkpointing.CheckpointManager, "__init__", "restored", once=True)
    after(observers.ProbeScheduler, "begin", "checked")  # the last observer
    after(PrefetchIterator, "__next__", "first batch", once=True)
    after(checkpointing.CheckpointManager, "after_step", FIRST, once=True)
    loop.train_worker(task)


def main() -> None:
    """Run the command; workers look up `timed_train_worker` by its name in this module."""
    from raytrec.cluster.session import warm_up_early

    warm_up_early()  # as in the command, before the other imports
    import moments

    from raytrec import cli
    from raytrec.driver import run

    note("driver imported")
    after(run, "check_plan", "data read")
    after(run, "_preload_imports", "Ray imported")
    run_in_session: Callable[..., Any] = run.run_in_session

    def in_session(config: Any, failed: Any, work: Callable[[], Any]) -> Any:
        def noted() -> Any:
            note("Ray started")
            return work()

        return run_in_session(config, failed, noted)

    run.run_in_session = in_session
    begin = run.Watch.reading

    def reading(self: Any, coordinator: Any) -> Any:
        note("controller asked")
        return begin(self, coordinator)

    run.Watch.reading = reading  # type: ignore[method-assign]
    run.train_worker = moments.timed_train_worker
    cli.main(sys.argv[1:])


if __name__ == "__main__":
    main()
